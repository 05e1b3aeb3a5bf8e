"""Where the time of each device went: every moment once, lost to a cause or filled by a kind of work."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
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

__all__ = ["BOTTLENECKS", "CODE", "ENDS", "FEW_STEPS", "IDLE", "LOSSES", "PARTS", "WORK", "Account", "make", "of"]

Int = npt.NDArray[np.int64]

#: Every answer there is: the causes of idle time, then what fills busy time.
BOTTLENECKS = tuple(causes.CAUSES)
CODE = {slug: code for code, slug in enumerate(BOTTLENECKS)}
#: One column more than answers: what a device lay idle before its span or after it, while others worked.
ENDS = len(BOTTLENECKS)
IDLE = tuple(cause.slug for cause in causes.IDLE)
#: What time is lost to (collectives that nothing hides count like idle time), and what else fills it.
LOSSES = (*IDLE, "communication", "imbalance")
WORK = ("compute-bound", "memory-bound", "not-enough-data")
_COMPUTE = CODE["compute-bound"]
_MEMORY = CODE["memory-bound"]
_UNDECIDED = CODE["not-enough-data"]
_COMMUNICATION = CODE["communication"]
_IMBALANCE = CODE["imbalance"]

#: The bound of a kernel by its category, for kernels without shapes; other categories are bound by memory.
_OF_CATEGORY = {
    "GEMM": _COMPUTE,
    "convolution": _COMPUTE,
    "attention": _COMPUTE,
    "communication": _COMMUNICATION,
    "other": _UNDECIDED,
}
#: Products of a matrix with a few rows read the matrix for little arithmetic; their names often show it.
_FEW_ROWS = re.compile(r"gemv|decode|split_?kv|paged", re.IGNORECASE)
#: A server that decodes fewer sequences at once than this multiplies its weights by fewer rows than any card needs to
#: be compute-bound: in bf16 a product with m rows does about m FLOPs per byte, and cards have 140 to 300.
_FEW_SEQUENCES = 128
#: With fewer steps, tenths of the time replace them.
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
    edges : ndarray of int64, shape (parts + 1,)
        Of the parts of the time that is judged: steps, or tenths of it where there are fewer than three.
    span_ns : int
        What `amounts` sum to but for :data:`ENDS`: the sum over devices of the window or, without steps, of their
        spans.
    gaps : DataFrame
        Idle time with its causes.
    decodes : bool
        Whether the time is mostly a server's that decodes few sequences at once.
    kernels : DataFrame
        Every kernel with its ``category``, the answer it speaks for (``fills``), and whether its operator's shape said
        so (``by_shape``).
    amounts : ndarray of int64, shape (parts, devices, answers + 1)
        Nanoseconds; the last column is :data:`ENDS`.
    """

    trace: Trace
    gpu: str | None
    steps: pd.DataFrame
    spans: pd.DataFrame
    devices: list[int]
    collectives: Meetings
    edges: Int
    span_ns: int
    gaps: pd.DataFrame
    decodes: bool
    kernels: pd.DataFrame
    amounts: Int

    @property
    def begin(self) -> int:
        """Where what is judged begins."""
        return int(self.edges[0])

    @property
    def end(self) -> int:
        """Where what is judged ends."""
        return int(self.edges[-1])

    @property
    def are_steps(self) -> bool:
        """Whether the parts are steps."""
        return len(self.steps) >= FEW_STEPS

    @functools.cached_property
    def by_part(self) -> Int:
        """Nanoseconds by part and answer, over all devices."""
        return np.asarray(self.amounts.sum(axis=1))

    @functools.cached_property
    def total_ns(self) -> dict[str, int]:
        """Nanoseconds by answer."""
        total = self.by_part.sum(axis=0)
        return {name: int(of(total, name)) for name in BOTTLENECKS}

    @functools.cached_property
    def idle_ns(self) -> int:
        """Time in which no device had work."""
        return int((self.gaps["end_ns"] - self.gaps["start_ns"]).sum())

    def share(self, name: str) -> float:
        """Give the share of the time that an answer takes.

        Parameters
        ----------
        name : str
            One of :data:`BOTTLENECKS`.
        """
        return min(self.total_ns[name] / max(self.span_ns, 1), 1.0)

    def waited(self, name: str) -> pd.DataFrame:
        """Give the gaps of a cause.

        Parameters
        ----------
        name : str
        """
        return self.gaps[(self.gaps["cause"] == name).to_numpy()]

    @functools.cached_property
    def exposed_copies(self) -> pd.DataFrame:
        """Copies that run for most of their time without a kernel beside them, with their rows as index."""
        parts = []
        for device in self.devices:
            copies, _ = _memops(self.trace, device)
            work = pd.concat([_on(self.trace.whole, table, device) for table in ("kernels", "graphs")])
            hidden_ns = Coverage(work["start_ns"], work["end_ns"]).of(copies["start_ns"], copies["end_ns"])
            lasting_ns = (copies["end_ns"] - copies["start_ns"]).to_numpy()
            parts.append(copies[2 * hidden_ns < lasting_ns])
        return pd.concat(parts)

    def moments(self, name: str) -> pd.DataFrame:
        """Find when an answer took its time.

        Parameters
        ----------
        name : str
            One of :data:`BOTTLENECKS`.

        Returns
        -------
        DataFrame
            ``device, start_ns, end_ns, kind, name, row, duration_ns``; the row is that in the table of its kind.
        """
        waited = self.waited(name)
        # A copy that was waited for is a row of the whole trace, and ran on another device.
        waited = waited.assign(row=waited["row"].where(waited["kind"] != "copy", -1))
        kernels = self.kernels[(self.kernels["fills"] == CODE[name]).to_numpy()]
        parts = [waited, kernels.assign(kind="kernel", row=kernels.index)]
        if name == "imbalance":
            for device in self.devices:
                waiting = self.collectives.waiting(device)
                parts.append(waiting.assign(name="waiting in " + waiting["kind"], kind="none", row=-1))
            parts.append(self._ends())
        elif name == "not-enough-data":
            parts.append(self.trace.table("graphs").assign(kind="graph", name="graph replay", row=-1))
        elif name == "memory-transfer":
            parts.append(_as_moments(self.exposed_copies))
        elif name == "memory-bound":
            memops = self.trace.table("memops")
            parts.append(_as_moments(memops[memops["kind"] == "memset"]))
        columns = ["device", "start_ns", "end_ns", "kind", "name", "row"]
        moments = pd.concat([part[columns].astype({"kind": object, "name": object}) for part in parts])
        inside = (moments["end_ns"] > self.begin) & (moments["start_ns"] < self.end)
        moments = moments[inside].reset_index(drop=True)
        return moments.assign(duration_ns=moments["end_ns"] - moments["start_ns"])

    def _ends(self) -> pd.DataFrame:
        """When a device had nothing to do before its first operation or after its last, while others worked."""
        before = self.spans.assign(start_ns=self.begin, end_ns=self.spans["span_start_ns"], name="no work yet")
        after = self.spans.assign(start_ns=self.spans["span_end_ns"], end_ns=self.end, name="no more work")
        ends = pd.concat([before, after]).reset_index().assign(kind="none", row=-1)
        lasting = (ends["end_ns"] > ends["start_ns"]) & (len(self.steps) == 0)
        return ends[lasting]

    def ranked(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Rank answers by time.

        Parameters
        ----------
        names : iterable of str

        Returns
        -------
        list of dict
            ``bottleneck, total_ns, share_of_span``, by falling time.
        """
        rows = []
        for name in names:
            time_ns = self.total_ns[name]
            if time_ns > 0:
                rows.append({"bottleneck": name, "total_ns": time_ns, "share_of_span": self.share(name)})
        return sorted(rows, key=lambda row: -row["total_ns"])


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
    owners = [trace.table(table, ["process"])["process"].unique() for table in GPU_TABLES]
    # Devices work together that are one process's, or that all run collectives.
    together = len(collectives.devices) == len(devices) or len(np.unique(np.concatenate(owners))) == 1
    if len(windows) and not together:
        used = steps.devices(trace, int(windows["process"].iloc[0]))
        devices = [device for device in devices if device in used]
    edges, span_ns = _judged(windows, spans, len(devices))
    idle = in_window(trace)
    idle = idle[idle["device"].isin(devices)].reset_index(drop=True)
    decodes = _decodes(trace)
    kernels = _kernels(trace, gpu, decodes)
    amounts = np.zeros((len(edges) - 1, len(devices), ENDS + 1), np.int64)
    for number, device in enumerate(devices):
        amounts[:, number] = _filled(trace, device, kernels, collectives.waiting(device), edges)
        here = idle[idle["device"] == device]
        for cause in here["cause"].unique():
            waited = here[here["cause"] == cause]
            lost_ns = Coverage(waited["start_ns"], waited["end_ns"]).of(edges[:-1], edges[1:])
            amounts[:, number, CODE[cause]] += lost_ns
        if together and not len(windows):
            span = Coverage(spans.loc[[device], "span_start_ns"], spans.loc[[device], "span_end_ns"])
            amounts[:, number, ENDS] = np.diff(edges) - span.of(edges[:-1], edges[1:])
    return Account(
        trace, gpu, windows, spans, devices, collectives, edges, span_ns, idle, decodes, kernels, amounts
    )  # fmt: skip


def _judged(windows: pd.DataFrame, spans: pd.DataFrame, devices: int) -> tuple[Int, int]:
    """Give the edges of what is judged, and how long it is over all devices."""
    begin, end = int(spans["span_start_ns"].min()), int(spans["span_end_ns"].max())
    span_ns = int(spans["span_ns"].sum())
    if len(windows):
        begin, end = int(windows["begin_ns"].iloc[0]), int(windows["end_ns"].iloc[-1])
        span_ns = (end - begin) * devices
    if len(windows) >= FEW_STEPS:
        return np.append(begin, windows["end_ns"].to_numpy()), span_ns
    return np.linspace(begin, end, PARTS + 1).astype(np.int64), span_ns


def _decodes(trace: Trace) -> bool:
    phases = steps.phases(steps.summary(trace))
    few = (phases["phase"] == "decode") & (phases["sequences"].fillna(_FEW_SEQUENCES) < _FEW_SEQUENCES)
    return bool(2 * phases.loc[few, "share"].sum() >= 1)


def _kernels(trace: Trace, gpu: str | None, decodes: bool) -> pd.DataFrame:
    """Every kernel, the code of its answer, and whether its operator's shape decided."""
    table = trace.table("kernels", ["device", "start_ns", "end_ns", "name", "collective"])
    category = categorize(table["name"])
    codes = np.array([_OF_CATEGORY.get(name, _MEMORY) for name in category.categories], np.int64)
    fills = codes[category.codes]
    few_rows = matching(table["name"], _FEW_ROWS) | decodes
    fills[(fills == _COMPUTE) & few_rows] = _MEMORY
    bound = sol.kernel_bounds(trace, gpu).codes
    by_shape = bound > 0
    fills[by_shape] = np.array([_UNDECIDED, _COMPUTE, _MEMORY])[bound[by_shape]]
    # What a collective's kernel reduces on the way is not an operator of the model.
    communicates = (category == "communication") | (table["collective"] != "").to_numpy()
    fills[communicates] = _COMMUNICATION
    by_shape &= ~communicates
    return table.drop(columns="collective").assign(category=category, fills=fills, by_shape=by_shape)


def _filled(trace: Trace, device: int, kernels: pd.DataFrame, waiting: pd.DataFrame, edges: Int) -> Int:
    """What fills the busy time of a device, in ns by part and answer: where several run, the first counts."""
    here = kernels[(kernels["device"] == device).to_numpy()]
    copies, memsets = _memops(trace, device)
    layers: list[tuple[int | None, pd.DataFrame]] = []
    for code in (_COMPUTE, _MEMORY, _UNDECIDED):
        layers.append((code, here[here["fills"] == code]))
    layers.append((_UNDECIDED, _on(trace, "graphs", device)))
    layers.append((_IMBALANCE, waiting))
    layers.append((_COMMUNICATION, here[here["fills"] == _COMMUNICATION]))
    if trace is not trace.whole:  # what a filter left out hides a copy all the same
        layers.append((None, _on(trace.whole, "kernels", device)))
        layers.append((None, _on(trace.whole, "graphs", device)))
    layers.append((CODE["memory-transfer"], copies))
    layers.append((_MEMORY, memsets))
    amounts = np.zeros((len(edges) - 1, ENDS + 1), np.int64)
    covered = Coverage([], [])
    before = np.zeros(len(edges) - 1, np.int64)
    for answer, events in layers:
        covered = Coverage(*intervals.union((covered.start, covered.end), (events["start_ns"], events["end_ns"])))
        now = covered.of(edges[:-1], edges[1:])
        if answer is not None:
            amounts[:, answer] += now - before
        before = now
    return amounts


def _memops(trace: Trace, device: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Copies of a device, and memsets: those write its memory at its full rate."""
    memops = _on(trace, "memops", device, "kind", "src_kind", "dst_kind", "bytes")
    memset = (memops["kind"] == "memset").to_numpy()
    return memops[~memset], memops[memset]


def _on(trace: Trace, table: str, device: int, *more: str) -> pd.DataFrame:
    frame = trace.table(table, ["device", "start_ns", "end_ns", *more])
    return frame[frame["device"] == device]


def _as_moments(memops: pd.DataFrame) -> pd.DataFrame:
    names = memops["kind"].astype(str).map(gaps.memop_name)
    return memops.assign(name=names, kind="copy", row=memops.index)


def of(amounts: npt.NDArray[Any], name: str) -> Any:
    """One answer's time; lying idle at the ends is imbalance as well.

    Parameters
    ----------
    amounts : ndarray
        Answers and :data:`ENDS` along the last axis.
    name : str
        One of :data:`BOTTLENECKS`.
    """
    if name == "imbalance":
        return amounts[..., _IMBALANCE] + amounts[..., ENDS]
    return amounts[..., CODE[name]]
