"""The same questions to every rank of a job: who is late, what that costs the others, and what it does differently.

One trace per rank is looked at, wherever it runs (in this process, in others, on any Dask scheduler), and only small
tables come back. Together they show what no single trace shows: in a collective everybody waits for whoever comes
last.

The steps: :func:`traces_in` finds the files, :func:`look` reduces one to a :class:`Look`, :func:`combine` matches the
collectives, aligns the clocks and makes a :class:`Job` of them. :func:`survey` does all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core.intervals import uncovered
from nsightkit.analysis.ranks import alignment
from nsightkit.analysis.ranks import collectives as communication
from nsightkit.analysis.ranks import lateness as stragglers
from nsightkit.analysis.ranks.alignment import ranks_text
from nsightkit.analysis.ranks.one_rank import Look, look
from nsightkit.errors import NsightkitError, TraceError, UsageError
from nsightkit.trace import store
from nsightkit.trace.model import Trace

__all__ = ["ANSWER_S", "FEW", "Job", "Look", "attempt", "combine", "look", "survey", "traces_in", "waited"]

#: So many traces are looked at in this process: starting others takes longer.
FEW = 4
#: How long to wait for a scheduler.
ANSWER_S = 20

_DAY_NS = 86_400 * 10**9
#: A clock that shows more counts from 1970.
_EPOCH_NS = 10**18

_SUFFIXES = (".json", ".json.gz", ".sqlite", ".nsys-rep")
#: Larger documents are taken for traces.
_SMALL_BYTES = 1 << 16
_RANK = re.compile(r"(?i)(?<![a-z])(?<!local[-_. ])(?:global[-_. ]?)?(?:rank|worker)[-_. =]?(\d{1,6})(?!\d)")
_DIGITS = re.compile(r"(\d+)")
#: Columns of :meth:`Job.kinds`, and those of :attr:`Job.collectives`.
_OF_KIND = [
    *("group", "kind", "where", "ranks", "group_size", "bytes", "count", "total_ns", "wait_ns", "transfer_ns"),
    *("exposed_ns", "overlapped_ns", "skew_ns", "last_rank", "last_share", "bus_gb_per_s"),
]
_OF_COLLECTIVE = [
    *("collective", "group", "kind", "where", "sequence", "step", "ranks", "group_size", "bytes", "start_ns"),
    *("arrived_ns", "end_ns", "skew_ns", "last_rank", "late_ns", "wait_ns", "transfer_ns", "mean_ns", "exposed_ns"),
    *("overlapped_ns", "bus_gb_per_s"),
]
_DASK = "pip install 'nsightkit[ranks]'"


@dataclasses.dataclass(frozen=True)
class Job:
    """All ranks of a job, together. Times are on the clock of the lowest rank, as its own trace shows them.

    Parameters
    ----------
    ranks : DataFrame
        One row a rank: ``rank, rank_from`` (``trace``, ``name`` of the file, or ``order``), ``file, tool, devices``,
        ``steps, step_ns`` (median wall time of its steps), ``span_ns, busy_ns, idle_ns, compute_ns``,
        ``communication_ns, exposed_ns, overlapped_ns, collectives, matched, late_ns`` (how much it came later than the
        middle one of the ranks, over all collectives), ``waited_ns`` (how long it waited in collectives for others),
        ``clock_offset_ns`` (its source's clock less that of the lowest rank), ``clock_drift_ppm, clock_spread_ns``,
        ``clock_error_ns``.
    stragglers : DataFrame
        See :func:`nsightkit.analysis.ranks.lateness.find`.
    collectives : DataFrame
        One row for each matched collective: ``collective, group, kind, where, sequence, step, ranks`` (seen),
        ``group_size, bytes, start_ns`` (first arrival), ``arrived_ns`` (last arrival), ``end_ns, skew_ns, last_rank,
        late_ns`` (the last after the one before), ``wait_ns`` (of all ranks, together), ``transfer_ns`` (from the last
        arrival to the end), ``mean_ns, exposed_ns, overlapped_ns`` (means over the ranks), ``bus_gb_per_s``. Where not
        all ranks of the group were seen, the last arrival is not known: ``transfer_ns`` and ``bus_gb_per_s`` are NA.
    arrivals : DataFrame
        One row for each rank of each of them: ``collective, group, rank, step, start_ns, end_ns, wait_ns, exposed_ns``.
    steps : DataFrame
        One row a step: ``step, ranks, wall_ns`` (median), ``compute_ns`` (mean), ``compute_max_ns``, ``slowest`` (the
        rank that computed most), ``imbalance`` (the most computed over the mean, less 1), ``exposed_ns`` (mean),
        ``wait_ns`` (of all ranks, together).
    groups : DataFrame
        See :class:`nsightkit.analysis.ranks.alignment.Matched`.
    lost : list of dict
        What could not be looked at: ``file`` (None for ranks without one), ``ranks``, ``reason``.
    notes : list of str
        What the figures do not tell, one sentence each.
    gain_ns : int
        At most so much time all the ranks would save if no straggler were late.
    """

    ranks: pd.DataFrame
    stragglers: pd.DataFrame
    collectives: pd.DataFrame
    arrivals: pd.DataFrame
    steps: pd.DataFrame
    groups: pd.DataFrame
    lost: list[dict[str, Any]]
    notes: list[str]
    gain_ns: int

    def findings(self) -> list[str]:
        """Say what was found in a few sentences.

        Returns
        -------
        list of str
        """
        sentences: list[str] = self.stragglers["text"].tolist()
        if len(sentences) > 1:
            sentences.append(f"If all of them were on time, at most {self.gain_ns / 1e6:,.3f} ms would be saved.")
        elif not sentences and len(self.arrivals):
            count = len(self.collectives)
            compared = f"{count:,} collective{'' if count == 1 else 's'} compared"
            sentences.append(f"No rank is late more often, and by more, than chance explains ({compared}).")
        elif not sentences and len(self.ranks) > 1:
            sentences.append("No collective of two ranks could be matched, so who is late is not known.")
        uneven = self.steps[self.steps["ranks"] > 1].dropna(subset="imbalance")
        if len(uneven):
            worst = uneven.nlargest(1, "imbalance").to_dict("records")[0]
            sentences.append(
                f"In a typical step the rank that computes most does so {uneven['imbalance'].median():.1%} longer than "
                f"the mean; at worst, rank {worst['slowest']} in step {worst['step']}, {worst['imbalance']:.1%}."
            )
        return sentences

    def kinds(self) -> pd.DataFrame:
        """Sum up the matched collectives by group, kind and size.

        Returns
        -------
        DataFrame
            ``group, kind, where, ranks, group_size, bytes, count, total_ns`` (mean over ranks), ``wait_ns`` (mean),
            ``transfer_ns, exposed_ns, overlapped_ns`` (mean), ``skew_ns`` (median), ``last_rank`` (most often the
            last), ``last_share`` (of the collectives), ``bus_gb_per_s`` (median); by falling ``total_ns``.
        """
        if not len(self.collectives):
            return pd.DataFrame(columns=_OF_KIND)
        table = self.collectives.assign(wait_ns=self.collectives["wait_ns"] / self.collectives["ranks"])
        by = table.groupby(["group", "kind", "where", "bytes"], sort=False, dropna=False)
        result = by.agg(ranks=("ranks", "max"), group_size=("group_size", "first"), count=("ranks", "size"))
        result["total_ns"] = by["mean_ns"].sum()
        result["wait_ns"] = by["wait_ns"].sum(min_count=1)
        for column in ("transfer_ns", "exposed_ns", "overlapped_ns"):
            # A sum of what is not known of all is not known.
            result[column] = by[column].sum().where(by[column].count() == result["count"])
        result["skew_ns"] = by["skew_ns"].median()
        result["last_rank"] = by["last_rank"].agg(lambda last: last.mode().get(0, pd.NA))
        result["last_share"] = by["last_rank"].agg(lambda last: last.value_counts(normalize=True).max())
        result["bus_gb_per_s"] = by["bus_gb_per_s"].median()
        return result.reset_index()[_OF_KIND].sort_values("total_ns", ascending=False, ignore_index=True)

    def summary(self, each: bool = False) -> dict[str, Any]:
        """Give everything as plain values.

        Parameters
        ----------
        each : bool
            List every collective, and not only their kinds.

        Returns
        -------
        dict
            ``ranks, stragglers, collectives, steps, groups, lost, notes``, lists; and ``gain_ns``.
        """
        return {
            "ranks": self.ranks.to_dict("records"),
            "stragglers": self.stragglers.to_dict("records"),
            "collectives": (self.collectives if each else self.kinds()).to_dict("records"),
            "steps": self.steps.to_dict("records"),
            "groups": self.groups.to_dict("records"),
            "lost": self.lost,
            "notes": self.notes,
            "gain_ns": self.gain_ns,
        }


def survey(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str] | Trace],
    scheduler: str | None = None,
    workers: int | None = None,
    *,
    cache: bool | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Job:
    """Look at all ranks of a job.

    Parameters
    ----------
    sources : path-like, or iterable of path-like or Trace
        A folder with one trace a rank, or the traces.
    scheduler : str, optional
        Address of a Dask scheduler, whose workers must have nsightkit and see the files under the same paths.
    workers : int, optional
        Processes of this machine. 0: look at one after the other, in this process. By default as many as the machine
        has cores, and none for a handful of traces.
    cache : bool, optional
        As for :func:`nsightkit.load`.
    progress : callable, optional
        Called with the number of traces looked at, and of all.

    Returns
    -------
    Job

    Raises
    ------
    TraceError
        The folder holds no traces, or none of them can be read.
    UsageError
        No traces are given, Dask is not installed, or its scheduler does not answer.
    """
    chosen = traces_in(sources) if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not chosen:
        raise UsageError("no traces were given")
    looks: list[Look] = []
    files: list[Path] = []
    for number, item in enumerate(chosen):
        if isinstance(item, Trace):
            looks += _named(look(item), item.path or f"trace {number}")
        else:
            files.append(Path(item))
    answers: dict[int, list[Look] | str] = {}
    for number, answer in _answers(files, cache, scheduler, workers):
        answers[number] = answer
        if progress is not None:
            progress(len(answers), len(files))
    lost: list[dict[str, Any]] = []
    # Whichever answered first, the order is that of the files, and the names those that the caller gave.
    for number, file in enumerate(map(str, files)):
        answer = answers[number]
        if isinstance(answer, str):
            lost.append({"file": file, "ranks": _rank_of(file), "reason": answer})
        else:
            looks += _named(answer, file)
    if not looks:
        first = f"the first, {Path(lost[0]['file']).name}, {lost[0]['reason']}"
        where = sources if isinstance(sources, (str, os.PathLike)) else files[0]
        raise TraceError(where, f"none of {len(lost)} traces can be read", first)
    return combine(looks, lost)


def _named(looks: list[Look], file: str) -> list[Look]:
    return [dataclasses.replace(entry, file=file) for entry in looks]


# ---------------------------------------------------------------- the files


def traces_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Find the traces in a folder, one a rank.

    PyTorch profiler traces (``.json``, ``.json.gz``), Nsight Systems exports and reports, folders of tables. A report
    whose export lies beside it is left out. In a folder that holds none directly, its folders are looked through.

    Parameters
    ----------
    folder : path-like

    Returns
    -------
    list of Path
        In the order of their names, numbers by size.

    Raises
    ------
    TraceError
        There is no such folder, or no trace in it.
    """
    folder = Path(folder)
    try:
        traces = _traces(folder)
        if not traces:
            for inner in _seen(folder):
                traces += _traces(inner) if inner.is_dir() else []
    except FileNotFoundError as error:
        raise TraceError(folder, "no such folder", "check the path") from error
    except NotADirectoryError as error:
        raise TraceError(folder, "is not a folder", "give the folder that holds one trace a rank") from error
    except OSError as error:
        raise TraceError(folder, f"cannot be read ({error.strerror or error})", "check its owner and mode") from error
    if not traces:
        remedy = "give a folder with a .json, .json.gz, .sqlite or .nsys-rep for each rank"
        raise TraceError(folder, "holds no traces", remedy)
    return sorted(traces, key=_by_number)


def _by_number(path: Path) -> list[int | str]:
    """A key to sort by, in which 2 comes before 10."""
    return [int(part) if part.isdecimal() else part for part in _DIGITS.split(str(path))]


def _seen(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".") and path.suffix != ".nsightkit-cache"]


def _traces(folder: Path) -> list[Path]:
    paths = [path for path in _seen(folder) if _may_be_trace(path)]
    exported = {path.with_suffix("") for path in paths if path.suffix == ".sqlite"}
    return [path for path in paths if path.suffix != ".nsys-rep" or path.with_suffix("") not in exported]


def _may_be_trace(path: Path) -> bool:
    if path.is_dir():
        return store.is_store(path) or any(path.glob("*.parquet"))
    return path.name.endswith(_SUFFIXES) and (bool(_rank_of(path)) or not _is_other_document(path))


def _is_other_document(path: Path) -> bool:
    """Whether a file beside the traces is a small JSON document without events, such as ``source.json``."""
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        if path.stat().st_size > _SMALL_BYTES:
            return False
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "traceEvents" not in document


def _rank_of(path: Path | str) -> list[int]:
    """The rank that a file's name gives, or that of its folder."""
    path = Path(path)
    match = _RANK.search(path.name) or _RANK.search(path.parent.name)
    return [int(match[1])] if match else []


# ---------------------------------------------------------------- all of them


def combine(looks: Sequence[Look], lost: Sequence[Mapping[str, Any]] = ()) -> Job:
    """Put the ranks of a job together.

    Parameters
    ----------
    looks : sequence of Look
        In the order of their files, which numbers those that do not know their rank.
    lost : sequence of mapping
        Traces that could not be looked at: ``file, ranks, reason``.

    Returns
    -------
    Job
    """
    missing = [dict(entry) for entry in lost]
    crew, rank_from = _numbered(looks, missing)
    sizes = [entry.world_size for entry in crew.values() if entry.world_size]
    world = max([*sizes, max(crew) + 1])
    apart = _different_jobs(crew)
    claimed = itertools.chain.from_iterable(entry["ranks"] for entry in missing)
    absent = sorted(set(range(world)).difference(crew, claimed))
    if absent and not apart:
        what = "there is no trace of it" if len(absent) == 1 else "there are no traces of them"
        missing.append({"file": None, "ranks": absent, "reason": f"{what} (the job has {world} ranks)"})
    # Collectives of different jobs are not the same ones, whatever their numbers say.
    comparable = slice(0, 0) if apart else slice(None)
    matched, clocks = alignment.together(
        {rank: entry.collectives[comparable] for rank, entry in crew.items()},
        {rank: entry.t0_ns for rank, entry in crew.items()},
        {rank: rank if entry.process is None else entry.file for rank, entry in crew.items()},
    )
    arrivals = _arrivals(matched, clocks)
    late, gain_ns = _stragglers(crew, matched, clocks, arrivals)
    notes = [*apart, *_unnamed(rank_from), *_of_traces(crew), *_doubts(matched, clocks, crew)]
    return Job(
        ranks=_ranks(crew, rank_from, clocks, arrivals),
        stragglers=late,
        collectives=_collectives(arrivals, matched, world if len(crew) == world else -1),
        arrivals=arrivals,
        steps=_steps(crew, arrivals)[comparable],
        groups=matched.groups,
        lost=missing,
        notes=list(dict.fromkeys(notes)),
        gain_ns=gain_ns,
    )


def _stragglers(
    crew: Mapping[int, Look], matched: alignment.Matched, clocks: alignment.Alignment, arrivals: pd.DataFrame
) -> tuple[pd.DataFrame, int]:
    steps = {rank: entry.steps for rank, entry in crew.items()}
    # Lateness must exceed what the clocks' uncertainty may feign.
    spread = clocks.clocks.set_index("rank")["spread_ns"].fillna(0)
    floors: dict[Any, Any] = (3 * spread).to_dict()
    names: dict[Any, Any] = matched.groups["name"].to_dict()
    watched_ns = float(np.median([table["wall_ns"].sum() for table in steps.values()]))
    return stragglers.find(arrivals, steps, floors, watched_ns, names)


def _different_jobs(crew: Mapping[int, Look]) -> list[str]:
    """Say why the traces are of different jobs, if they are."""
    worlds = sorted({entry.world_size for entry in crew.values() if entry.world_size})
    if len(worlds) > 1:
        return [f"The traces are of different jobs: of {' and of '.join(map(str, worlds))} ranks."]
    starts = [entry.t0_ns for entry in crew.values()]
    days = (max(starts) - min(starts)) / _DAY_NS
    # Clocks that count from when a machine was booted cannot be compared.
    if min(starts) > _EPOCH_NS and days > 1:
        return [f"The traces are of different jobs: they begin {days:,.1f} days apart."]
    return []


def _numbered(looks: Sequence[Look], lost: list[dict[str, Any]]) -> tuple[dict[int, Look], dict[int, str]]:
    """Give each rank its number, say where that came from, and add to `lost` what has the number of another."""
    crew: dict[int, Look] = {}
    rank_from: dict[int, str] = {}
    rest: list[Look] = []
    of_names = _ranks_of_names(looks)
    # Programs that never learned their rank all say 0.
    untold = len(looks) > 1 and len({entry.rank for entry in looks}) == 1
    for entry, of_name in zip(looks, of_names, strict=True):
        rank, source = (of_name, "name") if untold or entry.rank is None else (entry.rank, "trace")
        if rank is None:
            rest.append(entry)
        elif rank in crew:
            reason = f"a second trace of rank {rank} was left out; the first is {Path(crew[rank].name).name}"
            lost.append({"file": entry.name, "ranks": [], "reason": reason})
        else:
            crew[rank], rank_from[rank] = entry, source
    # A number that a lost file's name claims stays free for it.
    taken = {*crew, *itertools.chain.from_iterable(entry["ranks"] for entry in lost)}
    free = (rank for rank in itertools.count() if rank not in taken)
    for entry, rank in zip(rest, free, strict=False):
        crew[rank], rank_from[rank] = entry, "order"
    return dict(sorted(crew.items())), rank_from


def _ranks_of_names(looks: Sequence[Look]) -> list[int | None]:
    """Ranks by what the names call a rank, or else by the one number in which all names differ."""
    nothing: list[int | None] = [None] * len(looks)
    ranks = [next(iter(_rank_of(entry.file)), None) if entry.process is None else None for entry in looks]
    if any(rank is not None for rank in ranks) or any(entry.process is not None for entry in looks):
        return ranks
    parts = [_DIGITS.split(Path(entry.file).name) for entry in looks]
    if len(looks) < 2 or len({tuple(words[::2]) for words in parts}) > 1:
        return nothing
    for column in range(1, len(parts[0]), 2):
        numbers = [int(words[column]) for words in parts]
        if len(set(numbers)) == len(looks) and max(numbers) < 4 * len(looks):
            return [*numbers]
    return nothing


def _arrivals(matched: alignment.Matched, clocks: alignment.Alignment) -> pd.DataFrame:
    """When each rank came to each collective, on one clock."""
    columns = ["collective", "group", "rank", "row", "start_ns", "end_ns", "step", "kind", "bytes", "sequence"]
    table = clocks.placed(matched.arrivals[[*columns, "exposed_ns"]])
    by = table.groupby("collective")
    wait = (by["start_ns"].transform("max") - table["start_ns"]).astype("Int64")
    wait = wait.where(table["kind"].isin(alignment.SYNCHRONIZING))
    # Steps have one number on all ranks; a capture that begins within one does not know it.
    return table.assign(wait_ns=wait, step=by["step"].transform("max"))


def _collectives(arrivals: pd.DataFrame, matched: alignment.Matched, world: int) -> pd.DataFrame:
    """One row per collective. `world`: how many ranks the job has if all of them were seen, else -1."""
    if not len(arrivals):
        return pd.DataFrame(columns=_OF_COLLECTIVE)
    ordered = arrivals.sort_values(["collective", "start_ns", "rank"], kind="stable")
    by = ordered.assign(length=ordered["end_ns"] - ordered["start_ns"]).groupby("collective")
    first, last = by.first(), by.last()
    table = first[["group", "kind", "sequence", "step", "start_ns"]].rename(columns={"group": "number"})
    table["ranks"] = by.size()
    table["bytes"] = by["bytes"].max()
    table["arrived_ns"] = last["start_ns"]
    table["end_ns"] = by["end_ns"].median()
    table["skew_ns"] = table["arrived_ns"] - table["start_ns"]
    table["wait_ns"] = by["wait_ns"].sum(min_count=1)
    table["mean_ns"] = by["length"].mean()
    table["exposed_ns"] = by["exposed_ns"].mean().where(by["exposed_ns"].count() == table["ranks"])
    table["overlapped_ns"] = table["mean_ns"] - table["exposed_ns"]
    table = table.join(matched.groups.set_index("group")[["name", "where", "group_size"]], on="number")
    table["group"] = table["name"]
    # Who is the last matters where ranks wait for each other.
    waits = table["kind"].isin(alignment.SYNCHRONIZING)
    table["last_rank"] = last["rank"].astype("Int64").where(waits)
    before = by["start_ns"].nth(-2).to_numpy()
    table["late_ns"] = (table["arrived_ns"] - before).astype("Int64").where(waits)
    # A group whose size the trace does not say is taken for whole if all ranks of the job are in it.
    whole = table["ranks"] == table["group_size"].where(table["group_size"] > 0, world)
    transfer = (table["end_ns"] - table["arrived_ns"]).where(whole & waits)
    table["transfer_ns"] = transfer
    factors = [communication.wire_factor(*pair) for pair in zip(table["kind"], table["ranks"], strict=True)]
    carried = table["bytes"].where(table["bytes"] >= 0) * np.array(factors, np.float64)
    table["bus_gb_per_s"] = carried / transfer.where(transfer > 0)  # bytes a nanosecond: GB/s
    for column in ("end_ns", "transfer_ns", "mean_ns", "exposed_ns", "overlapped_ns"):
        table[column] = table[column].round().astype("Int64")
    for column in ("bytes", "group_size", "sequence", "step"):
        table[column] = table[column].astype("Int64").where(table[column] >= 0)
    return table.reset_index()[_OF_COLLECTIVE].sort_values(["start_ns", "collective"], ignore_index=True)


def _unnamed(rank_from: Mapping[int, str]) -> Iterator[str]:
    ordered = sorted(rank for rank, source in rank_from.items() if source == "order")
    if ordered:
        named = ranks_text(ordered).capitalize()
        yield f"{named}: numbered in order, since neither the traces nor their names tell the ranks apart."


def _of_traces(crew: Mapping[int, Look]) -> Iterator[str]:
    """What reading the traces noted, once where it holds for several."""
    files: dict[str, list[str]] = {}
    for entry in crew.values():
        for note in dict.fromkeys(entry.notes):
            files.setdefault(note, []).append(Path(entry.file).name)
    for note, names in files.items():
        subject = names[0] if len(names) == 1 else f"{len(names)} traces"
        yield f"{subject}: {note}"


def _doubts(matched: alignment.Matched, clocks: alignment.Alignment, crew: Mapping[int, Look]) -> Iterator[str]:
    yield from matched.notes
    island = clocks.clocks.set_index("rank")["island"]
    alone = island.index[~island.duplicated(keep=False)].tolist()
    if alone and len(crew) > 1:
        yield f"No collective ties the clock of {ranks_text(alone)} to others: their times cannot be compared."
    if island.nunique() - len(alone) > 1:
        yield "Clocks of ranks that share no collectives cannot be compared with each other."
    for row in matched.groups.to_dict("records"):
        if row["group_size"] > row["ranks"]:
            seen = f"{row['ranks']} of {row['group_size']} ranks were seen"
            yield f"{row['name']}: {seen}; who came last of all is not known, and waiting may be for one of the others."
    several = [rank for rank, entry in crew.items() if len(entry.devices) > 1]
    if several:
        yield f"{ranks_text(several)} used several GPUs: figures are sums over them."
    unstepped = [rank for rank, entry in crew.items() if entry.steps["step"].eq(-1).all()]
    if unstepped and len(unstepped) < len(crew):
        yield f"No steps are marked on {ranks_text(unstepped)}."


def _ranks(
    crew: Mapping[int, Look], rank_from: Mapping[int, str], clocks: alignment.Alignment, arrivals: pd.DataFrame
) -> pd.DataFrame:
    """One row per rank."""
    rows = []
    for rank, entry in crew.items():
        wall_ns = entry.steps.loc[entry.steps["step"] >= 0, "wall_ns"]
        row = {"rank": rank, "rank_from": rank_from[rank], "file": entry.name, "tool": entry.tool}
        row |= {"devices": entry.devices, "steps": len(wall_ns), "step_ns": wall_ns.median()}
        rows.append(row | entry.figures | {"collectives": len(entry.collectives)})
    table = pd.DataFrame(rows)
    figures = list(next(iter(crew.values())).figures)
    table[figures] = table[figures].astype("Int64")
    by = arrivals.assign(late_ns=stragglers.lateness(arrivals), waited_ns=waited(arrivals)).groupby("rank")
    table["matched"] = by.size().reindex(table["rank"], fill_value=0).to_numpy()
    table = table.join(by[["late_ns", "waited_ns"]].sum(min_count=1).astype("Int64"), on="rank")
    clock = clocks.clocks
    start = np.array([entry.t0_ns for entry in crew.values()], np.int64)
    offset = clock["offset_ns"] + start - start[clock["island"]]
    known = clock.assign(offset_ns=offset.astype("Int64")).where(clock["matched"] > 0)
    return table.join(known[["offset_ns", "drift_ppm", "spread_ns", "error_ns"]].add_prefix("clock_"))


def _steps(crew: Mapping[int, Look], arrivals: pd.DataFrame) -> pd.DataFrame:
    """Compare the ranks step by step."""
    columns = ["step", "wall_ns", "compute_ns", "exposed_ns"]
    every = pd.concat([entry.steps[columns].assign(rank=rank) for rank, entry in crew.items()], ignore_index=True)
    every = every[every["step"] >= 0].astype({"compute_ns": "float64", "exposed_ns": "float64"})
    by = every.groupby("step")
    most_ns = by["compute_ns"].max()
    last = every.sort_values("compute_ns", kind="stable").drop_duplicates("step", keep="last").set_index("step")
    table = pd.DataFrame({"ranks": by.size(), "wall_ns": by["wall_ns"].median(), "compute_ns": by["compute_ns"].mean()})
    table["compute_max_ns"] = most_ns
    table["slowest"] = last["rank"].astype("Int64").where(most_ns.notna())
    table["imbalance"] = most_ns / table["compute_ns"].where(table["compute_ns"] > 0) - 1
    table["exposed_ns"] = by["exposed_ns"].mean()
    table["wait_ns"] = waited(arrivals).groupby(arrivals["step"]).sum(min_count=1).reindex(table.index)
    return table.reset_index()


def waited(arrivals: pd.DataFrame) -> pd.Series:
    """What each rank waited at each collective and at none before: of several at once the wait is one.

    Parameters
    ----------
    arrivals : DataFrame
        See :class:`Job`.
    """
    wait = arrivals["wait_ns"].astype("Int64")
    start = arrivals["start_ns"].to_numpy(np.int64)
    end = start + wait.fillna(0).to_numpy(np.int64)
    return wait.where(wait.isna(), uncovered(start, end, arrivals["rank"]))


# ---------------------------------------------------------------- where they are looked at


def attempt(path: str, cache: bool | None) -> list[Look] | str:
    """Look at one file, wherever this runs: an error would take the other ranks with it.

    Parameters
    ----------
    path : str
    cache : bool, optional
        As for :func:`nsightkit.load`.

    Returns
    -------
    list of Look, or str
        In words what is wrong with the file.
    """
    try:
        return look(path, cache=cache)
    except TraceError as error:
        return f"{error.problem}; {error.remedy}"
    except NsightkitError as error:
        return str(error)
    except MemoryError:
        return "does not fit in memory; give the worker more"
    except Exception as error:
        # Whatever a damaged file makes a library raise: the other ranks must not be lost with it.
        return f"cannot be read as a trace ({_error_text(error)})"


def _answers(
    files: Sequence[Path], cache: bool | None, scheduler: str | None, workers: int | None
) -> Iterator[tuple[int, list[Look] | str]]:
    """Look at the files, and give the answers in the order in which they come."""
    few = workers == 0 or (workers is None and len(files) <= FEW)
    if not files or (scheduler is None and few):
        for number, path in enumerate(files):
            yield number, attempt(str(path), cache)
        return
    waiting = {number: str(path.absolute()) for number, path in enumerate(files)}
    count = min(workers or os.cpu_count() or 1, len(files))
    with _executor(scheduler, count) as executor, contextlib.suppress(BrokenExecutor):
        futures = {executor.submit(attempt, file, cache): number for number, file in waiting.items()}
        for future in as_completed(futures):
            if future.cancelled() or future.exception() is not None:
                continue
            number = futures[future]
            del waiting[number]
            yield number, future.result()
    # A worker that dies takes along the others' answers. Asked alone, a trace is lost only by itself.
    for number, file in waiting.items():
        with _executor(scheduler, 1) as executor:
            try:
                yield number, executor.submit(attempt, file, cache).result()
            except Exception as error:
                yield number, f"was lost with its worker ({_error_text(error)})"


@contextlib.contextmanager
def _executor(scheduler: str | None, workers: int) -> Iterator[Executor]:
    """Processes of this machine, or those of a Dask scheduler: one interface."""
    if scheduler is not None:
        with _dask_client(scheduler) as client:
            yield client.get_executor(pure=False, retries=1)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        try:
            pool.submit(os.getpid).result()
        except BrokenExecutor as error:
            raise NsightkitError(
                'worker processes did not start; in a script, call this under `if __name__ == "__main__":`, or give '
                "workers=0 to look at one rank after the other"
            ) from error
        yield pool


def _dask_client(scheduler: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError(f"--scheduler needs Dask, which is not installed: {_DASK}") from error
    try:
        return Client(scheduler, timeout=ANSWER_S, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(f"--scheduler: no Dask scheduler answers at {scheduler!r}") from error


def _error_text(error: object) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
