"""Where the time of each device went: every moment once, lost to a cause or filled by a kind of work."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import causes, intervals
from nsightkit.analysis.core.categories import categorize
from nsightkit.analysis.core.intervals import Coverage
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.ranks.alignment import Meetings
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.timeline import gaps, steps
from nsightkit.analysis.timeline.gaps import in_window
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["BOTTLENECKS", "BUSY", "CODE", "ENDS", "FEW_STEPS", "IDLE", "PARTS", "Account", "make", "of", "ranked"]

Int = npt.NDArray[np.int64]

#: Every answer there is: the causes of idle time, then what fills busy time.
BOTTLENECKS = tuple(causes.CAUSES)
CODE = {slug: code for code, slug in enumerate(BOTTLENECKS)}
#: One column more than answers: what a device lay idle before its span or after it, while others worked.
ENDS = len(BOTTLENECKS)
IDLE = range(len(causes.IDLE))
BUSY = range(len(causes.IDLE), ENDS)
_COMPUTE = CODE["compute-bound"]
_MEMORY = CODE["memory-bound"]
_UNDECIDED = CODE["not-enough-data"]
_COMMUNICATION = CODE["communication"]
_IMBALANCE = CODE["imbalance"]

#: What a kernel's category says of its bound, where no shape does.
_OF_CATEGORY = {
    "GEMM": _COMPUTE,
    "attention": _COMPUTE,
    "softmax": _MEMORY,
    "normalization": _MEMORY,
    "reduction": _MEMORY,
    "elementwise": _MEMORY,
    "optimizer": _MEMORY,
    "memory-like": _MEMORY,
    "Triton-fused": _MEMORY,
    "communication": _COMMUNICATION,
    "other": _UNDECIDED,
}
#: Products of a matrix with a few rows read the matrix for next to no arithmetic; their names often say so.
_FEW_ROWS = re.compile(r"gemv|decode|split_?kv|paged", re.IGNORECASE)
#: A server that decodes fewer sequences at once than this multiplies its weights by fewer rows than any card needs to
#: be bound by arithmetic: in 16 bits a product with m rows does about m FLOPs a byte, and cards have 140 to 300.
_FEW_SEQUENCES = 128
#: Fewer steps say nothing about what is usual; then tenths of the time stand in for them.
FEW_STEPS, PARTS = 3, 10


@dataclasses.dataclass(frozen=True)
class Account:
    """The time of each device, in all and in each step.

    Attributes
    ----------
    trace : Trace
    gpu : str or None
        Name of the card, where shapes are known and the trace does not name it.
    steps : DataFrame
        As :func:`nsightkit.analysis.timeline.steps.windows` has them.
    spans : DataFrame
        As :func:`nsightkit.analysis.core.intervals.busy` has them, by device.
    devices : list of int
    collectives : Meetings
    begin, end : int
        What is judged: the steps or, without them, the time from the first operation to the last.
    span_ns : int
        What `amounts` sum to but for :data:`ENDS`: the sum over devices of the window or, without steps, of their
        spans.
    edges : ndarray of int64, shape (parts + 1,)
        Of the parts of that time: steps, or tenths of it where there are fewer than three.
    gaps : DataFrame
        Idle time with its causes.
    cause : ndarray of int64
        Of each gap, as a code.
    decodes : bool
        Whether the time is mostly a server's that decodes few sequences at once.
    kernels : DataFrame
        Every kernel, and whether its operator's shape said what bounds it (``by_shape``).
    fills : ndarray
        Of each kernel the answer that it speaks for, as a code.
    amounts : ndarray of int64, shape (parts, devices, answers + 1)
        Nanoseconds; the last column is :data:`ENDS`.
    """

    trace: Trace
    gpu: str | None
    steps: pd.DataFrame
    spans: pd.DataFrame
    devices: list[int]
    collectives: Meetings
    begin: int
    end: int
    span_ns: int
    edges: Int
    gaps: pd.DataFrame
    cause: Int
    decodes: bool
    kernels: pd.DataFrame
    fills: npt.NDArray[Any]
    amounts: Int

    @property
    def wall_ns(self) -> int:
        """How long what is judged lasted."""
        return self.end - self.begin

    @property
    def are_steps(self) -> bool:
        """Whether the parts are steps."""
        return len(self.steps) >= FEW_STEPS

    @functools.cached_property
    def by_part(self) -> Int:
        """Nanoseconds by part and answer, over all devices."""
        return np.asarray(self.amounts.sum(axis=1))

    @functools.cached_property
    def total(self) -> Int:
        """Nanoseconds by answer."""
        return np.asarray(self.by_part.sum(axis=0))

    @functools.cached_property
    def lost(self) -> dict[str, int]:
        """Nanoseconds lost by answer: idle, or in copies and collectives that nothing else ran beside."""
        amounts = {}
        for code in (*IDLE, _COMMUNICATION, _IMBALANCE):
            amounts[BOTTLENECKS[code]] = int(of(self.total, code))
        return amounts

    @functools.cached_property
    def exposed_copies(self) -> pd.DataFrame:
        """Copies that run for most of their time without a kernel beside them, with their rows as index."""
        parts = []
        for device in self.devices:
            copies, _ = _memops(self.trace, device)
            work = pd.concat([_on(self.trace.whole, table, device) for table in ("kernels", "graphs")])
            hidden = Coverage(work["start_ns"], work["end_ns"]).of(copies["start_ns"], copies["end_ns"])
            lasting = (copies["end_ns"] - copies["start_ns"]).to_numpy()
            parts.append(copies[2 * hidden < lasting])
        return pd.concat(parts)

    @functools.cached_property
    def exposed_copies_ns(self) -> int:
        """Time of copies that no kernel ran beside: of ``memory-transfer`` the part that is not idle."""
        code = CODE["memory-transfer"]
        waited = self.gaps[self.cause == code]
        return int(self.total[code] - (waited["end_ns"] - waited["start_ns"]).sum())

    def moments(self, name: str) -> pd.DataFrame:
        """When an answer took its time.

        Parameters
        ----------
        name : str
            One of :data:`BOTTLENECKS`.

        Returns
        -------
        DataFrame
            ``device, start_ns, end_ns, kind, name, row, duration_ns``; the row is that in the table of its kind.
        """
        code = CODE[name]
        waited = self.gaps[self.cause == code]
        # A copy that was waited for is a row of the whole trace, and ran on another device.
        waited = waited.assign(row=waited["row"].where(waited["kind"] != "copy", -1))
        kernels = self.kernels[self.fills == code]
        parts = [waited, kernels.assign(kind="kernel", row=kernels.index)]
        if name == "imbalance":
            waits = pd.concat([self.collectives.waiting(device) for device in self.devices])
            waits = waits.assign(name="waiting in " + waits["kind"])
            parts.append(pd.concat([waits, self.ends()]).assign(kind="none", row=-1))
        if name == "not-enough-data":
            parts.append(self.trace.table("graphs").assign(kind="graph", name="graph replay", row=-1))
        if name == "memory-transfer":
            parts.append(_as_moments(self.exposed_copies[self.exposed_copies["kind"] != "memset"]))
        if name == "memory-bound":
            memops = self.trace.table("memops")
            parts.append(_as_moments(memops[memops["kind"] == "memset"]))
        columns = ["device", "start_ns", "end_ns", "kind", "name", "row"]
        moments: pd.DataFrame = pd.concat([part[columns].astype({"kind": object, "name": object}) for part in parts])
        inside = (moments["end_ns"] > self.begin) & (moments["start_ns"] < self.end)
        moments = moments[inside].reset_index(drop=True)
        return moments.assign(duration_ns=moments["end_ns"] - moments["start_ns"])

    def ends(self) -> pd.DataFrame:
        """When a device had nothing to do before its first operation or after its last, while others worked."""
        before = self.spans.assign(start_ns=self.begin, end_ns=self.spans["span_start_ns"], name="no work yet")
        after = self.spans.assign(start_ns=self.spans["span_end_ns"], end_ns=self.end, name="no more work")
        both = pd.concat([before, after]).reset_index()
        if len(self.steps):
            return both.head(0)
        return both[both["end_ns"] > both["start_ns"]]


def make(trace: Trace, gpu: str | None = None) -> Account:
    """Account for the time of a trace that holds GPU work.

    Parameters
    ----------
    trace : Trace
    gpu : str, optional
        Name of the card, where shapes are known and the trace does not name it.
    """
    windows = steps.windows(trace)
    spans = intervals.busy(trace).set_index("device")
    devices = spans.index.tolist()
    collectives = Meetings(trace)
    together = _work_together(trace, len(collectives.devices) == len(devices))
    if len(windows):
        if not together:
            used = steps.devices(trace, int(windows["process"].iloc[0]))
            devices = [device for device in devices if device in used]
        begin, end = int(windows["begin_ns"].iloc[0]), int(windows["end_ns"].iloc[-1])
        span_ns = (end - begin) * len(devices)
    else:
        begin, end = int(spans["span_start_ns"].min()), int(spans["span_end_ns"].max())
        span_ns = int(spans["span_ns"].sum())
    if len(windows) >= FEW_STEPS:
        edges = np.append(begin, windows["end_ns"].to_numpy())
    else:
        edges = np.linspace(begin, end, PARTS + 1).astype(np.int64)
    idle = in_window(trace)
    idle = idle[idle["device"].isin(devices)].reset_index(drop=True)
    cause = pd.Categorical(idle["cause"], categories=BOTTLENECKS).codes.astype(np.int64)
    decodes = _decodes(trace)
    kernels, fills = _kernels(trace, gpu, decodes)
    amounts = []
    for device in devices:
        of_device = _filled(trace, device, kernels, fills, collectives.waiting(device), edges)
        here = (idle["device"] == device).to_numpy()
        for code in np.unique(cause):
            waited = idle[here & (cause == code)]
            of_device[:, code] += Coverage(waited["start_ns"], waited["end_ns"]).of(edges[:-1], edges[1:])
        if together and not len(windows):
            span = Coverage(spans.loc[[device], "span_start_ns"], spans.loc[[device], "span_end_ns"])
            of_device[:, ENDS] = np.diff(edges) - span.of(edges[:-1], edges[1:])
        amounts.append(of_device)
    return Account(
        trace=trace,
        gpu=gpu,
        steps=windows,
        spans=spans,
        devices=devices,
        collectives=collectives,
        begin=begin,
        end=end,
        span_ns=span_ns,
        edges=edges,
        gaps=idle,
        cause=cause,
        decodes=decodes,
        kernels=kernels,
        fills=fills,
        amounts=np.stack(amounts, axis=1) if amounts else np.zeros((len(edges) - 1, 0, ENDS + 1), np.int64),
    )


def _work_together(trace: Trace, all_in_collectives: bool) -> bool:
    """Whether devices work together: they are one process's, or all of them run collectives."""
    owners = [trace.table(table, ["process"])["process"].unique() for table in GPU_TABLES]
    return all_in_collectives or len(np.unique(np.concatenate(owners))) == 1


def _decodes(trace: Trace) -> bool:
    phases = steps.phases(trace)
    few = (phases["phase"] == "decode") & (phases["sequences"].fillna(_FEW_SEQUENCES) < _FEW_SEQUENCES)
    return bool(2 * phases.loc[few, "share"].sum() >= 1)


def _kernels(trace: Trace, gpu: str | None, decodes: bool) -> tuple[pd.DataFrame, npt.NDArray[Any]]:
    """Every kernel, whether its operator's shape said what bounds it, and the code of the answer it speaks for."""
    table = trace.table("kernels", ["device", "start_ns", "end_ns", "name", "collective"])
    category = categorize(table["name"])
    codes = np.array([_OF_CATEGORY[name] for name in category.categories], np.int8)
    fills = codes[category.codes]
    few_rows = matching(table["name"], _FEW_ROWS) | decodes
    fills[(fills == _COMPUTE) & few_rows] = _MEMORY
    bound = sol.kernel_bounds(trace, gpu).codes
    by_shape = bound > 0
    fills[by_shape] = np.array([_UNDECIDED, _COMPUTE, _MEMORY], np.int8)[bound[by_shape]]
    # What a collective's kernel reduces on the way is not an operator of the model.
    communicates = (category == "communication") | (table["collective"] != "").to_numpy()
    fills[communicates] = _COMMUNICATION
    kernels = table.drop(columns="collective").assign(by_shape=by_shape & ~communicates)
    return kernels, fills


def _filled(
    trace: Trace, device: int, kernels: pd.DataFrame, fills: Int, waiting: pd.DataFrame, edges: Int
) -> Int:  # fmt: skip
    """What fills the busy time of a device, in ns by part and answer: where several run, the first counts."""
    here = (kernels["device"] == device).to_numpy()
    copies, memsets = _memops(trace, device)
    layers: list[tuple[int | None, pd.DataFrame]] = [
        (_COMPUTE, kernels[here & (fills == _COMPUTE)]),
        (_MEMORY, kernels[here & (fills == _MEMORY)]),
        (_UNDECIDED, kernels[here & (fills == _UNDECIDED)]),
        (_UNDECIDED, _on(trace, "graphs", device)),
        (_IMBALANCE, waiting),
        (_COMMUNICATION, kernels[here & (fills == _COMMUNICATION)]),
    ]
    if trace is not trace.whole:
        # What a filter left out hides a copy all the same.
        layers += [(None, _on(trace.whole, table, device)) for table in ("kernels", "graphs")]
    layers += [(CODE["memory-transfer"], copies), (_MEMORY, memsets)]
    amounts = np.zeros((len(edges) - 1, ENDS + 1), np.int64)
    covered = Coverage([], [])
    before = np.zeros(len(edges) - 1, np.int64)
    for code, events in layers:
        covered = Coverage(*intervals.union((covered.start, covered.end), (events["start_ns"], events["end_ns"])))
        now = covered.of(edges[:-1], edges[1:])
        if code is not None:
            amounts[:, code] += now - before
        before = now
    return amounts


def _memops(trace: Trace, device: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Copies of a device, and memsets: those write its memory at its full rate."""
    memops = _on(trace, "memops", device, "kind", "src_kind", "dst_kind")
    memset = (memops["kind"] == "memset").to_numpy()
    return memops[~memset], memops[memset]


def _on(trace: Trace, table: str, device: int, *more: str) -> pd.DataFrame:
    frame = trace.table(table, ["device", "start_ns", "end_ns", *more])
    return frame[frame["device"] == device]


def _as_moments(memops: pd.DataFrame) -> pd.DataFrame:
    names = memops["kind"].astype(str).map(gaps.memop_name)
    return memops.assign(name=names, kind="copy", row=memops.index)


def of(amounts: npt.NDArray[Any], code: int) -> Any:
    """One answer's time; lying idle at the ends is imbalance as well.

    Parameters
    ----------
    amounts : ndarray
        Answers and :data:`ENDS` along the last axis.
    code : int
    """
    if code == _IMBALANCE:
        return amounts[..., code] + amounts[..., ENDS]
    return amounts[..., code]


def ranked(account: Account, codes: range) -> list[dict[str, Any]]:
    """Rank answers by time.

    Parameters
    ----------
    account : Account
    codes : range

    Returns
    -------
    list of dict
        ``bottleneck, total_ns, share_of_span``, by falling time.
    """
    rows = []
    for code in codes:
        time_ns = int(of(account.total, code))
        if time_ns > 0:
            share = min(time_ns / max(account.span_ns, 1), 1.0)
            rows.append({"bottleneck": BOTTLENECKS[code], "total_ns": time_ns, "share_of_span": share})
    return sorted(rows, key=lambda row: -row["total_ns"])
