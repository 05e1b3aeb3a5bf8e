"""The same questions to every rank of a job: who is late, what that costs the others, and what it does differently.

One trace a rank is looked at, wherever it runs (in this process, on a local Dask cluster, on any Dask scheduler), and
only small tables come back. Together they show what no single trace shows: in a collective everybody waits for whoever
comes last.

The steps: :func:`traces_in` finds the files, :func:`look` reduces one to a :class:`Look`, :func:`combine` matches the
collectives, aligns the clocks and makes a :class:`Job` of them. :func:`survey` does all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core.intervals import uncovered
from nsightkit.analysis.ranks import alignment
from nsightkit.analysis.ranks import collectives as communication
from nsightkit.analysis.ranks import lateness as stragglers
from nsightkit.analysis.ranks.one_rank import Look, look
from nsightkit.errors import NsightkitError, TraceError, UsageError
from nsightkit.trace import store
from nsightkit.trace.model import Trace

if TYPE_CHECKING:
    from distributed import Future, LocalCluster

__all__ = ["ANSWER_S", "FEW", "Job", "Look", "attempt", "combine", "look", "survey", "traces_in", "waited"]

#: So many traces are looked at in this process: starting a cluster takes longer.
FEW = 4
#: How long to wait for a scheduler.
ANSWER_S = 20

_DAY_NS = 86_400 * 10**9
#: A clock that shows more counts from 1970.
_EPOCH_NS = 10**18

_SUFFIXES = (".json", ".json.gz", ".sqlite", ".nsys-rep")
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
_EXTRA = "pip install 'nsightkit[ranks]'"


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
        said, uneven = self.stragglers["text"].tolist(), self.steps[self.steps["ranks"] > 1].dropna(subset="imbalance")
        if len(said) > 1:
            said.append(f"If all of them were on time, at most {self.gain_ns / 1e6:,.3f} ms would be saved.")
        elif not said and len(self.arrivals):
            compared = f"{len(self.collectives):,} collective{'' if len(self.collectives) == 1 else 's'} compared"
            said.append(f"No rank is late more often, and by more, than chance explains ({compared}).")
        elif not said and len(self.ranks) > 1:
            said.append("No collective of two ranks could be matched, so who is late is not known.")
        for most in uneven.sort_values("imbalance")[-1:].to_dict("records"):
            said.append(
                f"In a typical step the rank that computes most does so {uneven['imbalance'].median():.1%} longer than "
                f"the mean; at worst, rank {most['slowest']} in step {most['step']}, {most['imbalance']:.1%}."
            )
        return said

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

        def whole(values: pd.Series) -> Any:
            return values.sum(min_count=len(values))

        each = self.collectives.assign(wait_ns=self.collectives["wait_ns"] / self.collectives["ranks"])
        by = each.groupby(["group", "kind", "where", "bytes"], sort=False, dropna=False)
        out = by.agg(
            ranks=("ranks", "max"),
            group_size=("group_size", "first"),
            count=("ranks", "size"),
            total_ns=("mean_ns", "sum"),
            wait_ns=("wait_ns", lambda waits: waits.sum(min_count=1)),
            transfer_ns=("transfer_ns", whole),
            exposed_ns=("exposed_ns", whole),
            overlapped_ns=("overlapped_ns", whole),
            skew_ns=("skew_ns", "median"),
            last_rank=("last_rank", lambda last: last.mode().get(0, pd.NA)),
            last_share=("last_rank", lambda last: last.value_counts(normalize=True).max()),
            bus_gb_per_s=("bus_gb_per_s", "median"),
        )
        return out.reset_index()[_OF_KIND].sort_values("total_ns", ascending=False, ignore_index=True)

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
        found = {**vars(self), "collectives": self.collectives if each else self.kinds()}
        return {
            name: of.to_dict("records") if isinstance(of, pd.DataFrame) else of
            for name, of in found.items()
            if name != "arrivals"
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
        Processes of a local cluster. 0: look at one after the other, in this process. By default as many as the machine
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
        Dask is needed and not installed, or the scheduler does not answer.
    """
    chosen = traces_in(sources) if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not chosen:
        raise UsageError("no traces were given")
    looks = [
        dataclasses.replace(one, file=trace.path or f"trace {number}")
        for number, trace in enumerate(chosen)
        if isinstance(trace, Trace)
        for one in look(trace)
    ]
    files = [Path(item) for item in chosen if not isinstance(item, Trace)]
    answers = _with_dask(files, cache, scheduler, workers)
    if scheduler is None and (workers == 0 or (workers is None and len(files) <= FEW)):
        answers = ((place, attempt(str(path), cache)) for place, path in enumerate(files))
    found = {}
    for place, result in answers:
        found[place] = result
        if progress is not None:
            progress(len(found), len(files))
    # Whichever answered first, the order is that of the files, and the names those that the caller gave.
    said = [(str(path), found[place]) for place, path in enumerate(files)]
    looks += [dataclasses.replace(one, file=path) for path, of in said if not isinstance(of, str) for one in of]
    lost: list[dict[str, Any]] = [
        {"file": path, "ranks": _rank_of(path), "reason": of} for path, of in said if isinstance(of, str)
    ]
    if not looks:
        first = f"the first, {Path(lost[0]['file']).name}, {lost[0]['reason']}"
        where = sources if isinstance(sources, (str, os.PathLike)) else files[0]
        raise TraceError(where, f"none of {len(lost)} traces can be read", first)
    return combine(looks, lost)


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
        found = _traces(folder) or [trace for inner in _seen(folder) if inner.is_dir() for trace in _traces(inner)]
    except FileNotFoundError as error:
        raise TraceError(folder, "no such folder", "check the path") from error
    except NotADirectoryError as error:
        raise TraceError(folder, "is not a folder", "give the folder that holds one trace a rank") from error
    except OSError as error:
        raise TraceError(folder, f"cannot be read ({error.strerror or error})", "check its owner and mode") from error
    if not found:
        raise TraceError(
            folder, "holds no traces", "give a folder with a .json, .json.gz, .sqlite or .nsys-rep for each rank"
        )
    # 2 comes before 10.
    return sorted(
        found, key=lambda path: [int(part) if part.isdecimal() else part for part in _DIGITS.split(str(path))]
    )


def _seen(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".") and path.suffix != ".nsightkit-cache"]


def _traces(folder: Path) -> list[Path]:
    def holds_trace(path: Path) -> bool:
        tables = path.is_dir() and (store.is_store(path) or any(path.glob("*.parquet")))
        return tables or (path.name.endswith(_SUFFIXES) and not path.is_dir())

    found = [path for path in _seen(folder) if holds_trace(path)]
    exported = {path.with_suffix("") for path in found if path.suffix == ".sqlite"}
    return [path for path in found if path.suffix != ".nsys-rep" or path.with_suffix("") not in exported]


def _rank_of(path: Path | str) -> list[int]:
    """The rank that a file's name gives, or that of its folder."""
    match = _RANK.search(Path(path).name) or _RANK.search(Path(path).parent.name)
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
    missing = [dict(one) for one in lost]
    crew, rank_from = _ranks_of_looks(looks, missing)
    world = max([one.world_size or 0 for one in crew.values()] + [rank + 1 for rank in crew])
    apart = list(_different_jobs(crew))
    absent = sorted(set(range(world)).difference(crew, *(one["ranks"] for one in missing)))
    if absent and not apart:
        what = "there is no trace of it" if len(absent) == 1 else "there are no traces of them"
        missing.append({"file": None, "ranks": absent, "reason": f"{what} (the job has {world} ranks)"})
    matched, clocks = alignment.together(
        # Collectives of different jobs are not the same ones, whatever their numbers say.
        {rank: one.collectives[:0] if apart else one.collectives for rank, one in crew.items()},
        {rank: one.t0_ns for rank, one in crew.items()},
        {rank: rank if one.process is None else one.file for rank, one in crew.items()},
    )
    arrivals = _arrivals(matched, clocks)
    found, gain_ns = stragglers.find(
        arrivals,
        {rank: one.steps for rank, one in crew.items()},
        # Lateness must exceed what the clocks' uncertainty may feign.
        dict(zip(clocks.clocks["rank"], 3 * np.nan_to_num(clocks.clocks["spread_ns"]), strict=True)),
        # How long the job was watched.
        float(np.median([one.steps["wall_ns"].sum() for one in crew.values()])),
        dict(zip(matched.groups["group"], matched.groups["name"], strict=True)),
    )
    return Job(
        ranks=_ranks(crew, rank_from, clocks, arrivals),
        stragglers=found,
        collectives=_collectives(arrivals, matched, world if len(crew) == world else -1),
        arrivals=arrivals,
        steps=_steps(crew, arrivals)[: 0 if apart else None],
        groups=matched.groups,
        lost=missing,
        notes=list(dict.fromkeys([*apart, *_unnamed(rank_from), *_of_traces(crew), *_doubts(matched, clocks, crew)])),
        gain_ns=gain_ns,
    )


def _different_jobs(crew: Mapping[int, Look]) -> Iterator[str]:
    """Say why the traces are of different jobs, if they are."""
    worlds = sorted({one.world_size for one in crew.values() if one.world_size})
    starts = [one.t0_ns for one in crew.values()]
    if len(worlds) > 1:
        yield f"The traces are of different jobs: of {' and of '.join(map(str, worlds))} ranks."
    # Clocks that count from when a machine was booted cannot be compared.
    elif min(starts) > _EPOCH_NS and max(starts) - min(starts) > _DAY_NS:
        days = (max(starts) - min(starts)) / _DAY_NS
        yield f"The traces are of different jobs: they begin {days:,.1f} days apart."


def _ranks_of_looks(looks: Sequence[Look], lost: list[dict[str, Any]]) -> tuple[dict[int, Look], dict[int, str]]:
    """Give each rank its number, say where that came from, and add to `lost` what has the number of another."""
    said = [one.rank for one in looks]
    if len(looks) > 1 and None not in said and len(set(said)) == 1:
        said = [None] * len(looks)  # programs that never learned their rank all say 0
    named = [_rank_of(one.file) if one.process is None else [] for one in looks]
    if not any(named) and all(one.process is None for one in looks):
        named = _ranks_from_names([one.file for one in looks])
    crew: dict[int, Look] = {}
    rank_from: dict[int, str] = {}
    rest: list[Look] = []
    for one, of_trace, of_name in zip(looks, said, named, strict=True):
        rank, source = (of_trace, "trace") if of_trace is not None else (next(iter(of_name), None), "name")
        if rank is None:
            rest.append(one)
        elif rank in crew:
            reason = f"a second trace of rank {rank} was left out; the first is {Path(crew[rank].name).name}"
            lost.append({"file": one.name, "ranks": [], "reason": reason})
        else:
            crew[rank], rank_from[rank] = one, source
    # A number that a lost file's name claims stays free for it.
    taken = {*crew, *(rank for one in lost for rank in one["ranks"])}
    ordered = dict(zip((rank for rank in itertools.count() if rank not in taken), rest, strict=False))
    return dict(sorted((crew | ordered).items())), rank_from | dict.fromkeys(ordered, "order")


def _ranks_from_names(files: Sequence[str]) -> list[list[int]]:
    """Ranks by the one number in which the names of all files differ; empty lists where they differ otherwise."""
    parts = [_DIGITS.split(Path(file).name) for file in files]
    if len(files) > 1 and len({tuple(words[::2]) for words in parts}) == 1:
        for column in zip(*(map(int, words[1::2]) for words in parts), strict=True):
            if len(set(column)) == len(files) and max(column) < 4 * len(files):
                return [[value] for value in column]
    return [[] for _ in files]


def _arrivals(matched: alignment.Matched, clocks: alignment.Alignment) -> pd.DataFrame:
    """When each rank came to each collective, on one clock."""
    columns = ["collective", "group", "rank", "row", "start_ns", "end_ns", "step", "kind", "bytes", "sequence"]
    out = clocks.placed(matched.arrivals[[*columns, "exposed_ns"]])
    by = out.groupby("collective")
    wait = (by["start_ns"].transform("max") - out["start_ns"]).astype("Int64")
    # Steps have one number on all ranks; a capture that begins within one does not know it.
    return out.assign(wait_ns=wait.where(out["kind"].isin(alignment.SYNCHRONIZING)), step=by["step"].transform("max"))


def _collectives(arrivals: pd.DataFrame, matched: alignment.Matched, world: int) -> pd.DataFrame:
    """One row a collective. `world`: how many ranks the job has if all of them were seen, else -1."""
    if not len(arrivals):
        return pd.DataFrame(columns=_OF_COLLECTIVE)
    ordered = arrivals.sort_values(["collective", "start_ns", "rank"], kind="stable")
    by = ordered.assign(mean_ns=ordered["end_ns"] - ordered["start_ns"]).groupby("collective")
    out = by.agg(
        group=("group", "first"),
        kind=("kind", "first"),
        sequence=("sequence", "first"),
        step=("step", "first"),
        ranks=("rank", "size"),
        bytes=("bytes", "max"),
        start_ns=("start_ns", "first"),
        arrived_ns=("start_ns", "last"),
        end_ns=("end_ns", "median"),
        last_rank=("rank", "last"),
        mean_ns=("mean_ns", "mean"),
        known=("exposed_ns", "count"),
        exposed_ns=("exposed_ns", "mean"),
    )
    out = out.assign(
        wait_ns=by["wait_ns"].sum(min_count=1),
        exposed_ns=out["exposed_ns"].where(out["known"] == out["ranks"]),
        late_ns=out["arrived_ns"] - by["start_ns"].nth(-2).to_numpy(),
        skew_ns=out["arrived_ns"] - out["start_ns"],
    )
    out = out.reset_index().join(matched.groups.set_index("group")[["name", "where", "group_size"]], on="group")
    # A group whose size the trace does not say is taken for whole if all ranks of the job are in it.
    whole = out["ranks"] == out["group_size"].where(out["group_size"] > 0, world)
    waits = out["kind"].isin(alignment.SYNCHRONIZING)
    transfer = (out["end_ns"] - out["arrived_ns"]).where(whole & waits)
    factor = [communication.wire_factor(kind, n) for kind, n in zip(out["kind"], out["ranks"], strict=True)]
    carried = out["bytes"].where(out["bytes"] >= 0) * np.array(factor, np.float64)
    out = out.assign(
        group=out["name"],
        transfer_ns=transfer,
        overlapped_ns=out["mean_ns"] - out["exposed_ns"],
        bus_gb_per_s=carried / transfer.where(transfer > 0),  # bytes a nanosecond: GB/s
    )
    rounded = ["end_ns", "transfer_ns", "mean_ns", "exposed_ns", "overlapped_ns"]
    known = {"last_rank": waits, "late_ns": waits}
    known |= {column: out[column] >= 0 for column in ("bytes", "group_size", "sequence", "step")}
    out[rounded] = out[rounded].round()
    out = out.astype(dict.fromkeys([*rounded, *known], "Int64"))
    out = out.assign(**{column: out[column].where(holds) for column, holds in known.items()})
    return out[_OF_COLLECTIVE].sort_values(["start_ns", "collective"], ignore_index=True)


def _unnamed(rank_from: Mapping[int, str]) -> Iterator[str]:
    if ordered := [rank for rank, source in sorted(rank_from.items()) if source == "order"]:
        named = alignment.ranks_text(ordered).capitalize()
        yield f"{named}: numbered in order, since neither the traces nor their names tell the ranks apart."


def _of_traces(crew: Mapping[int, Look]) -> Iterator[str]:
    """What reading the traces noted, once where it holds for several."""
    for note in dict.fromkeys(note for one in crew.values() for note in one.notes):
        names = [Path(one.file).name for one in crew.values() if note in one.notes]
        yield f"{names[0] if len(names) == 1 else f'{len(names)} traces'}: {note}"


def _doubts(matched: alignment.Matched, clocks: alignment.Alignment, crew: Mapping[int, Look]) -> Iterator[str]:
    yield from matched.notes
    island = clocks.clocks.set_index("rank")["island"]
    alone = island.index[~island.duplicated(keep=False)].tolist()
    if alone and len(crew) > 1:
        named = alignment.ranks_text(alone)
        yield f"No collective ties the clock of {named} to others: their times cannot be compared."
    if island.nunique() - len(alone) > 1:
        yield "Clocks of ranks that share no collectives cannot be compared with each other."
    for row in matched.groups.to_dict("records"):
        if row["group_size"] > row["ranks"]:
            yield (
                f"{row['name']}: {row['ranks']} of {row['group_size']} ranks were seen; who came last of all is not "
                "known, and waiting may be for one of the others."
            )
    if several := [rank for rank, one in crew.items() if len(one.devices) > 1]:
        yield f"{alignment.ranks_text(several)} used several GPUs: figures are sums over them."
    unstepped = [rank for rank, one in crew.items() if one.steps["step"].eq(-1).all()]
    if unstepped and len(unstepped) < len(crew):
        yield f"No steps are marked on {alignment.ranks_text(unstepped)}."


def _ranks(
    crew: Mapping[int, Look], rank_from: Mapping[int, str], clocks: alignment.Alignment, arrivals: pd.DataFrame
) -> pd.DataFrame:
    """One row a rank."""
    walls = {rank: one.steps.loc[one.steps["step"] >= 0, "wall_ns"] for rank, one in crew.items()}
    rows = [
        {
            "rank": rank,
            "rank_from": rank_from[rank],
            "file": one.name,
            "tool": one.tool,
            "devices": one.devices,
            "steps": len(walls[rank]),
            "step_ns": walls[rank].median(),
            **one.figures,
            "collectives": len(one.collectives),
        }
        for rank, one in crew.items()
    ]
    out = pd.DataFrame(rows).astype(dict.fromkeys(next(iter(crew.values())).figures, "Int64"))
    by = arrivals.assign(late_ns=stragglers.lateness(arrivals), waited_ns=waited(arrivals)).groupby("rank")
    out["matched"] = by.size().reindex(out["rank"], fill_value=0).to_numpy()
    out = out.join(by[["late_ns", "waited_ns"]].sum(min_count=1).astype("Int64"), on="rank")
    clock, start = clocks.clocks, np.array([one.t0_ns for one in crew.values()], np.int64)
    offset = (clock["offset_ns"] + start - start[clock["island"]]).astype("Int64")
    known = clock.assign(offset_ns=offset).where(clock["matched"] > 0)
    return out.join(known[["offset_ns", "drift_ppm", "spread_ns", "error_ns"]].add_prefix("clock_"))


def _steps(crew: Mapping[int, Look], arrivals: pd.DataFrame) -> pd.DataFrame:
    """Compare the ranks step by step."""
    columns = ["step", "wall_ns", "compute_ns", "exposed_ns"]
    every = pd.concat([one.steps[columns].assign(rank=rank) for rank, one in crew.items()], ignore_index=True)
    every = every[every["step"] >= 0].astype({"compute_ns": "float64", "exposed_ns": "float64"})
    by = every.groupby("step")
    out = by.agg(
        ranks=("rank", "size"), wall_ns=("wall_ns", "median"), compute_ns=("compute_ns", "mean"),
        compute_max_ns=("compute_ns", "max"), exposed_ns=("exposed_ns", "mean"),
    )  # fmt: skip
    most = every.sort_values("compute_ns", kind="stable").drop_duplicates("step", keep="last").set_index("step")["rank"]
    out.insert(4, "slowest", most.astype("Int64").where(out["compute_max_ns"].notna()))
    out.insert(5, "imbalance", out["compute_max_ns"] / out["compute_ns"].where(out["compute_ns"] > 0) - 1)
    out["wait_ns"] = waited(arrivals).groupby(arrivals["step"]).sum(min_count=1).reindex(out.index)
    return out.reset_index()


def waited(arrivals: pd.DataFrame) -> pd.Series:
    """What each rank waited at each collective and at none before: of several at once the wait is one.

    Parameters
    ----------
    arrivals : DataFrame
        See :class:`Job`.
    """
    wait = arrivals["wait_ns"].astype("Int64")
    start = arrivals["start_ns"].to_numpy(np.int64)
    return wait.where(wait.isna(), uncovered(start, start + wait.fillna(0).to_numpy(np.int64), arrivals["rank"]))


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


def _with_dask(
    files: Sequence[Path], cache: bool | None, scheduler: str | None, workers: int | None
) -> Iterator[tuple[int, list[Look] | str]]:
    """Look at the files on a cluster, in the order in which answers come."""
    try:
        from distributed import Client, as_completed
    except ImportError as error:
        raise UsageError(
            f"{len(files)} ranks are looked at with Dask, which is not installed: {_EXTRA}, or --workers 0 to look at "
            "one after the other"
        ) from error
    with contextlib.ExitStack() as stack:
        place = scheduler or stack.enter_context(_local_cluster(min(workers or os.cpu_count() or 1, len(files))))
        try:
            client = stack.enter_context(Client(place, timeout=ANSWER_S, set_as_default=False))  # type: ignore[no-untyped-call]
        except (OSError, ValueError, TimeoutError) as error:
            raise UsageError(f"--scheduler: no Dask scheduler answers at {place!r}") from error

        def asked(numbers: Iterable[int]) -> Iterator[tuple[int, bool, Any]]:
            futures: dict[Future[Any], int] = {
                client.submit(attempt, str(files[number].absolute()), cache, pure=False, retries=1): number
                for number in numbers
            }
            answers = as_completed(  # type: ignore[no-untyped-call]
                futures, loop=client.loop, with_results=True, raise_errors=False
            )
            for future, result in answers:
                finished = future.status == "finished"
                # What is known is not kept a second time by the scheduler.
                future.release()
                yield futures.pop(future), finished, result

        lost = []
        for number, finished, result in asked(range(len(files))):
            if finished:
                yield number, result
            else:
                lost.append(number)
        # A worker that dies takes along the answers that it still held. Asked alone, a trace is lost only by itself.
        for number, finished, result in itertools.chain.from_iterable(asked([each]) for each in lost):
            cause = result[1] if isinstance(result, tuple) else result
            yield number, result if finished else f"was lost with its worker ({_error_text(cause)})"


def _error_text(error: object) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _local_cluster(workers: int) -> LocalCluster:
    """Start a cluster on this machine; it goes when it is left."""
    import logging

    import dask
    from distributed import LocalCluster

    # A trace that kills its worker must not take others with it that wait there, nor many workers.
    careful = {"distributed.scheduler.worker-saturation": 1.0, "distributed.scheduler.allowed-failures": 1}
    try:
        with dask.config.set(careful):
            return LocalCluster(  # type: ignore[no-untyped-call]
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",  # any free port; a cluster of somebody else may have the usual one
                silence_logs=logging.CRITICAL,
            )
    except RuntimeError as error:
        raise NsightkitError(
            "the workers of a local Dask cluster did not start; in a script, call this under `if __name__ == "
            '"__main__":`, or give workers=0 to look at one rank after the other'
        ) from error
