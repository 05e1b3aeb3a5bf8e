"""Where the time of each device went: every moment once, lost to a cause or filled by a kind of work."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Iterable

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
from nsightkit.safe import Json
from nsightkit.trace.model import GPU_TABLES, Trace

Int = npt.NDArray[np.int64]

#: Every answer there is: the causes of idle time, then what fills busy time.
BOTTLENECKS = tuple(causes.CAUSES)
IDLE = tuple(cause.slug for cause in causes.IDLE)
#: What time is lost to (collectives that nothing hides count like idle time), and what else fills it.
LOSSES = (*IDLE, "communication", "imbalance")
WORK = ("compute-bound", "memory-bound", "not-enough-data")

#: What a moment counts for, by what runs in it: where several run, the first counts. The layer without an answer is
#: what a filter left out, which hides a copy all the same; below it are copies and memsets.
LAYERS = ("compute-bound", "memory-bound", "not-enough-data", "imbalance", "communication", *IDLE)
_HIDDEN = len(LAYERS)
LAYERS += ("", "memory-transfer", "memory-bound")
_COMPUTE = LAYERS.index("compute-bound")
_MEMORY = LAYERS.index("memory-bound")
_UNDECIDED = LAYERS.index("not-enough-data")
_IMBALANCE = LAYERS.index("imbalance")
_COMMUNICATION = LAYERS.index("communication")

#: The layer of a kernel by its category, for kernels without shapes; other categories are bound by memory.
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
FEW_STEPS = 3
PARTS = 10
_EVENT = ["device", "start_ns", "end_ns"]


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
    devices : list of int
    edges : ndarray of int64, shape (parts + 1,)
        Of the parts of the time that is judged: steps, or tenths of it where there are fewer than three.
    span_ns : int
        The sum over devices of the window or, without steps, of their spans.
    decodes : bool
        Whether the time is mostly a server's that decodes few sequences at once.
    kernels : DataFrame
        Every kernel with its ``duration_ns``, its ``category`` and its ``layer``, and whether its operator's shape
        decided that (``by_shape``).
    events : DataFrame
        What lasts: ``device, start_ns, end_ns, duration_ns, kind, name``, the ``row`` in the table of its kind, and
        its ``layer``, the place in :data:`LAYERS`.
    by_part : DataFrame
        Nanoseconds by part (rows) and answer (columns), over all devices.
    """

    trace: Trace
    gpu: str | None
    steps: pd.DataFrame
    devices: list[int]
    edges: Int
    span_ns: int
    decodes: bool
    kernels: pd.DataFrame
    events: pd.DataFrame
    by_part: pd.DataFrame

    @property
    def are_steps(self) -> bool:
        """Whether the parts are steps."""
        return len(self.steps) >= FEW_STEPS

    @functools.cached_property
    def total_ns(self) -> dict[str, int]:
        """Nanoseconds by answer."""
        return {name: int(self.by_part[name].sum()) for name in BOTTLENECKS}

    @property
    def idle_ns(self) -> int:
        """Time in which a device had no work."""
        is_idle = self.events["layer"].isin([LAYERS.index(cause) for cause in IDLE])
        return int(self.events.loc[is_idle, "duration_ns"].sum())

    def share(self, name: str) -> float:
        """Give the share of the time that an answer takes.

        Parameters
        ----------
        name : str
            One of :data:`BOTTLENECKS`.
        """
        return min(self.total_ns[name] / max(self.span_ns, 1), 1.0)

    def moments(self, name: str) -> pd.DataFrame:
        """Find when an answer took its time.

        Parameters
        ----------
        name : str
            One of :data:`BOTTLENECKS`.

        Returns
        -------
        DataFrame
            Rows of `events`. Copies are those that run for most of their time without a kernel beside them.
        """
        layers = [layer for layer, answer in enumerate(LAYERS) if answer == name]
        events = self.events
        is_inside = (events["end_ns"] > self.edges[0]) & (events["start_ns"] < self.edges[-1])
        moments = events[events["layer"].isin(layers) & is_inside]
        if name == "memory-transfer":
            moments = moments[~self._hidden_copies(moments)]
        return pd.DataFrame(moments.reset_index(drop=True))

    def _hidden_copies(self, moments: pd.DataFrame) -> pd.Series[bool]:
        is_hidden = pd.Series(False, moments.index)
        works = self.events["kind"].isin(["kernel", "graph"])
        for device, copies in moments[moments["layer"] > _HIDDEN].groupby("device"):
            work = self.events[works & (self.events["device"] == device)]
            hidden_ns = Coverage(work["start_ns"], work["end_ns"]).of(copies["start_ns"], copies["end_ns"])
            is_hidden[copies.index] = 2 * hidden_ns >= copies["duration_ns"]
        return is_hidden

    def ranked(self, names: Iterable[str]) -> list[Json]:
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
            if time_ns:
                rows.append({"bottleneck": name, "total_ns": time_ns, "share_of_span": self.share(name)})
        rows.sort(key=operator.itemgetter("total_ns"), reverse=True)
        return rows


def make(trace: Trace, gpu: str | None = None) -> Account:
    """Account for the time of a trace that holds GPU work.

    Parameters
    ----------
    trace : Trace
    gpu : str, optional
        Name of the card, where shapes are known and the trace does not name it.
    """
    windows = steps.windows(trace)
    spans = intervals.busy(trace)
    devices = spans["device"].tolist()
    collectives = Meetings(trace)
    owners = pd.concat([trace.table(table, ["process"]) for table in GPU_TABLES])["process"]
    # Devices work together that are one process's, or that all run collectives.
    together = len(collectives.devices) == len(devices) or owners.nunique() == 1
    if len(windows) and not together:
        used = steps.devices(trace, int(windows["process"].iloc[0]))
        devices = [device for device in devices if device in used]
    edges, span_ns = _judged(windows, spans, len(devices))
    decodes = _decodes(trace)
    kernels = _kernels(trace, gpu, decodes)
    parts = [kernels.assign(kind="kernel", row=kernels.index), *_other_work(trace), _idle(trace)]
    for device in collectives.devices:
        waiting = collectives.waiting(device)
        parts.append(waiting.assign(name="waiting in " + waiting["kind"], kind="none", row=-1, layer=_IMBALANCE))
    if together and not len(windows):
        parts.append(_ends(spans, edges))
    columns = [*_EVENT, "kind", "name", "row", "layer"]
    events = pd.concat([part[columns].astype({"kind": object, "name": object}) for part in parts])
    events = events[events["device"].isin(devices)].reset_index(drop=True)
    events["duration_ns"] = events["end_ns"] - events["start_ns"]
    by_part = pd.concat([_by_part(here, edges) for _, here in events.groupby("device")]).groupby(level=0).sum()
    return Account(trace, gpu, windows, devices, edges, span_ns, decodes, kernels, events, by_part)


def _judged(windows: pd.DataFrame, spans: pd.DataFrame, devices: int) -> tuple[Int, int]:
    """Give the edges of what is judged, and how long it is over all devices."""
    begin = int(spans["span_start_ns"].min())
    end = int(spans["span_end_ns"].max())
    span_ns = int(spans["span_ns"].sum())
    if len(windows):
        begin = int(windows["begin_ns"].iloc[0])
        end = int(windows["end_ns"].iloc[-1])
        span_ns = (end - begin) * devices
    if len(windows) >= FEW_STEPS:
        return np.append(begin, windows["end_ns"].to_numpy()), span_ns
    return np.linspace(begin, end, PARTS + 1).astype(np.int64), span_ns


def _decodes(trace: Trace) -> bool:
    phases = steps.phases(steps.summary(trace))
    few = (phases["phase"] == "decode") & (phases["sequences"].fillna(_FEW_SEQUENCES) < _FEW_SEQUENCES)
    return bool(2 * phases.loc[few, "share"].sum() >= 1)


def _kernels(trace: Trace, gpu: str | None, decodes: bool) -> pd.DataFrame:
    """Every kernel, its layer, and whether its operator's shape decided."""
    table = trace.table("kernels", [*_EVENT, "duration_ns", "name", "collective"])
    category = categorize(table["name"])
    layers = np.array([_OF_CATEGORY.get(name, _MEMORY) for name in category.categories], np.int64)
    layer = layers[category.codes]
    few_rows = matching(table["name"], _FEW_ROWS) | decodes
    layer[(layer == _COMPUTE) & few_rows] = _MEMORY
    bound = sol.kernel_bounds(trace, gpu)
    # What a collective's kernel reduces on the way is not an operator of the model.
    communicates = (category == "communication") | (table["collective"] != "").to_numpy()
    layer[bound == "compute"] = _COMPUTE
    layer[bound == "memory"] = _MEMORY
    layer[communicates] = _COMMUNICATION
    by_shape = (bound != "") & ~communicates
    return table.assign(category=category, layer=layer, by_shape=by_shape)


def _other_work(trace: Trace) -> list[pd.DataFrame]:
    """Graph replays, copies and memsets, and what a filter left out."""
    graphs = trace.table("graphs", _EVENT)
    parts = [graphs.assign(kind="graph", name="graph replay", row=-1, layer=_UNDECIDED)]
    memops = trace.table("memops", [*_EVENT, "kind"])
    names = memops["kind"].astype(str)
    layer = np.where(names == "memset", _HIDDEN + 2, _HIDDEN + 1)
    parts.append(memops.assign(kind="copy", name=names.map(gaps.memop_name), row=memops.index, layer=layer))
    if trace is not trace.whole:
        for table in ("kernels", "graphs"):
            events = trace.whole.table(table, _EVENT)
            parts.append(events.assign(kind="kernel", name="", row=-1, layer=_HIDDEN))
    return parts


def _idle(trace: Trace) -> pd.DataFrame:
    """Gaps with their causes."""
    idle = gaps.in_window(trace)
    layer = idle["cause"].astype(object).map(LAYERS.index).astype(np.int64)
    # A copy that was waited for is a row of the whole trace, and ran on another device.
    row = idle["row"].where(idle["kind"] != "copy", -1)
    return idle.assign(layer=layer, row=row)


def _ends(spans: pd.DataFrame, edges: Int) -> pd.DataFrame:
    """When a device had nothing to do before its first operation or after its last, while others worked."""
    before = spans.assign(start_ns=edges[0], end_ns=spans["span_start_ns"], name="no work yet")
    after = spans.assign(start_ns=spans["span_end_ns"], end_ns=edges[-1], name="no more work")
    ends = pd.concat([before, after]).assign(kind="none", row=-1, layer=_IMBALANCE)
    return ends[ends["end_ns"] > ends["start_ns"]]


def _by_part(events: pd.DataFrame, edges: Int) -> pd.DataFrame:
    """Nanoseconds of a device by part and answer: what each layer covers beyond those above it."""
    amounts = pd.DataFrame(0, range(len(edges) - 1), list(BOTTLENECKS))
    covered = Coverage([], [])
    before = covered.of(edges[:-1], edges[1:])
    for layer, answer in enumerate(LAYERS):
        here = events[events["layer"] == layer]
        if here.empty:
            continue
        covered = Coverage(*intervals.union((covered.start, covered.end), (here["start_ns"], here["end_ns"])))
        now = covered.of(edges[:-1], edges[1:])
        if answer:
            amounts[answer] += now - before
        before = now
    return amounts
