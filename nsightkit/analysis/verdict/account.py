"""The time of each device: every moment counts once, as lost to a cause or as filled by a kind of work."""

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
from nsightkit.analysis.ranks.alignment import Meetings
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.timeline import gaps, steps
from nsightkit.text import Json, matching
from nsightkit.trace.model import GPU_TABLES, Trace

Int = npt.NDArray[np.int64]

#: All possible answers of the verdict: the causes of idle time, then what fills busy time.
BOTTLENECKS = tuple(causes.CAUSES)
IDLE = tuple(cause.slug for cause in causes.IDLE)
#: Answers for lost time (collectives that no other work hides count like idle time), and for time that work fills.
LOSSES = (*IDLE, "communication", "imbalance")
WORK = ("compute-bound", "memory-bound", "not-enough-data")

#: The answer that a moment counts for, by layer. Each event of a device belongs to a layer, a position in this tuple;
#: where several events run at once, the one with the first layer counts. So kernels hide copies: those are in the last
#: layers, below the layer without an answer, which holds the kernels that a filter left out. The last "memory-bound" is
#: for memsets: they are work that the memory bounds, but kernels hide them.
LAYERS = ("compute-bound", "memory-bound", "not-enough-data", "imbalance", "communication", *IDLE)
_FILTERED = len(LAYERS)
LAYERS += ("", "memory-transfer", "memory-bound")
_COMPUTE = LAYERS.index("compute-bound")
_MEMORY = LAYERS.index("memory-bound")
_UNDECIDED = LAYERS.index("not-enough-data")
_IMBALANCE = LAYERS.index("imbalance")
_COMMUNICATION = LAYERS.index("communication")

#: The layer of a kernel by its category, for kernels without shapes; other categories are bound by memory.
_LAYER_OF_CATEGORY = {
    "GEMM": _COMPUTE,
    "convolution": _COMPUTE,
    "attention": _COMPUTE,
    "communication": _COMMUNICATION,
    "other": _UNDECIDED,
}
#: Kernels of products with few rows: they read a whole matrix for little arithmetic, so memory bounds them.
_FEW_ROWS = re.compile(r"gemv|decode|split_?kv|paged", re.IGNORECASE)
#: A server that decodes fewer sequences at once is bound by memory: in bf16 a product with m rows does about m FLOPs
#: per byte of the weights, and cards need 140 to 300 to be compute-bound.
_FEW_SEQUENCES = 128
#: With fewer steps than this the parts of the run are not its steps but so many equal parts of its time.
FEW_STEPS = 3
EQUAL_PARTS = 10
_EVENT = ["device", "start_ns", "end_ns"]


@dataclasses.dataclass(frozen=True)
class Account:
    """The time of each device by answer, in all and in each part of the run.

    Attributes
    ----------
    trace : Trace
    gpu : str or None
        Name of the card, where shapes are known and the trace does not name it.
    steps : DataFrame
        As :func:`nsightkit.analysis.timeline.steps.windows` has them.
    devices : list of int
    edges : ndarray of int64, shape (parts + 1,)
        Where the parts of the judged time begin and the last one ends: steps, or tenths of the time where there are
        fewer than three steps. Ns on the trace's clock.
    span_ns : int
        The judged time, summed over devices: the window of the steps or, without steps, each device's span.
    decodes : bool
        Whether a server that decodes few sequences at once fills most of the time.
    kernels : DataFrame
        Every kernel with its ``duration_ns``, its ``category`` and its ``layer``, and whether its operator's shape
        decided that (``by_shape``).
    events : DataFrame
        Everything that takes a device's time, gaps included: ``device, start_ns, end_ns, duration_ns, kind, name``,
        the ``row`` in the table of its kind (-1: none), and its ``layer``, a position in :data:`LAYERS`. ``kind`` is
        kernel, graph, copy (a memset, too) or none; for a gap, the kind of the event that decided its cause.
    by_part : DataFrame
        Nanoseconds by part (rows) and answer (columns), over all devices. Each moment of a device counts once.
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
    def parts_are_steps(self) -> bool:
        """Whether the parts of the run are its steps, rather than tenths of its time."""
        return len(self.steps) >= FEW_STEPS

    @functools.cached_property
    def total_ns(self) -> dict[str, int]:
        """Nanoseconds by answer, over all parts and devices."""
        return {name: int(self.by_part[name].sum()) for name in BOTTLENECKS}

    @property
    def idle_ns(self) -> int:
        """The time in which a device had no work, over all devices."""
        # `index` finds the first "memory-transfer", the layer of gaps: copies, in the later one, are work.
        is_idle = self.events["layer"].isin([LAYERS.index(cause) for cause in IDLE])
        return int(self.events.loc[is_idle, "duration_ns"].sum())

    def share(self, name: str) -> float:
        """Give the share of the judged time that an answer takes, from 0 to 1.

        Parameters
        ----------
        name : str
            One of :data:`BOTTLENECKS`.
        """
        # It would exceed 1 where, without steps, devices wait outside their spans (`_times_without_work`).
        return min(self.total_ns[name] / max(self.span_ns, 1), 1.0)

    def moments(self, name: str) -> pd.DataFrame:
        """List the events that an answer is about, in the judged time: those of its layers (:data:`LAYERS`).

        Parameters
        ----------
        name : str
            One of :data:`BOTTLENECKS`.

        Returns
        -------
        DataFrame
            Rows of `events`. For ``memory-transfer`` only copies that no kernel overlaps for half of their time.
        """
        layers = [layer for layer, answer in enumerate(LAYERS) if answer == name]
        events = self.events
        is_inside = (events["end_ns"] > self.edges[0]) & (events["start_ns"] < self.edges[-1])
        moments = events[events["layer"].isin(layers) & is_inside]
        if name == "memory-transfer":
            moments = moments[~self._hidden_copies(moments)]
        return pd.DataFrame(moments.reset_index(drop=True))

    def _hidden_copies(self, moments: pd.DataFrame) -> pd.Series[bool]:
        """Flag the copies that kernels of their device overlap for at least half of their time."""
        is_hidden = pd.Series(False, moments.index)
        kernels = self.events[self.events["kind"].isin(["kernel", "graph"])]
        # Moments of memory-transfer are copies, and gaps with that cause. Copies have the layers behind _FILTERED.
        copies = moments[moments["layer"] > _FILTERED]
        for device, own_copies in copies.groupby("device"):
            work = kernels[kernels["device"] == device]
            hidden_ns = Coverage(work["start_ns"], work["end_ns"]).of(own_copies["start_ns"], own_copies["end_ns"])
            is_hidden[own_copies.index] = 2 * hidden_ns >= own_copies["duration_ns"]
        return is_hidden

    def ranked(self, names: Iterable[str]) -> list[Json]:
        """Rank answers by time, without answers that take no time.

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


def make_account(trace: Trace, gpu: str | None = None) -> Account:
    """Account for the time of a trace that holds GPU work.

    Parameters
    ----------
    trace : Trace
    gpu : str, optional
        Name of the card, where shapes are known and the trace does not name it.

    Returns
    -------
    Account
        Of the devices that the steps' process used, or of all that work together.
    """
    windows = steps.windows(trace)
    spans = intervals.busy(trace)
    devices = spans["device"].tolist()
    collectives = Meetings(trace)
    processes = pd.concat([trace.table(table, ["process"]) for table in GPU_TABLES])["process"]
    # Devices work together if one process uses them, or if all run collectives.
    work_together = len(collectives.devices) == len(devices) or processes.nunique() == 1
    if len(windows) and not work_together:
        used_by_steps = steps.devices(trace, int(windows["process"].iloc[0]))
        devices = [device for device in devices if device in used_by_steps]
    edges, span_ns = _judged_time(windows, spans, len(devices))
    decodes = _decodes(trace)
    kernels = _kernels_with_layers(trace, gpu, decodes)
    # Tables of events with their layers.
    tables = [kernels.assign(kind="kernel", row=kernels.index), *_other_gpu_work(trace), _gaps_with_layers(trace)]
    for device in collectives.devices:
        waiting = collectives.waiting(device)
        tables.append(waiting.assign(name="waiting in " + waiting["kind"], kind="none", row=-1, layer=_IMBALANCE))
    # With steps, the gaps hold these times, too.
    if work_together and not len(windows):
        tables.append(_times_without_work(spans, edges))
    columns = [*_EVENT, "kind", "name", "row", "layer"]
    events = pd.concat([table[columns].astype({"kind": object, "name": object}) for table in tables])
    events = events[events["device"].isin(devices)].reset_index(drop=True)
    events["duration_ns"] = events["end_ns"] - events["start_ns"]
    # A table for each device, whose rows are parts; then for each part the sum over devices.
    by_device = [_ns_by_part(of_device, edges) for _, of_device in events.groupby("device")]
    by_part = pd.concat(by_device).groupby(level=0).sum()
    return Account(trace, gpu, windows, devices, edges, span_ns, decodes, kernels, events, by_part)


def _judged_time(windows: pd.DataFrame, spans: pd.DataFrame, device_count: int) -> tuple[Int, int]:
    """Choose the time that is judged: the edges of its parts, and its length in ns summed over devices.

    With steps that is from the first one's begin to the last one's end, the same for each device; else each device's
    own span. The parts are the steps or, if there are few, equal parts of the time.
    """
    begin = int(spans["span_start_ns"].min())
    end = int(spans["span_end_ns"].max())
    span_ns = int(spans["span_ns"].sum())
    if len(windows):
        begin = int(windows["begin_ns"].iloc[0])
        end = int(windows["end_ns"].iloc[-1])
        span_ns = (end - begin) * device_count
    if len(windows) >= FEW_STEPS:
        return np.append(begin, windows["end_ns"].to_numpy()), span_ns
    return np.linspace(begin, end, EQUAL_PARTS + 1).astype(np.int64), span_ns


def _decodes(trace: Trace) -> bool:
    """Whether decoding few sequences at once takes at least half of the time; an unknown number is not few.

    Such matmuls have few rows, so memory bounds them (:data:`_FEW_SEQUENCES`), which the names of kernels do not show.
    """
    phases = steps.phases(steps.summary(trace))
    is_small_decode = (phases["phase"] == "decode") & (phases["sequences"].fillna(_FEW_SEQUENCES) < _FEW_SEQUENCES)
    return bool(2 * phases.loc[is_small_decode, "share"].sum() >= 1)


def _kernels_with_layers(trace: Trace, gpu: str | None, decodes: bool) -> pd.DataFrame:
    """List every kernel with its ``category``, its ``layer``, and whether a shape decided that (``by_shape``)."""
    table = trace.table("kernels", [*_EVENT, "duration_ns", "name", "collective"])
    category = categorize(table["name"])
    # Per category, then per kernel: the codes of a categorical are positions in its categories.
    layers = np.array([_LAYER_OF_CATEGORY.get(name, _MEMORY) for name in category.categories], np.int64)
    layer = layers[category.codes]
    has_few_rows = matching(table["name"], _FEW_ROWS) | decodes
    layer[(layer == _COMPUTE) & has_few_rows] = _MEMORY
    # Shapes decide where they are known ("" elsewhere), but for collectives: their arithmetic is not the model's.
    bound = sol.kernel_bounds(trace, gpu)
    communicates = (category == "communication") | (table["collective"] != "").to_numpy()
    layer[bound == "compute"] = _COMPUTE
    layer[bound == "memory"] = _MEMORY
    layer[communicates] = _COMMUNICATION
    by_shape = (bound != "") & ~communicates
    return table.assign(category=category, layer=layer, by_shape=by_shape)


def _other_gpu_work(trace: Trace) -> list[pd.DataFrame]:
    """List graph replays, copies and memsets, and the kernels and graph replays that a filter left out, with layers."""
    graphs = trace.table("graphs", _EVENT)
    parts = [graphs.assign(kind="graph", name="graph replay", row=-1, layer=_UNDECIDED)]
    memops = trace.table("memops", [*_EVENT, "kind"])
    names = memops["kind"].astype(str)
    # The two last layers, which kernels hide (LAYERS): copies, at _FILTERED + 1, take time as memory-transfer, memsets,
    # at _FILTERED + 2, as memory-bound.
    layer = np.where(names == "memset", _FILTERED + 2, _FILTERED + 1)
    parts.append(memops.assign(kind="copy", name=names.map(gaps.memop_name), row=memops.index, layer=layer))
    if trace is not trace.whole:
        # Those that the filter left in are here again: their own layers come first, so that nothing counts twice.
        for table in ("kernels", "graphs"):
            events = trace.whole.table(table, _EVENT)
            parts.append(events.assign(kind="kernel", name="", row=-1, layer=_FILTERED))
    return parts


def _gaps_with_layers(trace: Trace) -> pd.DataFrame:
    """List the gaps of the judged time, with the layers of their causes."""
    idle = gaps.in_window(trace)
    layer = idle["cause"].astype(object).map(LAYERS.index).astype(np.int64)
    # A copy (a page of managed memory) may decide a gap's cause. With its row, the gap would be taken for that copy.
    row = idle["row"].where(idle["kind"] != "copy", -1)
    return idle.assign(layer=layer, row=row)


def _times_without_work(spans: pd.DataFrame, edges: Int) -> pd.DataFrame:
    """List the times before the first and after the last operation of a device, while other devices worked."""
    before = spans.assign(start_ns=edges[0], end_ns=spans["span_start_ns"], name="no work yet")
    after = spans.assign(start_ns=spans["span_end_ns"], end_ns=edges[-1], name="no more work")
    ends = pd.concat([before, after]).assign(kind="none", row=-1, layer=_IMBALANCE)
    return ends[ends["end_ns"] > ends["start_ns"]]


def _ns_by_part(events: pd.DataFrame, edges: Int) -> pd.DataFrame:
    """Add up the time of a device by part and answer, in ns: what each layer covers beyond the layers before it."""
    amounts_ns = pd.DataFrame(0, range(len(edges) - 1), list(BOTTLENECKS))
    covered = Coverage([], [])
    covered_before_ns = covered.of(edges[:-1], edges[1:])
    for layer, answer in enumerate(LAYERS):
        of_layer = events[events["layer"] == layer]
        if of_layer.empty:
            continue
        covered = Coverage(*intervals.union((covered.start, covered.end), (of_layer["start_ns"], of_layer["end_ns"])))
        covered_ns = covered.of(edges[:-1], edges[1:])
        if answer:
            amounts_ns[answer] += covered_ns - covered_before_ns
        covered_before_ns = covered_ns
    return amounts_ns
