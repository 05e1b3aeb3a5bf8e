"""All ranks of a job together: who is late, what that costs the others, and where the late rank's time goes.

Each trace is reduced to a :class:`nsightkit.analysis.ranks.one_rank.Look`, in this process, in others or on a Dask
scheduler's workers. :func:`combine` matches the collectives, aligns the clocks and makes a :class:`Job`. :func:`survey`
does all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from nsightkit.analysis.core.intervals import uncovered
from nsightkit.analysis.ranks import alignment, lateness
from nsightkit.analysis.ranks.one_rank import Look, look_at_ranks, rank_of
from nsightkit.errors import AnyPath, TraceError, UsageError
from nsightkit.text import Json, time_text
from nsightkit.trace import store
from nsightkit.trace.model import Trace

#: Up to so many traces are read in this process: starting others takes longer.
FEW_TRACES = 4
#: Seconds to wait for a scheduler to answer.
ANSWER_S = 20

_SUFFIXES = (".json", ".json.gz", ".sqlite", ".nsys-rep")
#: JSON documents of other kinds, such as source.json, are smaller; a larger one is a trace.
_LARGEST_OTHER_BYTES = 65_536
_DIGITS = re.compile(r"(\d+)")
_FOLDER_HINT = "give a folder with a .json, .json.gz, .sqlite or .nsys-rep for each rank"
_REMEDY = "give each job its own folder"


@dataclasses.dataclass(frozen=True)
class Job:
    """All ranks of a job, with times on the clock of the lowest rank.

    Parameters
    ----------
    ranks : DataFrame
        One row per rank: ``rank, file, tool, steps, span_ns, busy_ns, idle_ns, compute_ns, communication_ns``,
        ``overlapped_ns, exposed_ns, collectives``, ``late_ns`` (how much later than the middle rank it arrived, over
        all collectives), ``waited_ns`` (its wait for others in collectives), ``clock_offset_ns`` (its clock minus the
        lowest rank's) and ``clock_spread_ns`` (how far the ends of a collective still lie apart; NA if nothing ties
        its clock to others).
    stragglers : DataFrame
        See :func:`nsightkit.analysis.ranks.lateness.find_stragglers`.
    collectives : DataFrame
        One row per matched collective, by its start: ``group, kind, bytes, ranks`` (seen), ``last_rank, wait_ns`` (sum
        over ranks), ``transfer_ns`` (last arrival to mean end; NA if ranks of the group are missing), ``total_ns``,
        ``exposed_ns`` (means over ranks).
    arrivals : DataFrame
        One row per rank and collective, in each collective by arrival: ``collective, group, group_id, kind, rank``,
        ``last_rank, step, start_ns, end_ns, wait_ns, exposed_ns``.
    lost : list of dict
        Missing or unreadable traces: ``file`` (None for ranks without one), ``ranks``, ``reason``.
    notes : list of str
        Limits of the figures, one sentence each.
    gain_ns : int
        The most that the job would save without late ranks.
    """

    ranks: pd.DataFrame
    stragglers: pd.DataFrame
    collectives: pd.DataFrame
    arrivals: pd.DataFrame
    lost: list[Json]
    notes: list[str]
    gain_ns: int

    def findings(self) -> list[str]:
        """Name the late ranks in a few sentences.

        Returns
        -------
        list of str
        """
        if len(self.stragglers):
            late = " and ".join(f"rank {rank}" for rank in self.stragglers["rank"])
            gain = f"With {late} on time, the job would save at most {time_text(self.gain_ns)}"
            longest_ns = self.ranks["span_ns"].max()
            if longest_ns > 0:  # without GPU work the span is NaN or 0
                gain += f" of {time_text(longest_ns)}"
            return [*self.stragglers["text"], f"{gain}."]
        if len(self.collectives):
            return [f"No rank is late more often than chance explains ({len(self.collectives):,} collectives)."]
        return ["The traces share no collective, so late ranks cannot be named."]

    def kinds(self) -> pd.DataFrame:
        """Sum up the matched collectives by group, kind and size.

        Returns
        -------
        DataFrame
            ``group, kind, bytes, count, total_ns, wait_ns, transfer_ns, exposed_ns`` (sums of the means over ranks);
            by falling ``total_ns``.
        """
        # `wait_ns` is a sum over ranks; the other times are means.
        table = self.collectives.assign(wait_ns=self.collectives["wait_ns"] / self.collectives["ranks"])
        by_kind = table.groupby(["group", "kind", "bytes"], dropna=False)
        kinds = by_kind[["total_ns", "wait_ns", "transfer_ns", "exposed_ns"]].sum(min_count=1)
        kinds.insert(0, "count", by_kind.size())
        return kinds.reset_index().sort_values("total_ns", ascending=False, ignore_index=True)

    def summary(self) -> Json:
        """Give ranks, late ranks and collectives as plain values, for JSON.

        Returns
        -------
        dict
            ``ranks, stragglers, collectives`` (by kind), ``lost, notes``, lists; and ``gain_ns``.
        """
        return {
            "ranks": self.ranks.to_dict("records"),
            "stragglers": self.stragglers.to_dict("records"),
            "collectives": self.kinds().to_dict("records"),
            "lost": self.lost,
            "notes": self.notes,
            "gain_ns": self.gain_ns,
        }


def survey(
    sources: AnyPath | Iterable[AnyPath | Trace],
    scheduler: str | None = None,
    workers: int | None = None,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> Job:
    """Read the traces of all ranks of a job and compare them.

    Parameters
    ----------
    sources : path-like, or iterable of path-like or Trace
        A folder with one trace per rank, or the traces.
    scheduler : str, optional
        Address of a Dask scheduler whose workers have nsightkit and see the files under the same paths.
    workers : int, optional
        Processes of this machine; 0 reads the traces in this one. Default: one per core, none for a handful of traces.
    progress : callable, optional
        Called with the number of traces read, and of all.

    Returns
    -------
    Job

    Raises
    ------
    TraceError
        The folder holds no traces, or none of them can be read.
    UsageError
        No traces are given, or they are of several jobs; Dask is not installed, or its scheduler does not answer.
    """
    chosen = traces_in(sources) if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not chosen:
        raise UsageError("no traces were given")
    looks: list[Look] = []
    files: list[Path] = []
    for source in chosen:
        if isinstance(source, Trace):
            looks += look_at_ranks(source)
        else:
            files.append(Path(source).absolute())
    if workers is None:
        workers = 0 if len(files) <= FEW_TRACES else os.cpu_count() or 1
    lost: list[Json] = []
    answers = _looks_or_reasons(files, scheduler, workers)
    for number, (file, answer) in enumerate(zip(files, answers, strict=True), 1):
        name = _relative_name(file, files)
        if isinstance(answer, str):  # the reason why the file cannot be read
            rank = rank_of(file)
            lost.append({"file": name, "ranks": [] if rank is None else [rank], "reason": answer})
        else:
            looks += [dataclasses.replace(entry, file=name) for entry in answer]
        if progress is not None:
            progress(number, len(files))
    # Each trace that can be read gives a look, so without any look all sources are files, and lost.
    if not looks:
        reason = f"the first, {files[0].name}, {lost[0]['reason']}"
        raise TraceError(files[0].parent, f"none of {len(lost)} traces can be read", reason)
    return combine(looks, lost)


# ---------------------------------------------------------------- the files


def traces_in(folder: AnyPath) -> list[Path]:
    """Find the traces in a folder, one per rank.

    PyTorch profiler traces (``.json``, ``.json.gz``), Nsight Systems exports and reports, folders of tables. A report
    with its export beside it is left out. If the folder holds none directly, its folders are searched.

    Parameters
    ----------
    folder : path-like

    Returns
    -------
    list of Path
        By name, numbers by size.

    Raises
    ------
    TraceError
        The folder does not exist, or holds no trace.
    """
    folder = Path(folder)
    try:
        traces = [path for path in folder.iterdir() if _is_trace(path)]
        if not traces:
            traces = [path for path in folder.glob("*/*") if _is_trace(path)]
    except OSError as error:
        raise TraceError(folder, f"cannot be listed ({error.strerror})", _FOLDER_HINT) from error
    if not traces:
        raise TraceError(folder, "holds no traces", _FOLDER_HINT)
    return sorted(traces, key=_by_number)


def _by_number(path: Path) -> list[int | str]:
    """A sort key that puts 2 before 10: "rank2.json" becomes ["rank", 2, ".json"]."""
    return [int(part) if part.isdecimal() else part for part in _DIGITS.split(str(path))]


def _is_trace(path: Path) -> bool:
    """Whether a file or folder is a trace, by its name; a folder or a small JSON document by what it holds."""
    if path.name.startswith(".") or path.suffix == ".nsightkit-cache":
        return False
    if path.is_dir():
        return store.is_store(path) or any(path.glob("*.parquet"))
    if path.suffix == ".nsys-rep":
        return not path.with_suffix(".sqlite").exists()  # the report's export is read instead
    # Only a small .json without a rank in its name has to be read to tell.
    if path.suffix != ".json" or rank_of(path) is not None or path.stat().st_size > _LARGEST_OTHER_BYTES:
        return path.name.endswith(_SUFFIXES)
    # A JSON object of another kind, such as source.json, may lie beside the traces; a list can only be one of events.
    text = path.read_bytes()
    return b"traceEvents" in text or not text.startswith(b"{")


def _relative_name(file: Path, files: Sequence[Path]) -> str:
    """The path of a file below the folder that holds all files: short, and unique among them."""
    return os.path.relpath(file, os.path.commonpath([path.parent for path in files]))


# ---------------------------------------------------------------- all of them


def combine(looks: Sequence[Look], lost: Sequence[Json] = ()) -> Job:
    """Put the ranks of a job together.

    Parameters
    ----------
    looks : sequence of Look
        In the order of their files, which numbers those without a known rank.
    lost : sequence of dict
        Traces that cannot be read: ``file, ranks, reason``.

    Returns
    -------
    Job

    Raises
    ------
    UsageError
        The traces are of several jobs.
    """
    world_sizes = sorted({entry.world_size for entry in looks if entry.world_size})
    if len(world_sizes) > 1:
        # Collectives of two jobs are not the same where their sequence numbers are.
        raise UsageError(
            f"the traces are of several jobs, of {world_sizes[0]} and of {world_sizes[1]} ranks; {_REMEDY}"
        )
    look_of_rank = _look_of_rank(looks)
    world_size = max([*world_sizes, max(look_of_rank) + 1])
    lost_or_absent = list(lost)
    absent = set(range(world_size)).difference(look_of_rank, *(trace["ranks"] for trace in lost))
    if absent:
        lost_or_absent.append(
            {"file": None, "ranks": sorted(absent), "reason": f"no trace here (the job has {world_size} ranks)"}
        )
    # Ranks that are processes of one capture share its clock; every other rank has a separate capture.
    capture_of_rank = {}
    for rank, entry in look_of_rank.items():
        capture_of_rank[rank] = str(rank) if entry.process is None else entry.file
    collectives = {rank: entry.collectives for rank, entry in look_of_rank.items()}
    arrivals, clocks, notes = alignment.match_and_align(collectives, capture_of_rank)
    # One row per rank and collective: in each collective by arrival, so that the last row belongs to the last rank.
    arrivals = arrivals.sort_values(["collective", "start_ns", "rank"], kind="stable", ignore_index=True)
    by_collective = arrivals.groupby("collective")
    wait = (by_collective["start_ns"].transform("last") - arrivals["start_ns"]).astype("Int64")
    arrivals["wait_ns"] = wait.where(arrivals["kind"].isin(alignment.SYNCHRONIZING))
    arrivals["last_rank"] = by_collective["rank"].transform("last")
    # A capture that begins within a step does not know its number (-1); another rank's does.
    arrivals["step"] = by_collective["step"].transform("max")
    steps = pd.concat({rank: entry.steps.set_index("step") for rank, entry in look_of_rank.items()}, names=["rank"])
    watched_ns = float(steps.pop("wall_ns").groupby(level="rank").sum().median())
    # Lateness must exceed what the clocks' uncertainty may feign: three standard deviations. Where the spread is
    # unknown, the rank waits in no matched collective and cannot be late.
    floors_ns = 3 * clocks["spread_ns"].fillna(0)
    stragglers, gain_ns = lateness.find_stragglers(arrivals, steps, floors_ns, watched_ns)
    return Job(
        ranks=_rank_rows(look_of_rank, clocks, arrivals),
        stragglers=stragglers,
        collectives=_collective_rows(arrivals, world_size if len(look_of_rank) == world_size else -1),
        arrivals=arrivals,
        lost=lost_or_absent,
        notes=notes,
        gain_ns=gain_ns,
    )


def _look_of_rank(looks: Sequence[Look]) -> dict[int, Look]:
    """Give each look its rank: the trace's own, or the lowest that is free; in order of rank."""
    look_of_rank: dict[int, Look] = {}
    for entry in sorted(looks, key=lambda entry: entry.rank is None):  # known ranks first
        rank = entry.rank
        if rank is None:
            rank = next(number for number in itertools.count() if number not in look_of_rank)
        if rank in look_of_rank:
            raise UsageError(f"{look_of_rank[rank].file} and {entry.file} are both of rank {rank}; {_REMEDY}")
        look_of_rank[rank] = entry
    return dict(sorted(look_of_rank.items()))


def _collective_rows(arrivals: pd.DataFrame, world_size: int) -> pd.DataFrame:
    """One row per collective. `world_size`: the number of ranks if all were seen, else -1."""
    by_collective = arrivals.assign(total_ns=arrivals["end_ns"] - arrivals["start_ns"]).groupby("collective")
    # The rows of a collective are in order of arrival.
    table = by_collective.agg(
        first_arrival=("start_ns", "first"),
        last_arrival=("start_ns", "last"),
        size=("group_size", "first"),
        group=("group", "first"),
        kind=("kind", "first"),
        bytes=("bytes", "first"),
        ranks=("rank", "size"),
        last_rank=("last_rank", "first"),
        wait_ns=("wait_ns", "mean"),
        transfer_ns=("end_ns", "mean"),  # the last arrival is taken from it below
        total_ns=("total_ns", "mean"),
        exposed_ns=("exposed_ns", "mean"),
    )
    # The sum over ranks, but NA where ranks do not wait for each other.
    table["wait_ns"] *= table["ranks"]
    # A group of unknown size is complete if all ranks of the job are in it.
    is_complete = table["ranks"] == table["size"].where(table["size"] > 0, world_size)
    table["transfer_ns"] = (table["transfer_ns"] - table["last_arrival"]).where(is_complete)
    # Without waiting, who was last and when the transfer began mean nothing.
    of_waiting = ["last_rank", "transfer_ns"]
    table[of_waiting] = table[of_waiting].where(table["wait_ns"].notna())
    table["bytes"] = table["bytes"].where(table["bytes"] >= 0)
    table["group"] = table["group"].replace("", None)
    table = _in_whole_numbers(table).sort_values("first_arrival", kind="stable", ignore_index=True)
    return table.drop(columns=["first_arrival", "last_arrival", "size"])


def _rank_rows(look_of_rank: Mapping[int, Look], clocks: pd.DataFrame, arrivals: pd.DataFrame) -> pd.DataFrame:
    """One row per rank: its figures, how late it was and how long it waited, and its clock."""
    rows = []
    for rank, entry in look_of_rank.items():
        steps = int((entry.steps["step"] >= 0).sum())  # -1: the trace has no steps
        file = entry.file if entry.process is None else f"{entry.file}#{entry.process}"
        row = {"rank": rank, "file": file, "tool": entry.tool, "steps": steps}
        rows.append(row | entry.figures | {"collectives": len(entry.collectives)})
    times = arrivals.assign(late_ns=lateness.lateness(arrivals), waited_ns=waited(arrivals))
    sums = times.groupby("rank")[["late_ns", "waited_ns"]].sum(min_count=1)
    table = pd.DataFrame(rows).join(sums, on="rank")
    return _in_whole_numbers(table.join(clocks[["offset_ns", "spread_ns"]].add_prefix("clock_"), on="rank"))


def _in_whole_numbers(table: pd.DataFrame) -> pd.DataFrame:
    """Round to integers that can be NA, where a value is unknown."""
    return table.round().convert_dtypes()


def waited(arrivals: pd.DataFrame) -> pd.Series:
    """Measure the wait of each rank at each collective, without the part in which it waited at an earlier one.

    Parameters
    ----------
    arrivals : DataFrame
        See :class:`Job`.

    Returns
    -------
    Series of Int64
        In nanoseconds, NA for kinds in which ranks do not wait for each other.
    """
    wait = arrivals["wait_ns"].astype("Int64")
    wait_end = arrivals["start_ns"] + wait.fillna(0)
    # Of overlapping waits of a rank, each counts for what the earlier ones leave.
    return wait.where(wait.isna(), uncovered(arrivals["start_ns"], wait_end, key=arrivals["rank"]))


# ---------------------------------------------------------------- where they are read


def look_or_reason(path: str) -> list[Look] | str:
    """Reduce one file; an error must not take the other ranks with it.

    Parameters
    ----------
    path : str

    Returns
    -------
    list of Look, or str
        The reason if the file cannot be read.
    """
    try:
        return look_at_ranks(path)
    except TraceError as error:
        return f"{error.problem}; {error.remedy}"
    except Exception as error:
        return f"cannot be read as a trace ({_error_text(error)})"


def _looks_or_reasons(files: Sequence[Path], scheduler: str | None, workers: int) -> Iterator[list[Look] | str]:
    """Reduce each file, in order: yields its looks, or the reason why it cannot be read."""
    if scheduler is None and not workers:
        for file in files:
            yield look_or_reason(str(file))
        return
    with _executor(scheduler, workers) as executor:
        futures = [executor.submit(look_or_reason, str(file)) for file in files]
        for file, future in zip(files, futures, strict=True):
            error = future.exception()
            if error is None:
                yield future.result()
            elif len(files) > 1:
                # A worker that dies takes other traces' answers along: read again alone, only the deadly one is lost.
                yield from _looks_or_reasons([file], scheduler, 1)
            else:
                yield f"was lost with its worker ({_error_text(error)})"


@contextlib.contextmanager
def _executor(scheduler: str | None, workers: int) -> Iterator[Executor]:
    """Processes of this machine or of a Dask scheduler, with one interface."""
    if scheduler is None:
        # Spawned, not forked: a fork may wait forever for a lock that another thread of the caller held.
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            yield pool
        return
    try:
        from distributed import Client

        client: Any = Client(scheduler, timeout=ANSWER_S, set_as_default=False)  # type: ignore[no-untyped-call]
    except ImportError as error:
        raise UsageError("--scheduler needs Dask, which is not installed: pip install 'nsightkit[ranks]'") from error
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(f"--scheduler: no Dask scheduler answers at {scheduler!r}") from error
    with client:
        # Not pure: Dask must not answer from memory, for a path may hold another trace than the last time.
        yield client.get_executor(pure=False, retries=1)


def _error_text(error: object) -> str:
    """The type and the text of an error on one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
