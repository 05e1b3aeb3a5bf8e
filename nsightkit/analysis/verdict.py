"""One answer: what holds the run back, how sure that is, and what to change first.

Time lost comes before time used. The candidates are the causes of idle time (:mod:`nsightkit.analysis.gaps`) and the
copies that no kernel overlaps, which count as ``memory-transfer``. If together they take 5 % of the span, the largest
of them is the bottleneck. Else the device was busy, and what filled it is the bottleneck: communication and waiting in
collectives if they reach a quarter of the busy time, or arithmetic, or the memory.

Each moment of each device counts once. A gap has one cause, and a busy moment counts for the first of these that runs
in it: a kernel bound by arithmetic, one bound by the memory, another kernel or a graph replay, a collective, a copy, a
memset. So a copy under a kernel costs nothing, a small kernel beside a large one neither, and nothing counts twice.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit import hardware
from nsightkit._show import bytes_text, short_name, time_text
from nsightkit.analysis import clocks, communication, gaps, intervals, memops, sol, steps
from nsightkit.analysis.categories import CATEGORIES, categorize
from nsightkit.analysis.intervals import Coverage
from nsightkit.analysis.names import matching
from nsightkit.errors import UsageError
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["BOTTLENECKS", "candidates", "summary"]

Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_FILLS = ("compute-bound", "memory-bound", "not-enough-data", "communication", "imbalance")
#: Every answer there is: the causes of idle time, then what fills busy time.
BOTTLENECKS = (*gaps.CAUSES, *_FILLS)
_CODE = {name: code for code, name in enumerate(BOTTLENECKS)}
_PROFILER, _LAUNCH = _CODE["profiler"], _CODE["launch-overhead"]
_TRANSFER, _WORK, _UNKNOWN = (_CODE[name] for name in ("memory-transfer", "cpu-work", "unknown"))
_COMPUTE, _MEMORY, _UNDECIDED, _COMMUNICATION, _IMBALANCE = (_CODE[name] for name in _FILLS)
#: One column more than answers: what a device lay idle before its span or after it, while others worked.
_ENDS = len(BOTTLENECKS)
_IDLE = range(len(gaps.CAUSES))
_BUSY = range(len(gaps.CAUSES), _ENDS)
_TALK = (_COMMUNICATION, _IMBALANCE)

#: Idle time and exposed copies below this share of the span are not what holds a run back.
_LOST = 0.05
#: Exposed communication and waiting are the answer from this share of the busy time on: without them, 1.33x.
_EXPOSED = 0.25
#: A second candidate of more than this part of the first is close to it.
_CLOSE = 2 / 3
#: Within this factor of such a share, the rule itself is in doubt.
_NEAR = 1.25
#: Operators below this share of their bound are held by something that the bound does not know.
_SLOW = 0.25
#: Most of a candidate: what is left has another answer, or it is no habit of the run.
_MOST = 0.9
#: Fewer steps, or operations, say nothing about what is usual.
_FEW_STEPS, _FEW_OPERATIONS = 3, 50
_PARTS = 10
#: How much of a list a sentence names, and the answer keeps.
_NAMED, _KEPT = 3, 10

#: What a kernel's category says of its bound, where no shape does.
_OF_CATEGORY = {
    **dict.fromkeys(("GEMM", "attention"), _COMPUTE),
    **dict.fromkeys(("softmax", "normalization", "reduction", "elementwise"), _MEMORY),
    **dict.fromkeys(("optimizer", "memory-like", "Triton-fused"), _MEMORY),
    "communication": _COMMUNICATION,
    "other": _UNDECIDED,
}
#: Products of a matrix with a few rows read the matrix for next to no arithmetic; their names often say so.
_FEW_ROWS = re.compile(r"gemv|decode|split_?kv|paged", re.IGNORECASE)


def candidates(trace: Trace) -> pd.DataFrame:
    """Rank what the devices lost time to.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        ``bottleneck, total_ns, share_of_span``, by falling time: the causes of idle time, where ``memory-transfer``
        has the copies that no kernel overlaps as well. The share is of the sum of the devices' spans.
    """
    return _ranked(_Account(trace, None), _IDLE) if _has_work(trace) else _table([], 0)


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
            ``high``, ``medium`` or ``low``: no doubt, one, or more; they stand first in ``against``. Always ``low`` for
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
            Calls, ranges, operators or kernels behind it: ``kind, name, count, total_ns``, and for calls the operator
            or range that most of the time lay ``inside``.
        ``longest``
            Its longest moments: ``device, start_ns, end_ns, kind, name``, and of gaps the operation they were
            ``ended_by``.

    Raises
    ------
    UsageError
        No card of the name in `gpu` is listed.
    """
    if gpu is not None:
        hardware.find(gpu)
    if not _has_work(trace):
        traced = any(trace.recorded(table) for table in GPU_TABLES)
        return _nothing(trace, _NONE if traced else "no GPU work was traced")
    account = _Account(trace, gpu)
    return _Answer(account).written() if account.totals[0].any() else _nothing(trace, "no GPU work lasts any time")


def _has_work(trace: Trace) -> bool:
    return any(trace.size(table) for table in GPU_TABLES)


def _table(rows: list[tuple[str, int]], span: int) -> pd.DataFrame:
    table = pd.DataFrame([row for row in rows if row[1] > 0], columns=["bottleneck", "total_ns"])
    table = table.astype({"bottleneck": object, "total_ns": np.int64})
    table["share_of_span"] = np.minimum(table["total_ns"] / max(span, 1), 1.0)
    return table.sort_values("total_ns", ascending=False, kind="stable", ignore_index=True)


# ---------------------------------------------------------------- arithmetic


class _Account:
    """Where the time of each device went, in all and in each window."""

    def __init__(self, trace: Trace, gpu: str | None) -> None:
        self.trace, self.gpu = trace, gpu
        self.gaps = gaps.causes(trace)
        self.cause = self.gaps["cause"].cat.codes.to_numpy()
        self.spans = intervals.busy(trace).set_index("device")
        self.devices: list[int] = self.spans.index.tolist()
        self.span = int(self.spans["span_ns"].sum())
        self.first, self.last = int(self.spans["span_start_ns"].min()), int(self.spans["span_end_ns"].max())
        self.kernels = self._kernels()
        self.fills = self.kernels["fills"].to_numpy()
        self.collectives = _Collectives(trace)
        self.windows = _Windows(trace, self.spans)
        #: nanoseconds by window (the whole first), device and answer; the last column is `_ENDS`
        self.amounts = np.stack([self._device(device) for device in self.devices], axis=1)
        if not self._related():
            self.amounts[..., _ENDS] = 0
        self.totals = self.amounts.sum(axis=1)

    @property
    def wall(self) -> int:
        return self.last - self.first

    def _kernels(self) -> pd.DataFrame:
        """Every kernel with the answer it speaks for, and whether its operator's shape said so."""
        table = self.trace.table("kernels", ["device", "start_ns", "end_ns", "name", "collective"])
        category = categorize(table["name"])
        fills = np.array([_OF_CATEGORY[name] for name in CATEGORIES], np.int8)[category.codes]
        fills[(fills == _COMPUTE) & matching(table["name"], _FEW_ROWS)] = _MEMORY
        bound = sol.kernel_bounds(self.trace, self.gpu).codes
        fills = np.where(bound > 0, np.array([_UNDECIDED, _COMPUTE, _MEMORY], np.int8)[bound], fills)
        # What a collective's kernel reduces on the way is no operator of the model.
        talks = (category == "communication") | (table["collective"] != "").to_numpy()
        return table.drop(columns="collective").assign(
            fills=np.where(talks, _COMMUNICATION, fills), by_shape=(bound > 0) & ~talks
        )

    def _related(self) -> bool:
        """Whether devices work together: they are one process's, or all of them run collectives."""
        owners = [self.trace.table(table, ["process"])["process"].unique() for table in GPU_TABLES]
        return len(np.unique(np.concatenate(owners))) == 1 or len(self.collectives.devices) == len(self.devices)

    def _device(self, device: int) -> Int:
        edges = self.windows.edges[device]
        start, end = np.append(self.first, edges[:-1]), np.append(self.last, edges[1:])
        amounts = np.zeros((len(start), _ENDS + 1), np.int64)
        amounts[0, _ENDS] = self.wall - int(self.spans["span_ns"].to_numpy()[self.devices.index(device)])
        mine = (self.gaps["device"] == device).to_numpy()
        for code in _IDLE:
            of_cause = self.gaps[mine & (self.cause == code)]
            amounts[:, code] = Coverage(of_cause["start_ns"], of_cause["end_ns"]).of(start, end)
        on_device = (self.kernels["device"] == device).to_numpy()
        running = {code: self.kernels[on_device & (self.fills == code)] for code in np.unique(self.fills).tolist()}
        none = self.kernels.head(0)
        copies, memsets = self._memops(device)
        layers: list[tuple[int | None, list[pd.DataFrame]]] = [
            (_COMPUTE, [running.get(_COMPUTE, none)]),
            (_MEMORY, [running.get(_MEMORY, none)]),
            (_UNDECIDED, [running.get(_UNDECIDED, none), _on(self.trace, "graphs", device)]),
            (_IMBALANCE, [self.collectives.waiting(device)]),
            (_COMMUNICATION, [running.get(_COMMUNICATION, none)]),
            # What a filter left out hides a copy all the same.
            (None, [_on(self.trace.whole, table, device) for table in ("kernels", "graphs")]),
            (_TRANSFER, [copies]),
            (_MEMORY, [memsets]),
        ]
        if self.trace is self.trace.whole:
            layers = [layer for layer in layers if layer[0] is not None]
        covered, before = Coverage([], []), np.zeros(len(start), np.int64)
        for answer, tables in layers:
            begun = np.concatenate([covered.start, *(table["start_ns"].to_numpy() for table in tables)])
            ended = np.concatenate([covered.end, *(table["end_ns"].to_numpy() for table in tables)])
            covered = Coverage(begun, ended)
            now = covered.of(start, end)
            if answer is not None:
                amounts[:, answer] += now - before
            before = now
        return amounts

    def _memops(self, device: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Copies, and memsets: those write the device's memory at its full rate."""
        moved = _on(self.trace, "memops", device, "kind", "src_kind", "dst_kind")
        memset = (moved["kind"] == "memset").to_numpy()
        return moved[~memset], moved[memset]

    @functools.cached_property
    def exposed_copies(self) -> pd.DataFrame:
        """Copies that run for most of their time without a kernel beside them, with their rows as index."""
        parts = []
        for device in self.devices:
            copies, _ = self._memops(device)
            over = pd.concat([_on(self.trace.whole, table, device) for table in ("kernels", "graphs")])
            hidden = Coverage(over["start_ns"], over["end_ns"]).of(copies["start_ns"], copies["end_ns"])
            parts.append(copies[2 * hidden < (copies["end_ns"] - copies["start_ns"]).to_numpy()])
        return pd.concat(parts)

    def ends(self) -> pd.DataFrame:
        """When a device had nothing to do before its first operation or after its last, while others worked."""
        before = self.spans.assign(start_ns=self.first, end_ns=self.spans["span_start_ns"], name="no work yet")
        after = self.spans.assign(start_ns=self.spans["span_end_ns"], end_ns=self.last, name="no more work")
        both = pd.concat([before, after]).reset_index()
        return both[both["end_ns"] > both["start_ns"]]


def _on(trace: Trace, table: str, device: int, *more: str) -> pd.DataFrame:
    frame = trace.table(table, ["device", "start_ns", "end_ns", *more])
    return frame[frame["device"] == device]


class _Collectives:
    """Who waits for whom in the collectives of several devices of one trace, and so of one clock.

    A collective can do its work only when the last device has arrived; until then the others wait in it.
    """

    def __init__(self, trace: Trace) -> None:
        found = communication.collectives(trace)
        found = found[found["where"] == "GPU"]
        self.devices: list[int] = found["device"].unique().tolist()
        arrivals = clocks.match({device: found[found["device"] == device] for device in self.devices}).arrivals
        met = found.loc[arrivals["row"]].assign(collective=arrivals["collective"].to_numpy())
        by = met.groupby("collective")
        arrived, done = by["start_ns"].transform("max"), by["end_ns"].transform("min")
        # One that ends somewhere before all had arrived is none.
        possible = (arrived < done).groupby(met["collective"]).transform("all")
        self._met = met.assign(until_ns=arrived)[possible]
        self.matched = int(self._met["collective"].nunique())

    def waiting(self, device: int) -> pd.DataFrame:
        """The time from a device's arrival to that of the last."""
        mine = self._met[self._met["device"] == device]
        return mine[["device", "start_ns", "kind"]].assign(end_ns=mine["until_ns"])

    def last(self, device: int) -> int:
        """How often a device was the last to arrive."""
        mine = self._met[self._met["device"] == device]
        return int((mine["start_ns"] == mine["until_ns"]).sum())


class _Windows:
    """Parts of the run that a verdict can be held against: the steps or, without them, tenths of the time.

    The CPU runs ahead, so the GPU's part of a step is not the step's time on the CPU. It lasts from the end of what
    was launched before the step to the end of what was launched in it.
    """

    def __init__(self, trace: Trace, spans: pd.DataFrame) -> None:
        found = steps.find(trace)
        self.steps = len(found)
        self.are_steps = self.steps >= _FEW_STEPS and trace.size("calls") > 0
        self.edges: dict[int, Int] = {}
        if self.are_steps:
            self.names = ["before the first step", *found["step"].tolist(), "after the last step"]
            self.inside = np.pad(np.ones(self.steps, bool), 1)
            self._by_launch(trace, spans, found)
        else:
            self.names = [f"tenth {number + 1}" for number in range(_PARTS)]
            self.inside = np.ones(_PARTS, bool)
            tenths = np.linspace(spans["span_start_ns"].min(), spans["span_end_ns"].max(), _PARTS + 1)
            self.edges = dict.fromkeys(spans.index.tolist(), tenths.astype(np.int64))
        #: when each begins, on the first device to begin it
        begins = np.stack(list(self.edges.values())).min(axis=0)
        self.start = begins[:-1]
        self.outlier = np.zeros(len(self.names), bool)
        self.outlier[self.inside] = steps.outliers(np.diff(begins)[self.inside])
        self.what = "steps" if self.are_steps else "tenths of the time"

    def _by_launch(self, trace: Trace, spans: pd.DataFrame, found: pd.DataFrame) -> None:
        # 0 before the first step, then the steps, then what follows the last.
        bounds = np.append(found["start_ns"].to_numpy(), found["end_ns"].iloc[-1])
        devices: list[int] = spans.index.tolist()
        begun, ended = (
            dict(zip(devices, spans[f"span_{which}_ns"].tolist(), strict=True)) for which in ("start", "end")
        )
        reach = {device: np.full(len(bounds) + 1, begun[device], np.int64) for device in devices}
        for table in GPU_TABLES:
            ops = trace.table(table, ["device", "end_ns"])
            launched = intervals.launched(trace, table)
            number = np.searchsorted(bounds, launched, side="right")
            for device, ends in reach.items():
                mine = (ops["device"].to_numpy() == device) & (launched > np.iinfo(np.int64).min)
                np.maximum.at(ends, number[mine], ops["end_ns"].to_numpy()[mine])
        for device, ends in reach.items():
            ends[-1] = ended[device]
            self.edges[device] = np.append(begun[device], np.maximum.accumulate(ends))


def _of(amounts: npt.NDArray[Any], code: int) -> Any:
    """One answer's time; lying idle at the ends is imbalance, too."""
    return amounts[..., code] + (amounts[..., _ENDS] if code == _IMBALANCE else 0)


def _ranked(account: _Account, codes: Sequence[int]) -> pd.DataFrame:
    return _table([(BOTTLENECKS[code], int(_of(account.totals[0], code))) for code in codes], account.span)


def _decided(amounts: npt.NDArray[Any], span: int | None = None) -> npt.NDArray[np.intp]:
    """The rule, on any number of rows of amounts; the span is their sum where it is not given."""
    rows = np.atleast_2d(amounts)
    idle = rows[:, list(_IDLE)]
    busy = np.stack([_of(rows, code) for code in _BUSY], axis=1)
    inside = rows[:, :_ENDS].sum(axis=1) if span is None else span
    lost = (idle.sum(axis=1) >= _LOST * inside) & idle.any(axis=1)
    talk = np.stack([_of(rows, code) for code in _TALK], axis=1)
    exposed = (talk.sum(axis=1) >= _EXPOSED * busy.sum(axis=1)) & talk.any(axis=1)
    fills = np.where(exposed, np.array(_TALK)[talk.argmax(axis=1)], _BUSY.start + busy.argmax(axis=1))
    return np.asarray(np.where(lost, idle.argmax(axis=1), fills))


# ---------------------------------------------------------------- words


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _count(number: int, thing: str, several: str | None = None) -> str:
    return f"{number:,} {thing if number == 1 else several or thing + 's'}"


def _moment(ns: int) -> str:
    return f"{ns / 1e6:,.3f} ms"


def _called(name: str, most: int = 100) -> str:
    """A name as a sentence can hold it; the machine formats have it whole, under ``named`` and ``longest``."""
    text = short_name(name)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _speedup(share: float) -> float | None:
    """Amdahl: what removing a share of the time gives."""
    return 1 / (1 - share) if share < 1 else None


def _bounded(change: str, speedup: float | None) -> str:
    return change if speedup is None else f"{change}: at most {speedup:.2f}x, all else as it was"


#: Kinds of events that a call launched, and their tables.
_LAUNCHED = {"kernel": "kernels", "copy": "memops"}
_KIND = {"op": "operator", "os_call": "OS call", "copy": "", "overhead": "profiler:", "none": "", "graph": ""}

#: One change for each bottleneck.
_CHANGE = {
    "profiler": "profile less (fewer tables, no backtraces, a shorter window), and look again",
    "start-up": "warm up before what you measure: load modules, compile and capture graphs once, ahead of it",
    "queued": "record what else the device does: other processes, streams that were open before the capture began",
    "input-pipeline": "have the next batch ready in time: more loader workers, prefetching, or cheaper decoding",
    "synchronization": "do not wait for the GPU in each step: read values back rarely, or a step later",
    "launch-overhead": "launch less: torch.compile, fused operators, or CUDA graphs",
    "cpu-work": "move this work off the thread that launches",
    "compute-bound": "less or cheaper arithmetic: a narrower precision, or sizes that fill the tensor cores",
    "memory-bound": "move fewer bytes: fuse operators (torch.compile, a fused optimizer), or narrower types",
    "communication": "overlap collectives with the backward pass, or send less: narrower types, rarer reductions",
    "imbalance": "give the devices equal work: batches of equal cost, layers split by time",
    "unknown": "name what the launching thread does with NVTX ranges, and record OS calls",
}
_ON_COPY = {
    "HtoD from pageable": "copy from pinned memory with non_blocking=True, so that kernels can run beside it",
    "HtoD": "prefetch the next batch on a stream of its own while this one computes",
    "DtoH": "read back less, or into pinned memory on a stream of its own",
    "DtoD": "avoid clones and changes of layout between tensors of one device",
    "PtoP": "overlap copies between devices with kernels, or send less",
}
#: What a kernel's name gives away, and the change that goes with it.
_GIVEN_AWAY = (
    (
        re.compile(r"(?<!tf32_)(?<!tf32)sgemm|simt", re.IGNORECASE),
        "products run in FP32 without tensor cores: allow TF32, or autocast to BF16",
    ),
    (re.compile(r"align[12](?!\d)", re.IGNORECASE), "products have sizes that are no multiple of 8: pad them"),
    (
        re.compile(r"soft_?max", re.IGNORECASE),
        "if these softmaxes are those of attention, scaled_dot_product_attention need not write them to memory",
    ),
)
_CAPTURE = {
    "nsys": "nsightkit capture nsys -o more -- COMMAND",
    "nodes": "nsightkit capture nsys --graph-nodes -o nodes -- COMMAND",
    "torch": "nsightkit capture torch -o more -- COMMAND",
    "shapes": "nsightkit capture torch --record-shapes -o shapes -- COMMAND",
    "ncu": "nsightkit capture ncu --count 20 -o kernels -- COMMAND",
}
_FILLED = {
    _COMPUTE: "kernels bound by arithmetic fill",
    _MEMORY: "kernels bound by the memory fill",
    _UNDECIDED: "kernels and graph replays of which nothing says what bounds them fill",
    _COMMUNICATION: "collectives that no other kernel overlaps take",
    _IMBALANCE: "waiting for the last device takes",
}
#: Tables without which some causes cannot be seen.
_TELLING = ("kernels", "memops", "graphs", "calls", "ranges", "os_calls")


_NONE = "the trace holds no GPU work, though GPU work was traced: the capture or a filter may have left it out"


def _nothing(trace: Trace, reason: str) -> dict[str, Any]:
    again = _CAPTURE["torch" if "torch" in trace.meta.tool.lower() else "nsys"]
    return {
        "bottleneck": "not-enough-data",
        "share_of_span": None,
        "confidence": "low",
        "evidence": [reason],
        "against": list(trace.meta.notes),
        "next_steps": [f"capture the GPU's work, while a step runs on it: {again}"],
        **dict.fromkeys(("total_ns", "span_ns")),
        "t0_ns": trace.t0_ns,
        "best_case_speedup": None,
        **{key: [] for key in ("candidates", "busy", "named", "longest")},
    }


class _Answer:
    """The sentences of one verdict."""

    def __init__(self, account: _Account) -> None:
        self.account, self.trace = account, account.trace
        self.total = account.totals[0]
        #: what the rule says, and what is answered
        self.code = int(_decided(self.total, account.span)[0])
        self.idle = self.code in _IDLE
        self.ns = int(_of(self.total, self.code))
        self.share = self._share(self.ns)
        self.sol = self._sol()
        self.events = self._events()
        self.name = "not-enough-data" if self._blind() else BOTTLENECKS[self.code]
        self.named, self.longest = self._named(), self._longest()

    def _share(self, ns: int) -> float:
        return min(ns / self.account.span, 1.0) if self.account.span else 0.0

    def written(self) -> dict[str, Any]:
        doubts = self._doubts()
        level = "high" if not doubts else "medium" if len(doubts) == 1 else "low"
        return {
            "bottleneck": self.name,
            "share_of_span": self.share,
            "confidence": "low" if self.name in ("unknown", "not-enough-data") else level,
            "evidence": self._evidence(),
            "against": [*doubts, *self._remarks()],
            "next_steps": self._next(),
            "total_ns": self.ns,
            "span_ns": self.account.span,
            "t0_ns": self.trace.t0_ns,
            "best_case_speedup": self._best_case(),
            "candidates": _ranked(self.account, _IDLE).to_dict("records"),
            "busy": _ranked(self.account, _BUSY).to_dict("records"),
            "named": self.named.to_dict("records"),
            "longest": self.longest.to_dict("records"),
        }

    def _blind(self) -> bool:
        """Whether the idle time has no cause, or none but the step around it, and a table is missing that may tell."""
        lacks = [table for table in ("calls", "os_calls") if not self.trace.recorded(table)]
        if self.code == _UNKNOWN:
            return bool(lacks) or not (self.trace.recorded("ranges") or self.trace.recorded("ops"))
        if self.code != _WORK or not lacks:
            return False
        mine = self.events[(self.events["kind"] == "range").to_numpy()]
        ranges = self.trace.whole.table("ranges", ["start_ns", "end_ns"]).iloc[mine["row"]]
        # A range around the start of a step says where the thread was, not what it did.
        begun = steps.find(self.trace.whole)["start_ns"].to_numpy()
        around = np.searchsorted(begun, ranges["end_ns"]) > np.searchsorted(begun, ranges["start_ns"])
        return 2 * int(mine["duration_ns"].to_numpy()[around].sum()) >= self.ns

    # -- what is behind it

    def _events(self) -> pd.DataFrame:
        """Its moments: ``device, start_ns, end_ns, kind, name, row``; the row is that in the table of its kind."""
        account, columns = self.account, ["device", "start_ns", "end_ns", "kind", "name", "row"]
        parts = []
        if self.idle:
            mine = account.gaps[account.cause == self.code]
            # A copy that was waited for is a row of the whole trace, and ran on another device: no moment of this one.
            parts.append(mine.assign(row=mine["row"].where(mine["kind"] != "copy", -1)))
        elif self.code == _IMBALANCE:
            for device in account.devices:
                waits = account.collectives.waiting(device)
                parts.append(waits.assign(name="waiting in " + waits["kind"], kind="none", row=-1))
            parts.append(account.ends().assign(kind="none", row=-1))
        else:
            mine = account.kernels[account.fills == self.code]
            parts.append(mine.assign(kind="kernel", row=mine.index))
        if self.code == _UNDECIDED:
            parts.append(self.trace.table("graphs").assign(kind="graph", name="graph replay", row=-1))
        if self.code in (_TRANSFER, _MEMORY):
            moved = account.exposed_copies if self.code == _TRANSFER else self.trace.table("memops")
            moved = moved[(moved["kind"] == "memset") == (self.code == _MEMORY)]
            called = {kind: gaps.memop_name(str(kind)) for kind in moved["kind"].cat.categories}
            parts.append(moved.assign(name=moved["kind"].cat.rename_categories(called), kind="copy", row=moved.index))
        parts = [part[columns].astype({"kind": object, "name": object}) for part in parts]
        events: pd.DataFrame = pd.concat(parts, ignore_index=True)
        return events.assign(duration_ns=events["end_ns"] - events["start_ns"])

    def _named(self) -> pd.DataFrame:
        grouped = self.events.groupby(["kind", "name"], sort=False)["duration_ns"].agg(["size", "sum"]).reset_index()
        grouped = grouped.rename(columns={"size": "count", "sum": "total_ns"})
        grouped = grouped.sort_values("total_ns", ascending=False, kind="stable", ignore_index=True).head(_KEPT)
        return grouped.assign(inside=pd.Series(self._inside(grouped), dtype=object))

    def _inside(self, named: pd.DataFrame) -> list[str | None]:
        """The operator, or else the range, around the calls behind most of the time of each name."""
        keys = pd.MultiIndex.from_frame(named[["kind", "name"]])
        number = keys.get_indexer(pd.MultiIndex.from_frame(self.events[["kind", "name"]]))
        mine = self.events.assign(number=number)[(number >= 0) & (self.events["row"] >= 0).to_numpy()]
        row, kind = mine["row"].to_numpy(np.int64), mine["kind"].to_numpy()
        call = np.where(kind == "call", row, -1)
        for launched, table in _LAUNCHED.items():
            ops = self.trace.table(table, ["process", "correlation"]).iloc[row[kind == launched]]
            call[kind == launched] = intervals.launch_of(self.trace, ops["process"], ops["correlation"])
        mine, call = mine[call >= 0], call[call >= 0]
        lasting, number = mine["duration_ns"].to_numpy(), mine["number"].to_numpy()
        calls = self.trace.whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[call]
        told: list[str | None] = [None] * len(named)
        for table in ("ranges", "ops"):  # what the latter say replaces what the former did
            outer = self.trace.whole.table(table, ["start_ns", "end_ns", "thread", "name"])
            if not len(outer) or not len(calls):
                continue
            at, names = intervals.enclosing(calls, outer), outer["name"].cat
            around = names.codes.to_numpy()[at]
            for one in range(len(named)):
                of_one = (number == one) & (at >= 0)
                time = np.bincount(around[of_one], lasting[of_one], len(names.categories))
                if 2 * time.max() > lasting[number == one].sum():
                    told[one] = str(names.categories[int(time.argmax())])
        return told

    def _longest(self) -> pd.DataFrame:
        """Its longest moments, and what ended those that are gaps."""
        at = np.argsort(-self.events["duration_ns"].to_numpy(), kind="stable")[:_NAMED]
        longest = self.events.iloc[at].drop(columns="row").reset_index(drop=True)
        ended = {}
        if self.idle:
            found = gaps.find(self.trace, min_ns=int(longest["duration_ns"].min()))
            keys = zip(found["device"].tolist(), found["start_ns"].tolist(), strict=True)
            ended = dict(zip(keys, (evidence.get("ended_by") for evidence in found["evidence"]), strict=True))
        keys = zip(longest["device"].tolist(), longest["start_ns"].tolist(), strict=True)
        by = pd.Series([ended.get(key) for key in keys], dtype=object)
        return longest.drop(columns="duration_ns").assign(ended_by=by)

    def _sol(self) -> pd.DataFrame:
        """How close the operators of the bottleneck's kind came to their bound; empty without shapes or a card."""
        if self.code not in (_COMPUTE, _MEMORY):
            return pd.DataFrame()
        try:
            table = sol.summary(self.trace, self.account.gpu)
        except UsageError:
            return pd.DataFrame()
        return table[table["bound"] == ("compute" if self.code == _COMPUTE else "memory")].reset_index(drop=True)

    def _reached(self) -> float | None:
        """That share of the datasheet's rate, weighted by time."""
        possible = self.sol[~self.sol["impossible"].to_numpy(bool)] if len(self.sol) else self.sol
        if not len(possible):
            return None
        return float(np.average(possible["sol_datasheet"], weights=possible["time_ns"]))

    # -- evidence

    def _evidence(self) -> list[str]:
        told = self._first()
        for row in self.named.head(_NAMED).to_dict("records"):
            if row["name"]:
                kind = _KIND.get(row["kind"], row["kind"])
                inside = f", most of it in {_called(row['inside'])}" if row["inside"] else ""
                times = _count(row["count"], "gap" if self.idle and row["kind"] != "copy" else "time")
                told.append(f"{kind} {_called(row['name'])}: {times}, {time_text(row['total_ns'])}{inside}".lstrip())
        moments = [
            f"{time_text(row['end_ns'] - row['start_ns'])} at {_moment(row['start_ns'])}"
            + (f" on device {row['device']}" if len(self.account.devices) > 1 else "")
            + (f" (before {_called(row['ended_by'], 40)})" if row["ended_by"] else "")
            for row in self.longest.to_dict("records")
        ]
        told.append(f"the longest: {', '.join(moments)}")
        if self.code == _TRANSFER:
            told += self._moved()
        if self.code == _IMBALANCE:
            told += self._late()
        reached = self._reached()
        if reached is not None:
            told.append(f"operators whose shapes say so run at {_percent(reached)} of the datasheet's rate")
        same, others = self._recurs()
        told.append(f"{same:,} of {same + sum(others.values()):,} {self.account.windows.what} say the same alone")
        return told

    def _first(self) -> list[str]:
        account = self.account
        of_span = f"{_percent(self.share)} of the span of {time_text(account.span)}"
        dry = account.gaps[account.cause == self.code]
        gap_ns = int((dry["end_ns"] - dry["start_ns"]).sum())
        if self.code == _TRANSFER:
            waited = f", {time_text(gap_ns)} of waiting for copies in {_count(len(dry), 'gap')}" if gap_ns else ""
            return [f"{of_span}: {time_text(self.ns - gap_ns)} of copies without a kernel beside them{waited}"]
        if self.idle:
            told = [f"{of_span}: {time_text(gap_ns)} in {_count(len(dry), 'gap')} of the GPU's work"]
            return told + (self._small() if self.code == _LAUNCH else [])
        lost = self._share(int(self.total[list(_IDLE)].sum()))
        return [
            f"{_FILLED[self.code]} {of_span}: {time_text(self.ns)}",
            f"the GPU was busy: idle time and copies without a kernel beside them take {_percent(lost)}",
        ]

    def _small(self) -> list[str]:
        """What of the launch overhead is which: launches that came late, and a device that takes its time between."""
        told = []
        if self.trace.size("kernels"):
            kernel = float(self.trace.table("kernels", ["duration_ns"])["duration_ns"].median())
            gap = float(self.events["duration_ns"].median())
            told.append(f"in the median such a gap lasts {time_text(gap)}, and any kernel {time_text(kernel)}")
        by_call = self.events[(self.events["kind"] == "call") & (self.events["row"] >= 0)]
        if len(by_call):
            begun = self.trace.whole.table("calls", ["start_ns"])["start_ns"].to_numpy()[by_call["row"].to_numpy()]
            queued = int(by_call.loc[begun <= by_call["start_ns"], "duration_ns"].sum())
            if queued >= _LOST * self.ns:
                told.append(f"{time_text(queued)} of it with the next launch already under way or done")
        return told

    def _moved(self) -> list[str]:
        """What was copied in all, overlapped or not."""
        rows = memops.summary(self.trace)
        told = []
        for row in rows[rows["kind"] != "memset"].head(_NAMED - 1).to_dict("records"):
            speed = f" at {row['gb_per_s']:.1f} GB/s" if np.isfinite(row["gb_per_s"]) else ""
            told.append(
                f"in all {_count(row['count'], 'copy', 'copies')} {row['kind']}, {row['src_kind']} to "
                f"{row['dst_kind']}: {bytes_text(row['bytes'])} in {time_text(row['total_ns'])}{speed}"
            )
        return told

    def _late(self) -> list[str]:
        told, collectives = [], self.account.collectives
        for number, device in enumerate(self.account.devices[:_KEPT]):
            waited, ends = (time_text(int(self.account.amounts[0, number, code])) for code in (_IMBALANCE, _ENDS))
            told.append(
                f"device {device} waited for {waited} in collectives, was the last to arrive in "
                f"{collectives.last(device):,} of {collectives.matched:,}, and had no work for {ends} at either end"
            )
        return told

    def _recurs(self) -> tuple[int, dict[int, int]]:
        """How many windows say the same, and what the others say."""
        alone = self.account.totals[1:][self.account.windows.inside]
        said, counts = np.unique(_decided(alone[alone.any(axis=1)]), return_counts=True)
        others = dict(zip(said.tolist(), counts.tolist(), strict=True))
        return others.pop(self.code, 0), others

    # -- doubts

    def _doubts(self) -> list[str]:
        fragile = [*self._close(), *self._borderline()]
        told = [*fragile, *self._passing(fragile=bool(fragile)), *self._scarce()]
        profiler = self._share(int(self.total[_PROFILER]))
        if self.code != _PROFILER and profiler >= _LOST:
            told.append(f"the profiler itself took {_percent(profiler)}, and may have moved other times")
        if self.code in (_COMPUTE, _MEMORY):
            told += self._by_name()
            reached = self._reached()
            if reached is not None and reached < _SLOW:
                told.append(f"at {_percent(reached)} of their bound, something else holds these operators")
        return told

    def _rivals(self) -> list[tuple[int, int]]:
        """What the rule chose among, by falling time, without the first."""
        exposed = _EXPOSED * sum(int(_of(self.total, code)) for code in _BUSY)
        talks = self.code in _TALK and sum(int(_of(self.total, code)) for code in _TALK) >= exposed
        codes = _IDLE if self.idle else _TALK if talks else _BUSY
        return sorted(((int(_of(self.total, code)), code) for code in codes if code != self.code), reverse=True)

    def _close(self) -> list[str]:
        rivals = self._rivals()
        ns, code = rivals[0]
        unclear = _UNKNOWN if self.idle else _UNDECIDED
        if ns > _CLOSE * self.ns:
            what = "what nothing explains" if code == unclear else BOTTLENECKS[code]
            return [f"{what} is close: {time_text(ns)}, {_percent(self._share(ns))}"]
        unclear_ns = next((ns for ns, code in rivals if code == unclear), 0)
        second = next((ns for ns, code in rivals if code != unclear), 0)
        if unclear_ns and second and second + unclear_ns > self.ns:
            return [f"{time_text(unclear_ns)} more have no explanation, enough to change the answer"]
        return []

    def _borderline(self) -> list[str]:
        """Whether a little more or less would turn the rule."""
        for codes, limit, of, what in (
            (_IDLE, _LOST, self.account.span, "idle time and exposed copies"),
            (_TALK, _EXPOSED, sum(int(_of(self.total, code)) for code in _BUSY), "exposed communication and waiting"),
        ):
            share = sum(int(_of(self.total, code)) for code in codes) / max(of, 1)
            if not limit / _NEAR <= share < limit * _NEAR or (self.idle and codes is _TALK):
                continue
            turned = self.total.copy()
            turned[list(codes)] = 0 if self.code in codes else 2 * turned[list(codes)]
            other = BOTTLENECKS[int(_decided(turned)[0])]
            if other != BOTTLENECKS[self.code]:
                return [f"{what} take {_percent(share)}, close to the {100 * limit:.0f} % of the rule: else {other}"]
        return []

    def _passing(self, *, fragile: bool) -> list[str]:
        """Whether the answer stands without what is not the run's habit: its start, outliers, any one window.

        One that little would turn needs no window to turn it.
        """
        windows, parts = self.account.windows, self.account.totals[1:]
        start = self._start()
        largest = np.arange(len(parts)) == int(_of(parts, self.code).argmax())
        shown = _called(windows.names[int(largest.argmax())], 40)
        for left_out, what, always in (
            (start, f"what ran before {_moment(int(windows.start[start.sum()]))}" if start.any() else "", True),
            (~windows.inside, "what ran outside the steps", True),
            (windows.outlier, f"{_count(int(windows.outlier.sum()), 'outlier')} of {windows.steps:,} steps", False),
            (largest, f"{shown} at {_moment(int(windows.start[largest][0]))}", False),
        ):
            if fragile and not always:
                continue
            left = self.total - parts[left_out].sum(axis=0)
            if left_out.any() and left[:_ENDS].any() and int(_decided(left)[0]) != self.code:
                other = BOTTLENECKS[int(_decided(left)[0])]
                return [f"without {what} it would be {other}: set-up, warm-up or an exception?{self._filter()}"]
        if fragile:
            return []
        longest = int(self.events["duration_ns"].max())
        left = self.total.copy()
        left[self.code] = max(left[self.code] - longest, 0)
        if left[:_ENDS].any() and int(_decided(left)[0]) != self.code:
            other = BOTTLENECKS[int(_decided(left)[0])]
            return [f"without its longest moment, of {time_text(longest)}, it would be {other}: an exception?"]
        same, others = self._recurs()
        if same < sum(others.values()):
            most = BOTTLENECKS[max(others, key=lambda code: others[code])]
            return [f"only {same:,} of {same + sum(others.values()):,} {windows.what} say so; most others: {most}"]
        return []

    def _start(self) -> Bool:
        """Tenths up to the one that completes most of the time, if they are the first half at most."""
        windows = self.account.windows
        if windows.are_steps or not self.ns:
            return np.zeros(len(windows.names), bool)
        reach = np.cumsum(_of(self.account.totals[1:], self.code))
        at = int(np.searchsorted(reach, _MOST * reach[-1]))
        return np.asarray((np.arange(len(reach)) <= at) & (at < len(reach) // 2))

    def _filter(self) -> str:
        """How to look at the steady part alone."""
        windows, start = self.account.windows, self._start()
        if windows.are_steps:
            return f" (--last-steps {max(windows.steps // 2, 1)})"
        return f" (--time {int(windows.start[start.sum()])}:)" if start.any() else ""

    def _scarce(self) -> list[str]:
        operations, found = sum(self.trace.size(table) for table in GPU_TABLES), self.account.windows.steps
        if found >= _FEW_STEPS:
            return []
        if operations < _FEW_OPERATIONS:
            return [f"the trace holds only {_count(operations, 'GPU operation')}"]
        return [f"the trace holds only {_count(found, 'step')}: whether this repeats is not known"] if found else []

    def _by_shape(self) -> float:
        """The share of the time of its kernels that shapes decided."""
        mine = self.account.kernels[self.account.fills == self.code]
        lasting = (mine["end_ns"] - mine["start_ns"]).to_numpy()
        return float(lasting[mine["by_shape"].to_numpy()].sum() / max(lasting.sum(), 1))

    def _by_name(self) -> list[str]:
        if self._by_shape() >= 0.5:
            return []
        return ["told by names of kernels, without shapes: a product with few rows, say, is bound by the memory"]

    def _remarks(self) -> list[str]:
        told, account = [], self.account
        for ns, code in self._rivals()[:1]:
            if self._share(ns) >= _LOST and ns <= _CLOSE * self.ns:
                told.append(f"{BOTTLENECKS[code]} takes {_percent(self._share(ns))}, too")
        lost = _ranked(account, _IDLE)
        if not self.idle and len(lost) and lost["share_of_span"].iloc[0] >= _LOST / 2:
            told.append(f"{lost['bottleneck'].iloc[0]} takes {_percent(lost['share_of_span'].iloc[0])}")
        if self.code in _TALK:
            filled = int(self.total[[_COMPUTE, _MEMORY, _UNDECIDED]].sum())
            told.append(f"other kernels run for {_percent(self._share(filled))} of the span")
        if len(account.devices) > 1:
            shares = (account.spans["busy_ns"] / max(account.wall, 1)).head(_KEPT)
            if shares.max() - shares.min() > _LOST:
                each = ", ".join(f"device {device} {_percent(share)}" for device, share in shares.items())
                told.append(f"the devices were not equally busy: {each} of the wall time")
        wrong = int(self.sol["impossible"].sum()) if len(self.sol) else 0
        if wrong:
            told.append(
                f"{_count(wrong, 'operator')} seem quicker than physics allows and were left out (nsightkit sol)"
            )
        if not account.windows.steps:
            told.append("the trace names no steps: whether this repeats was judged by tenths of its time")
        missing = [table for table in _TELLING if not self.trace.recorded(table)]
        if missing:
            told.append(f"not recorded: {', '.join(missing)}")
        return [*told, *self.trace.meta.notes]

    # -- what to do

    def _best_case(self) -> float | None:
        if self.name == "not-enough-data":
            return None
        if self.code in (_COMPUTE, _MEMORY):
            reached, known = self._reached(), self._by_shape()
            # Of operators without shapes nothing says what must remain.
            return None if reached is None or known < 0.5 else _speedup(self.share * (1 - known * min(reached, 1.0)))
        return self._without(self.code)

    def _without(self, code: int) -> float | None:
        """What removing one answer altogether gives, for the device that gains most."""
        account = self.account
        if code == _IMBALANCE:
            return _speedup(float(_of(self.total, code) / max(account.wall * len(account.devices), 1)))
        spans = np.maximum(account.spans["span_ns"].to_numpy(), 1)
        return _speedup(float((_of(account.amounts[0], code) / spans).max()))

    def _change(self, code: int) -> str:
        if code != _TRANSFER:
            return _CHANGE[BOTTLENECKS[code]]
        copies = self.account.exposed_copies
        kinds = copies["kind"].astype(object) + " from " + copies["src_kind"].astype(object)
        lasting = (copies["end_ns"] - copies["start_ns"]).groupby(kinds).sum()
        kind = str(lasting.idxmax()) if len(lasting) else "HtoD from pageable"
        return _ON_COPY.get(kind) or _ON_COPY.get(kind.partition(" ")[0], _ON_COPY["HtoD"])

    def _next(self) -> list[str]:
        if self.name == "not-enough-data":
            told = self._more_data()
        elif self.name == "unknown":
            told = [_bounded(f"{_CHANGE['unknown']} ({_CAPTURE['nsys']})", self._without(_UNKNOWN))]
        elif self.code in (_COMPUTE, _MEMORY):
            told = self._faster()
        else:
            told = [_bounded(self._change(self.code), self._without(self.code))]
        second = [(ns, code) for ns, code in self._rivals() if code not in (_UNKNOWN, _UNDECIDED)]
        if second and self._share(second[0][0]) >= _LOST:
            code = second[0][1]
            told.append(_bounded(f"then {BOTTLENECKS[code]}: {self._change(code)}", self._without(code)))
        return told

    def _more_data(self) -> list[str]:
        if self.idle:
            what = {
                "calls": "the calls that launch",
                "os_calls": "OS calls",
                "ranges": "what the thread does, as ranges",
            }
            lacks = [text for table, text in what.items() if not self.trace.recorded(table)]
            return [_bounded(f"record {' and '.join(lacks)} ({_CAPTURE['nsys']})", self._without(self.code))]
        replayed = self.events.loc[self.events["kind"] == "graph", "duration_ns"].sum()
        if 2 * replayed >= self.events["duration_ns"].sum():
            return [f"record the kernels inside the graphs: {_CAPTURE['nodes']}"]
        return [f"let counters say what bounds the kernels named above: {_CAPTURE['ncu']}"]

    def _faster(self) -> list[str]:
        told = []
        for pattern, change in _GIVEN_AWAY:
            given = [bool(pattern.search(str(name))) for name in self.named["name"]]
            if any(given):
                told.append(_bounded(change, _speedup(self._share(int(self.named["total_ns"][given].sum())))))
        told.append(_bounded(_CHANGE[self.name], _speedup(self.share)))
        best = self._best_case()
        if best is None:
            told.append(f"record shapes, to learn how far the operators are from their bound: {_CAPTURE['shapes']}")
        else:
            told.append(_bounded("bring the same operators to the datasheet's rate", best))
        return told
