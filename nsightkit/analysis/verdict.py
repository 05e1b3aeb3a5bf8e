"""One answer: what holds the run back, how sure that is, and what to change first.

Time lost comes before time used. The candidates are the causes of idle time (:mod:`nsightkit.analysis.gaps`) and the
copies that no kernel overlaps, which count as ``memory-transfer``. If together they take 5 % of the span, the largest
of them is the bottleneck. Else the device was busy, and what filled it is: communication and waiting in collectives
if they reach a quarter of the busy time, or arithmetic, or the memory.

Each moment of each device counts once. A gap has one cause, and a busy moment counts for the first that holds: a
kernel bound by arithmetic runs, one bound by the memory, another kernel or a graph replay, a collective, a copy, a
memset. So a copy under a kernel costs nothing, a small kernel under a big one neither, and nothing is counted twice.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit._show import bytes_text, short_name, time_text
from nsightkit.analysis import gaps, intervals, memops, sol, steps
from nsightkit.analysis.categories import CATEGORIES, categorize
from nsightkit.analysis.intervals import Coverage
from nsightkit.analysis.names import matching
from nsightkit.errors import UsageError
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["BOTTLENECKS", "candidates", "summary"]

Int = npt.NDArray[np.int64]

_FILLS = ("compute-bound", "memory-bound", "not-enough-data", "communication", "imbalance")
#: Every answer there is.
BOTTLENECKS = (*gaps.CAUSES, *_FILLS)
_CODE = {name: code for code, name in enumerate(BOTTLENECKS)}
_TRANSFER, _UNKNOWN, _PROFILER = _CODE["memory-transfer"], _CODE["unknown"], _CODE["profiler"]
_COMPUTE, _MEMORY, _UNDECIDED, _COMMUNICATION, _IMBALANCE = (_CODE[name] for name in _FILLS)
#: One column more than answers: what a device lay idle before its span or after it, while others worked.
_ENDS = len(BOTTLENECKS)
_IDLE = slice(0, len(gaps.CAUSES))
_BUSY = slice(len(gaps.CAUSES), _ENDS)

#: Idle time and exposed copies below this share of the span are not what holds a run back.
_LOST = 0.05
#: Exposed communication and waiting are the answer from this share of the busy time on: hiding them gives 1.33x.
_EXPOSED = 0.25
#: A second candidate of more than this part of the first is close to it.
_CLOSE = 2 / 3
#: Within this factor of the 5 %, the rule itself is in doubt.
_NEAR = 1.25
#: Operators below this share of their bound are held by something that the bound does not know.
_SLOW = 0.25
#: Fewer steps, or operations, say nothing about what is usual.
_FEW_STEPS, _FEW_OPERATIONS = 3, 20
_PARTS = 10
_NAMED = 3

#: What a kernel's category says of its bound, where no shape does. Products of a matrix with a few rows read the
#: matrix for next to no arithmetic; their names often say so.
_OF_CATEGORY = {
    **dict.fromkeys(("GEMM", "attention"), _COMPUTE),
    **dict.fromkeys(
        ("softmax", "normalization", "reduction", "elementwise", "optimizer", "memory-like", "Triton-fused"), _MEMORY
    ),
    "communication": _COMMUNICATION,
    "other": _UNDECIDED,
}
_FEW_ROWS = re.compile(r"gemv|decode|split_?kv|paged", re.IGNORECASE)


def candidates(trace: Trace) -> pd.DataFrame:
    """Rank what the device lost time to.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        ``bottleneck, total_ns, share_of_span``, by falling time: the causes of idle time, where ``memory-transfer``
        has the copies that no kernel overlaps as well. The share is of the sum of the devices' spans.
    """
    account = _Account(trace, None)
    return account.ranked(range(len(gaps.CAUSES)))


def summary(trace: Trace, gpu: str | None = None) -> dict[str, Any]:
    """Name the bottleneck of a run, with the evidence, the doubts, and what to change.

    Parameters
    ----------
    trace : Trace
    gpu : str, optional
        Name of the card, where shapes are known and the trace does not name it.

    Returns
    -------
    dict
        ``bottleneck``
            One of :data:`BOTTLENECKS`.
        ``share_of_span``
            What it takes of the sum of the devices' spans; None where the trace holds no GPU work.
        ``confidence``
            ``high``, ``medium`` or ``low``: no, one, or more doubts, which stand first in ``against``. Always low for
            ``unknown`` and ``not-enough-data``.
        ``evidence``, ``against``, ``next_steps``
            Sentences. Times in them are on the trace's clock.
        ``total_ns``, ``span_ns``, ``t0_ns``
            The bottleneck's time, the sum of the devices' spans, and what to add to a time to find it in the source.
        ``best_case_speedup``
            What removing all of it can give at most, everything else as it was (Amdahl), for the device that gains
            most. For ``compute-bound`` and ``memory-bound`` with the same operators at the datasheet's rate, and None
            without shapes; None for ``not-enough-data``.
        ``candidates``, ``busy``
            Lists of ``bottleneck, total_ns, share_of_span``: what time was lost to, and what filled the rest.
        ``named``
            Calls, ranges, operators or kernels behind it: ``kind, name, count, total_ns``.
        ``longest``
            Its longest moments: ``device, start_ns, end_ns, kind, name``.

    Raises
    ------
    UsageError
        No card of the name in `gpu` is listed.
    """
    if not any(trace.size(table) for table in GPU_TABLES):
        return _nothing(trace)
    account = _Account(trace, gpu)
    return _Answer(trace, account, gpu).written()


# ---------------------------------------------------------------- arithmetic


class _Account:
    """Where the time of each device went, in all and in each window."""

    def __init__(self, trace: Trace, gpu: str | None) -> None:
        self.trace = trace
        self.gaps = gaps.causes(trace)
        spans = intervals.busy(trace)
        self.devices = spans["device"].tolist()
        self.span_of = dict(zip(self.devices, spans["span_ns"].tolist(), strict=True))
        self.busy_of = dict(zip(self.devices, spans["busy_ns"].tolist(), strict=True))
        self.span = int(spans["span_ns"].sum())
        first, last = (int(spans["span_start_ns"].min()), int(spans["span_end_ns"].max())) if len(spans) else (0, 0)
        self.wall = last - first
        self.windows, self.are_steps = _windows(trace, first, last)
        self.kernels = self._kernels(gpu)
        start = np.append(first, self.windows["start_ns"].to_numpy(np.int64))
        end = np.append(last, self.windows["end_ns"].to_numpy(np.int64))
        self.collectives = _Collectives(self.kernels, self.devices)
        related = self._related()
        parts = [self._device(device, start, end) for device in self.devices]
        #: nanoseconds by window (the whole first), device and answer; the last column is `_ENDS`
        self.amounts = np.stack(parts, axis=1) if parts else np.zeros((len(start), 0, _ENDS + 1), np.int64)
        if related:
            for number, (begin, done) in enumerate(zip(spans["span_start_ns"], spans["span_end_ns"], strict=True)):
                outside = Coverage(np.array([first, done]), np.array([begin, last]))
                self.amounts[:, number, _ENDS] = outside.of(start, end)
        self.totals = self.amounts.sum(axis=1)

    def _kernels(self, gpu: str | None) -> pd.DataFrame:
        """Every kernel with the answer it speaks for."""
        table = self.trace.table("kernels", ["device", "start_ns", "end_ns", "process", "name"])
        category = categorize(table["name"])
        fills = np.array([_OF_CATEGORY[name] for name in CATEGORIES], np.int8)[category.codes]
        fills[(fills == _COMPUTE) & matching(table["name"], _FEW_ROWS)] = _MEMORY
        bound = sol.kernel_bounds(self.trace, gpu)
        known = (bound.codes > 0) & (fills != _COMMUNICATION)
        by_shape = np.array([_UNDECIDED, _COMPUTE, _MEMORY], np.int8)[bound.codes]
        return table.assign(fills=np.where(known, by_shape, fills), by_shape=known)

    def _related(self) -> bool:
        """Whether the devices work together: they are one process's, or all of them run collectives."""
        if len(self.devices) < 2:
            return False
        owners = [self.trace.table(table, ["process"])["process"].unique() for table in GPU_TABLES]
        return len(np.unique(np.concatenate(owners))) == 1 or len(self.collectives.devices) == len(self.devices)

    def _device(self, device: int, start: Int, end: Int) -> Int:
        amounts = np.zeros((len(start), _ENDS + 1), np.int64)
        mine = self.gaps[self.gaps["device"] == device]
        for code in range(len(gaps.CAUSES)):
            of_cause = mine[mine["cause"].cat.codes.to_numpy() == code]
            amounts[:, code] = Coverage(of_cause["start_ns"], of_cause["end_ns"]).of(start, end)
        running = self.kernels[self.kernels["device"] == device]
        fills = running["fills"].to_numpy()
        graphs, moved = (self._of(table, device) for table in ("graphs", "memops"))
        waiting = self.collectives.waiting(device)
        memset = moved.pop("kind").astype(object).to_numpy() == "memset"
        layers: list[tuple[int | None, list[pd.DataFrame]]] = [
            (_COMPUTE, [running[fills == _COMPUTE]]),
            (_MEMORY, [running[fills == _MEMORY]]),
            (_UNDECIDED, [running[fills == _UNDECIDED], graphs]),
            (_IMBALANCE, [waiting]),
            (_COMMUNICATION, [running[fills == _COMMUNICATION]]),
            (None, self._unselected(device)),
            (_TRANSFER, [moved[~memset]]),
            (_MEMORY, [moved[memset]]),  # it writes the memory at its full rate
        ]
        covered, before = Coverage([], []), np.zeros(len(start), np.int64)
        for answer, tables in layers:
            begun = np.concatenate([covered.start, *(table["start_ns"].to_numpy() for table in tables)])
            done = np.concatenate([covered.end, *(table["end_ns"].to_numpy() for table in tables)])
            covered = Coverage(begun, done)
            now = covered.of(start, end)
            if answer is not None:
                amounts[:, answer] += now - before
            before = now
        return amounts

    def _of(self, table: str, device: int) -> pd.DataFrame:
        columns = ["device", "start_ns", "end_ns", *(["kind"] if table == "memops" else [])]
        frame = self.trace.table(table, columns)
        return frame[frame["device"] == device].copy()

    def _unselected(self, device: int) -> list[pd.DataFrame]:
        """What a filter left out still overlaps a copy."""
        if self.trace is self.trace.whole:
            return []
        both = [self.trace.whole.table(table, ["device", "start_ns", "end_ns"]) for table in ("kernels", "graphs")]
        return [frame[frame["device"] == device] for frame in both]

    def ranked(self, codes: Sequence[int]) -> pd.DataFrame:
        """Time and share of some answers, those that took any."""
        amounts = self.totals[0] if len(self.totals) else np.zeros(_ENDS + 1, np.int64)
        rows = [(BOTTLENECKS[code], int(self.of(amounts, code))) for code in codes]
        table = pd.DataFrame([row for row in rows if row[1] > 0], columns=["bottleneck", "total_ns"])
        table["share_of_span"] = np.minimum(table["total_ns"] / self.span, 1.0) if self.span else 0.0
        table = table.astype({"bottleneck": object, "total_ns": np.int64, "share_of_span": np.float64})
        return table.sort_values("total_ns", ascending=False, kind="stable", ignore_index=True)

    @staticmethod
    def of(amounts: npt.NDArray[Any], code: int) -> Any:
        """One answer's time; waiting at the ends is imbalance, too."""
        return amounts[..., code] + (amounts[..., _ENDS] if code == _IMBALANCE else 0)

    def decide(self, amounts: npt.NDArray[Any], span: npt.NDArray[Any] | None = None) -> npt.NDArray[np.intp]:
        """The contract's rule, on any number of rows of amounts."""
        amounts = np.atleast_2d(amounts)
        idle, busy = amounts[:, _IDLE], amounts[:, _BUSY].copy()
        inside = busy.sum(axis=1)
        span = inside + idle.sum(axis=1) if span is None else span
        busy[:, _IMBALANCE - _BUSY.start] += amounts[:, _ENDS]
        lost = (idle.sum(axis=1) >= _LOST * span) & (idle.sum(axis=1) > 0)
        talk = busy[:, _COMMUNICATION - _BUSY.start :]
        exposed = talk.sum(axis=1) >= _EXPOSED * (inside + amounts[:, _ENDS])
        exposed &= talk.sum(axis=1) > 0
        fills = np.where(exposed, _COMMUNICATION + talk.argmax(axis=1), _BUSY.start + busy.argmax(axis=1))
        return np.asarray(np.where(lost, idle.argmax(axis=1), fills))


class _Collectives:
    """Communication kernels of several devices, matched: the n-th of a name on each device is one collective.

    A collective can do its work only when the last device has arrived; until then the others wait in it.
    """

    def __init__(self, kernels: pd.DataFrame, devices: Sequence[int]) -> None:
        mine = kernels[kernels["fills"] == _COMMUNICATION]
        mine = mine.sort_values(["device", "start_ns"], kind="stable").reset_index(drop=True)
        self.devices = mine["device"].unique().tolist()
        self._table = mine.assign(until_ns=mine["start_ns"], late=False)
        self.matched = self.collectives = 0
        if len(devices) < 2 or len(self.devices) < 2:
            return
        name = mine["name"].cat.codes
        number = mine.groupby([mine["device"], name], sort=False).cumcount()
        groups = mine.groupby([name, number], sort=False)
        arrived, done = groups["start_ns"].transform("max"), groups["end_ns"].transform("min")
        # Names that the devices ran unequally often are cropped, or no collectives: then the n-th are not the same.
        runs = mine.groupby([mine["device"], name], sort=False)["start_ns"].transform("size")
        same = runs.groupby(name).transform("nunique") == 1
        met = (groups["start_ns"].transform("size") == len(self.devices)) & same & (arrived < done)
        self._table["until_ns"] = arrived.where(met, mine["start_ns"])
        self._table["late"] = met & (arrived == mine["start_ns"])
        self.matched, self.collectives = int(met.sum()) // len(self.devices), groups.ngroups

    def waiting(self, device: int) -> pd.DataFrame:
        """The time from a device's arrival to that of the last."""
        mine = self._table[self._table["device"] == device]
        return mine[["start_ns"]].assign(end_ns=mine["until_ns"])

    def late(self) -> dict[int, int]:
        """How often each device was the last to arrive."""
        counts = self._table.groupby("device")["late"].sum()
        return dict(zip(counts.index.tolist(), counts.tolist(), strict=True))


def _windows(trace: Trace, first: int, last: int) -> tuple[pd.DataFrame, bool]:
    """The steps or, where there are too few, tenths of the time."""
    found = steps.summary(trace) if trace.size("ranges") else pd.DataFrame()
    if len(found) >= _FEW_STEPS:
        return found.assign(end_ns=found["start_ns"] + found["wall_ns"]).rename(columns={"step": "name"}), True
    edges = np.linspace(first, last, _PARTS + 1).astype(np.int64)
    names = [f"tenth {number + 1}" for number in range(_PARTS)]
    return pd.DataFrame({"name": names, "start_ns": edges[:-1], "end_ns": edges[1:], "outlier": False}), False


# ---------------------------------------------------------------- words


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _moment(ns: int) -> str:
    return f"{ns / 1e6:,.3f} ms"


def _speedup(share: float) -> float | None:
    """Amdahl: what removing a share of the time gives."""
    return 1 / (1 - share) if share < 1 else None


def _at_most(speedup: float | None) -> str:
    return "" if speedup is None else f": at most {speedup:.2f}x, all else as it was"


_KIND = {
    "call": "call",
    "range": "range",
    "op": "operator",
    "os_call": "OS call",
    "copy": "copy",
    "overhead": "profiler",
}

#: One change for each bottleneck.
_CHANGE = {
    "profiler": "profile less (fewer tables, no backtraces, a shorter window), and look again",
    "input-pipeline": "have the next batch ready in time: more loader workers, prefetching, or cheaper decoding",
    "synchronization": "stop waiting for the GPU each step: read values back rarely, or a step later",
    "launch-overhead": "launch less: torch.compile, fused operators, or CUDA graphs",
    "cpu-work": "move this work off the thread that launches",
    "compute-bound": "less or cheaper arithmetic: a narrower precision, or sizes that fill the tensor cores",
    "memory-bound": "move fewer bytes: fuse operators (torch.compile, fused optimizer), or use narrower types",
    "communication": "overlap collectives with the backward pass, or send less: narrower types, rarer reductions",
    "imbalance": "give the devices equal work: batches of equal cost, layers split by time",
}
_ON_COPY = {
    "HtoD pageable": "copy from pinned memory with non_blocking=True, so that the copy overlaps with kernels",
    "HtoD": "prefetch the next batch on a stream of its own while this one computes",
    "DtoH": "read back less, or into pinned memory on a stream of its own",
    "DtoD": "avoid clones and layout changes between tensors of one device",
    "PtoP": "overlap copies between devices with kernels, or send less",
}


def _capture(kind: str) -> str:
    return {
        "nsys": "nsightkit capture nsys -o more -- COMMAND",
        "nodes": "nsightkit capture nsys --graph-nodes -o nodes -- COMMAND",
        "torch": "nsightkit capture torch -o more -- COMMAND",
        "shapes": "nsightkit capture torch --record-shapes -o shapes -- COMMAND",
        "ncu": "nsightkit capture ncu --count 20 -o kernels -- COMMAND",
    }[kind]


def _nothing(trace: Trace) -> dict[str, Any]:
    traced = any(trace.recorded(table) for table in GPU_TABLES)
    reason = (
        "the trace has tables of GPU work, and no work in them: none ran, or the capture or the filters missed it"
        if traced
        else "no work of a GPU was recorded in this trace"
    )
    again = _capture("torch" if "orch" in trace.meta.tool else "nsys")
    return {
        "bottleneck": "not-enough-data",
        "share_of_span": None,
        "confidence": "low",
        "evidence": [reason],
        "against": [],
        "next_steps": [f"capture the GPU's work, while a step runs on it: {again}"],
        "total_ns": None,
        "span_ns": None,
        "t0_ns": trace.t0_ns,
        "best_case_speedup": None,
        "candidates": [],
        "busy": [],
        "named": [],
        "longest": [],
    }


@dataclasses.dataclass
class _Answer:
    """The sentences of one verdict."""

    trace: Trace
    account: _Account
    gpu: str | None

    def __post_init__(self) -> None:
        account = self.account
        self.total = account.totals[0]
        whole = np.array([account.span])
        self.code = int(account.decide(self.total, whole)[0])
        self.idle = self.code < _IDLE.stop
        if self.code == _UNKNOWN and not self.trace.recorded("calls"):
            self.code = _UNDECIDED
        self.name = BOTTLENECKS[self.code]
        self.lost = account.ranked(range(_IDLE.stop))
        self.busy = account.ranked(range(_BUSY.start, _BUSY.stop))
        self.of_code = _UNKNOWN if self.idle and self.code == _UNDECIDED else self.code
        self.ns = int(account.of(self.total, self.of_code))
        self.share = min(self.ns / account.span, 1.0) if account.span else 0.0
        self.sol = self._sol()
        self.named, self.longest = self._named()

    def _sol(self) -> pd.DataFrame:
        try:
            return sol.summary(self.trace, self.gpu)
        except UsageError:
            return pd.DataFrame()

    def written(self) -> dict[str, Any]:
        evidence = self._evidence()
        doubts, remarks = self._doubts(), self._remarks()
        level = "high" if not doubts else "medium" if len(doubts) == 1 else "low"
        best = self._best_case()
        return {
            "bottleneck": self.name,
            "share_of_span": self.share,
            "confidence": "low" if self.name in ("unknown", "not-enough-data") else level,
            "evidence": evidence,
            "against": [*doubts, *remarks],
            "next_steps": self._next(),
            "total_ns": self.ns,
            "span_ns": self.account.span,
            "t0_ns": self.trace.t0_ns,
            "best_case_speedup": best,
            "candidates": self.lost.to_dict("records"),
            "busy": self.busy.to_dict("records"),
            "named": self.named.to_dict("records"),
            "longest": self.longest.to_dict("records"),
        }

    # -- what is behind it

    def _named(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """What the time is called, and its longest moments."""
        if self.idle:
            mine = self.account.gaps
            mine = mine[mine["cause"].cat.codes.to_numpy() == self.of_code]
            parts = [mine[["device", "start_ns", "end_ns", "kind", "name"]].astype({"kind": object, "name": object})]
            if self.of_code == _TRANSFER:
                parts.append(self._copies())
            mine = pd.concat(parts, ignore_index=True)
        elif self.code == _IMBALANCE:
            frames = [self.account.collectives.waiting(device).assign(device=device) for device in self.account.devices]
            mine = pd.concat(frames).assign(kind="kernel", name="waiting in a collective")
        else:
            kernels = self.account.kernels
            mine = kernels[kernels["fills"].to_numpy() == self.code].assign(kind="kernel")
            if self.code == _UNDECIDED and self.trace.size("graphs"):
                graphs = self.trace.table("graphs", ["device", "start_ns", "end_ns"])
                mine = pd.concat([mine.astype({"name": object}), graphs.assign(kind="graph", name="graph replay")])
        lasting = (mine["end_ns"] - mine["start_ns"]).to_numpy()
        grouped = pd.DataFrame({"kind": mine["kind"], "name": mine["name"], "total_ns": lasting})
        grouped = grouped.groupby(["kind", "name"], observed=True, sort=False)["total_ns"].agg(["size", "sum"])
        grouped = grouped.reset_index().rename(columns={"size": "count", "sum": "total_ns"})
        grouped = grouped.sort_values("total_ns", ascending=False, ignore_index=True).astype({"name": object})
        at = np.argsort(-lasting, kind="stable")[:_NAMED]
        longest = mine.iloc[at][["device", "start_ns", "end_ns", "kind", "name"]].astype({"name": object})
        return grouped.head(10), longest.reset_index(drop=True)

    def _copies(self) -> pd.DataFrame:
        table = self.trace.table("memops", ["device", "start_ns", "end_ns", "kind"])
        table = table[table["kind"].astype(object) != "memset"]
        running = self.trace.whole.table("kernels", ["device", "start_ns", "end_ns"])
        graphs = self.trace.whole.table("graphs", ["device", "start_ns", "end_ns"])
        exposed = np.zeros(len(table), bool)
        for device in self.account.devices:
            over = [frame[frame["device"] == device] for frame in (running, graphs)]
            covered = Coverage(*(np.concatenate([frame[c] for frame in over]) for c in ("start_ns", "end_ns")))
            mine = (table["device"] == device).to_numpy()
            start, end = table["start_ns"].to_numpy()[mine], table["end_ns"].to_numpy()[mine]
            exposed[mine] = 2 * covered.of(start, end) < end - start
        table = table[exposed]
        return table.assign(name="memcpy " + table["kind"].astype(object), kind="copy")

    # -- sentences

    def _evidence(self) -> list[str]:
        account, told = self.account, []
        span = f"{_percent(self.share)} of the span of {time_text(account.span)}"
        if self.idle:
            count = int((account.gaps["cause"].cat.codes == self.of_code).sum())
            what = BOTTLENECKS[self.of_code]
            told.append(f"{what}: {time_text(self.ns)}, {span}, in {_count(count, 'gap')} of GPU work")
            if self.code == _TRANSFER:
                gap = account.gaps[account.gaps["cause"].cat.codes == _TRANSFER]
                inside = int((gap["end_ns"] - gap["start_ns"]).sum())
                told[-1] = (
                    f"memory-transfer: {time_text(self.ns)}, {span}: {time_text(self.ns - inside)} of copies that no "
                    f"kernel overlaps, {time_text(inside)} of waiting for copies in {_count(count, 'gap')}"
                )
                told += self._moved()
        else:
            lost = float(self.lost["share_of_span"].sum())
            told.append(
                f"the GPU was busy: idle time and copies that no kernel overlaps take {_percent(lost)} of the span"
            )
            told.append(f"{self._filled()}: {time_text(self.ns)}, {span}")
        for row in self.named.head(_NAMED).to_dict("records"):
            kind = _KIND.get(row["kind"], row["kind"])
            if row["name"]:
                name = short_name(str(row["name"]))
                told.append(f"{kind} {name}: {_count(row['count'], 'time')}, {time_text(row['total_ns'])}")
        if len(self.longest):
            moments = [
                f"{time_text(row['end_ns'] - row['start_ns'])} at {_moment(row['start_ns'])}"
                + (f" on device {row['device']}" if len(account.devices) > 1 else "")
                for row in self.longest.to_dict("records")
            ]
            told.append(f"the longest: {', '.join(moments)}")
        told += self._late() if self.code == _IMBALANCE else []
        told += self._reached() if self.code in (_COMPUTE, _MEMORY) else []
        recurs, windows = self._recurs()
        told.append(f"looked at alone, {recurs} of {windows} {'steps' if account.are_steps else 'tenths'} say the same")
        return told

    def _filled(self) -> str:
        return {
            _COMPUTE: "kernels bound by arithmetic",
            _MEMORY: "kernels bound by the memory",
            _UNDECIDED: "kernels and graph replays of which neither name nor shape says what bounds them",
            _COMMUNICATION: "communication that no other kernel overlaps",
            _IMBALANCE: "devices that wait for the last one",
        }[self.code]

    def _moved(self) -> list[str]:
        rows = memops.summary(self.trace)
        told = []
        for row in rows[rows["kind"] != "memset"].head(_NAMED - 1).to_dict("records"):
            rate = row["gb_per_s"]
            speed = f" at {rate:.1f} GB/s" if rate is not None and np.isfinite(rate) else ""
            told.append(
                f"{_count(row['count'], 'copy').replace('copys', 'copies')} {row['kind']} from {row['src_kind']} to "
                f"{row['dst_kind']} memory: {bytes_text(row['bytes'])} in {time_text(row['total_ns'])}{speed}"
            )
        return told

    def _late(self) -> list[str]:
        told = []
        waited = self.account.amounts[0, :, _IMBALANCE]
        late = self.account.collectives.late()
        for device, ns, ends in zip(self.account.devices, waited, self.account.amounts[0, :, _ENDS], strict=True):
            matched = self.account.collectives.matched
            at_ends = (
                f", and lay idle for {time_text(int(ends))} before its first work or after its last" if ends else ""
            )
            told.append(
                f"device {device} waited for {time_text(int(ns))} in collectives and was the last to arrive in "
                f"{late.get(device, 0)} of {matched}{at_ends}"
            )
        return told

    def _reached(self) -> list[str]:
        share = self._reaches()
        if share is None:
            return []
        bound = "compute" if self.code == _COMPUTE else "memory"
        mine = self.sol[self.sol["bound"] == bound]
        lasting = time_text(int(mine["time_ns"].sum()))
        return [
            f"{bound}-bound operators with shapes: {lasting} of kernels, at {_percent(share)} of the datasheet's rate"
        ]

    def _reaches(self) -> float | None:
        """How close to the datasheet the bottleneck's operators are, weighted by time."""
        if self.code not in (_COMPUTE, _MEMORY) or not len(self.sol):
            return None
        mine = self.sol[(self.sol["bound"] == ("compute" if self.code == _COMPUTE else "memory"))]
        mine = mine[~mine["impossible"].to_numpy(bool)]
        time = mine["time_ns"].sum()
        return float((mine["sol_datasheet"] * mine["time_ns"]).sum() / time) if time else None

    def _recurs(self) -> tuple[int, int]:
        alone = self.account.totals[1:]
        alone = alone[alone[:, : _BUSY.stop].sum(axis=1) > 0]
        return int((self.account.decide(alone) == self._decided()).sum()), len(alone)

    def _decided(self) -> int:
        return self.of_code

    # -- doubts

    def _doubts(self) -> list[str]:
        told = [*self._close(), *self._borderline(), *self._without(), *self._scarce()]
        profiler = int(self.total[_PROFILER])
        if self.code != _PROFILER and self.account.span and profiler >= _LOST * self.account.span:
            told.append(f"the profiler itself took {time_text(profiler)} ({_percent(profiler / self.account.span)})")
        if self.code in (_COMPUTE, _MEMORY):
            told += self._by_name()
            reached = self._reaches()
            if reached is not None and reached < _SLOW:
                told.append(
                    f"its operators reach only {_percent(reached)} of their bound: something else holds these kernels"
                )
        return told

    def _rivals(self) -> list[tuple[int, int]]:
        codes = range(_IDLE.stop) if self.idle else range(_BUSY.start, _BUSY.stop)
        found = [(int(self.account.of(self.total, code)), code) for code in codes if code != self.of_code]
        return sorted(found, reverse=True)

    def _close(self) -> list[str]:
        rivals = self._rivals()
        second, code = rivals[0]
        if second > _CLOSE * self.ns:
            if code == _UNDECIDED:
                return [f"{time_text(second)} of busy time cannot be told to be bound by either"]
            return [f"{BOTTLENECKS[code]} is close: {time_text(second)}, {_percent(second / self.account.span)}"]
        unclear = _UNKNOWN if self.idle else _UNDECIDED
        open_ns = int(self.total[unclear])
        other = next((ns for ns, code in rivals if code != unclear), 0)
        if self.of_code != unclear and other and open_ns + other > self.ns:
            return [f"{time_text(open_ns)} more could not be explained, and would decide if they were another's"]
        return []

    def _borderline(self) -> list[str]:
        lost = int(self.total[_IDLE].sum())
        if not self.account.span or not _LOST / _NEAR <= lost / self.account.span < _LOST * _NEAR:
            return []
        amounts = self.total.copy()
        amounts[_IDLE] = 0 if self.idle else self.total[_IDLE] * 2
        other = BOTTLENECKS[int(self.account.decide(amounts)[0])]
        share = _percent(lost / self.account.span)
        return [f"idle time and exposed copies take {share} of the span, close to the 5 % of the rule; else: {other}"]

    def _without(self) -> list[str]:
        """Whether a window, or all outlier steps, make the answer alone."""
        account, windows = self.account, self.account.windows
        if len(windows) < _FEW_STEPS or not self.ns:
            return []
        part = account.of(account.totals[1:], self.of_code)
        outlier = windows["outlier"].to_numpy(bool)
        most = np.zeros(len(windows), bool)
        most[int(part.argmax())] = True
        for drop in (most, outlier):
            if not drop.any() or drop.all():
                continue
            left = self.total - account.totals[1:][drop].sum(axis=0)
            other = int(account.decide(left)[0])
            if other != self._decided():
                at = windows["start_ns"].to_numpy()[drop][0]
                what = (
                    f"{drop.sum():,} of {len(windows):,} {'steps' if account.are_steps else 'tenths of the time'}"
                    if drop.sum() > 1
                    else f"{short_name(str(windows['name'].to_numpy()[drop][0]))} at {_moment(int(at))}"
                )
                return [f"without {what} it were {BOTTLENECKS[other]}: warm-up, or an exception?"]
        return []

    def _scarce(self) -> list[str]:
        operations = sum(self.trace.size(table) for table in GPU_TABLES)
        if operations < _FEW_OPERATIONS:
            return [f"the trace holds only {_count(operations, 'GPU operation')}"]
        found = len(steps.find(self.trace)) if self.trace.size("ranges") else 0
        if 0 < found < _FEW_STEPS:
            return [f"the trace holds only {_count(found, 'step')}: whether this repeats is not known"]
        return []

    def _by_name(self) -> list[str]:
        kernels = self.account.kernels
        mine = kernels[kernels["fills"].to_numpy() == self.code]
        lasting = (mine["end_ns"] - mine["start_ns"]).to_numpy()
        by_shape = lasting[mine["by_shape"].to_numpy()].sum()
        if 2 * by_shape >= lasting.sum():
            return []
        return ["told by the kernels' names, without shapes: a product with few rows, say, is bound by the memory"]

    def _remarks(self) -> list[str]:
        told, account = [], self.account
        for ns, code in self._rivals()[:1]:
            share = ns / account.span if account.span else 0.0
            if share >= _LOST and ns <= _CLOSE * self.ns:
                told.append(f"{BOTTLENECKS[code]} takes {time_text(ns)}, {_percent(share)}, too")
        if not self.idle and len(self.lost):
            first = self.lost.iloc[0]
            if first["share_of_span"] >= _LOST / 2:
                told.append(f"{first['bottleneck']} takes {_percent(float(first['share_of_span']))}")
        if len(account.devices) > 1:
            shares = {d: account.busy_of[d] / account.wall for d in account.devices} if account.wall else {}
            if shares and max(shares.values()) - min(shares.values()) > _LOST:
                each = ", ".join(f"device {d} {_percent(share)}" for d, share in list(shares.items())[:8])
                told.append(f"the devices were not equally busy: {each} of the wall time")
        if not account.are_steps:
            told.append("the trace names no steps, so whether this repeats was judged by tenths of its time")
        if self.trace.meta.missing:
            told.append(f"not recorded: {', '.join(self.trace.meta.missing)}")
        return [*told, *self.trace.meta.notes]

    # -- what to do

    def _best_case(self) -> float | None:
        if self.code == _UNDECIDED:
            return None
        if self.code in (_COMPUTE, _MEMORY):
            reached = self._reaches()
            return None if reached is None else _speedup(self.share * (1 - min(reached, 1.0)))
        return self._without_it(self.code)

    def _without_it(self, code: int) -> float | None:
        """Removing one answer altogether, for the device that gains most."""
        account = self.account
        if code == _IMBALANCE:
            lost, there = account.of(self.total, code), account.wall * len(account.devices)
            return _speedup(float(lost / there)) if there else None
        shares = [
            float(account.of(account.amounts[0, i], code)) / account.span_of[device]
            for i, device in enumerate(account.devices)
            if account.span_of[device]
        ]
        return _speedup(max(shares, default=0.0))

    def _change(self, name: str) -> str:
        if name == "memory-transfer":
            return self._copy_change()
        return _CHANGE[name]

    def _copy_change(self) -> str:
        rows = memops.summary(self.trace)
        rows = rows[rows["kind"] != "memset"]
        if not len(rows):
            return _ON_COPY["HtoD pageable"]
        first = rows.sort_values("total_ns", ascending=False).iloc[0]
        kind = str(first["kind"])
        if kind == "HtoD" and str(first["src_kind"]) == "pageable":
            kind = "HtoD pageable"
        return _ON_COPY.get(kind, _ON_COPY["HtoD"])

    def _next(self) -> list[str]:
        told = []
        if self.name == "unknown":
            told.append(
                "name what the launching thread does with NVTX ranges, and record OS calls: "
                f"{_capture('nsys')}{_at_most(self._without_it(_UNKNOWN))}"
            )
        elif self.code == _UNDECIDED:
            told += self._more_data()
        elif self.code in (_COMPUTE, _MEMORY):
            told += self._faster()
        else:
            told.append(f"{self._change(self.name)}{_at_most(self._without_it(self.code))}")
        for ns, code in self._rivals():
            if code not in (_UNKNOWN, _UNDECIDED) and self.account.span and ns >= _LOST * self.account.span:
                told.append(
                    f"then {BOTTLENECKS[code]}: {self._change(BOTTLENECKS[code])}{_at_most(self._without_it(code))}"
                )
                break
        return told

    def _more_data(self) -> list[str]:
        if self.idle:
            return [f"record the calls that launch, too: {_capture('nsys')}"]
        replays = self.trace.table("graphs", ["start_ns", "end_ns"])
        if 2 * int((replays["end_ns"] - replays["start_ns"]).sum()) >= self.ns:
            return [f"record the kernels inside the graphs: {_capture('nodes')}"]
        return [f"let counters say what bounds the kernels named above: {_capture('ncu')}"]

    def _faster(self) -> list[str]:
        change, best = _CHANGE[self.name], self._best_case()
        told = [f"{change}{_at_most(_speedup(self.share))}, were all of it saved"]
        if best is not None:
            told.append(f"bring the same operators to the datasheet's rate: at most {best:.2f}x, all else as it was")
        else:
            told.append(f"record shapes, to know how far the operators are from their bound: {_capture('shapes')}")
        return told
