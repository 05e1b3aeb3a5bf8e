"""The figures to look at first: how long, how busy, how dense, on which GPU, and what was not recorded."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import steps
from nsightkit.text import Json
from nsightkit.trace.model import GPU_TABLES, Trace

#: The table that a figure comes from; the figure is known only if the table was recorded.
_TABLE_OF = {"kernel_ns": "kernels", "memop_ns": "memops", "graph_ns": "graphs", "kernel_count": "kernels"}
#: The figures of the whole, in order.
_FIGURES_IN_ORDER = (
    "span_ns",
    "busy_ns",
    "idle_ns",
    "window_ns",
    "window_idle_ns",
    "kernel_ns",
    "memop_ns",
    "graph_ns",
    "wall_ns",
    "lead_ns",
    "tail_ns",
    "kernel_count",
    "density",
    "memory_overhead",
)
#: Idle shares further apart than this get a note.
_LEAST_DIFFERENCE = 0.05


def summary(trace: Trace) -> Json:
    """Measure busy, idle and captured time of the whole trace and of each device.

    *busy* is the length of the union of a device's kernels, copies, memsets and graph replays over all
    its streams, *span* runs from the first start to the last end of those, *idle* is span minus busy. With
    several devices these three are sums over devices; ``wall_ns`` runs from the first start to the last end
    over all of them. ``kernel_ns``, ``memop_ns`` and ``graph_ns`` are sums of durations, so they can exceed
    the busy time where streams overlap. ``window_ns`` is how long the steps last
    (:func:`nsightkit.analysis.timeline.steps.windows`), which may begin long before the first operation does.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    dict
        ``span_ns, busy_ns, idle_ns``; ``window_ns`` and ``window_idle_ns`` (idle time inside the window, of the
        devices that the steps' process used, summed over them; None without steps); ``kernel_ns, memop_ns, graph_ns,
        wall_ns``; ``lead_ns`` and ``tail_ns`` (captured time before and after the span, before any filter);
        ``kernel_count``; ``density`` (union of kernels and
        graph replays over span, at most 1); ``memory_overhead`` (copy and memset time over kernel time); ``devices``
        (the same figures for each, with ``device``, its ``name`` and ``start_ns``/``end_ns`` of its span); ``tool``,
        ``tool_version`` and ``missing`` (tables the source did not record). A figure whose tables were not
        recorded, or whose denominator is 0, is None, and so are all of the GPU's where a filter leaves none of its
        work (:func:`warning_without_gpu_work`).
    """
    table = intervals.busy(trace).set_index("device")
    for key, name in _TABLE_OF.items():
        durations = trace.table(name, ["device", "duration_ns"]).groupby("device")["duration_ns"]
        table[key] = durations.size() if key == "kernel_count" else durations.sum()
    table = table.fillna(0).astype(np.int64)
    figures: Json = dict.fromkeys(_FIGURES_IN_ORDER)
    figures |= _step_window(trace)
    if warning_without_gpu_work(trace) is None and any(trace.recorded(name) for name in GPU_TABLES):
        figures |= _gpu_figures(trace, table.sum())
        figures["wall_ns"] = 0  # unless a device had work
    if len(table):
        gpu_start = int(table["span_start_ns"].min())
        gpu_end = int(table["span_end_ns"].max())
        capture_begin, capture_end = intervals.captured_window(trace)
        figures["wall_ns"] = gpu_end - gpu_start
        figures["lead_ns"] = max(gpu_start - capture_begin, 0)
        figures["tail_ns"] = max(capture_end - gpu_end, 0)
    names = {gpu.device: gpu.name for gpu in trace.meta.gpus}
    devices = []
    for device in table.index.tolist():
        row = table.loc[device]
        of_device = _gpu_figures(trace, row)
        of_device["device"] = device
        of_device["name"] = names.get(device)
        of_device["start_ns"] = int(row["span_start_ns"])
        of_device["end_ns"] = int(row["span_end_ns"])
        devices.append(of_device)
    figures["devices"] = devices
    figures["tool"] = trace.meta.tool
    figures["tool_version"] = trace.meta.tool_version
    figures["missing"] = list(trace.meta.missing)
    return figures


def _gpu_figures(trace: Trace, row: pd.Series) -> Json:
    """Compute times and shares of a device, or of the sum over all devices; None where they are unknown.

    `row` has the columns of :func:`intervals.busy` and the keys of `_TABLE_OF`.
    """
    figures: Json = {}
    for key in ("span_ns", "busy_ns", "idle_ns"):
        figures[key] = int(row[key])
    for key, name in _TABLE_OF.items():
        figures[key] = int(row[key]) if trace.recorded(name) else None
    span = figures["span_ns"]
    kernel = figures["kernel_ns"]
    memop = figures["memop_ns"]
    figures["density"] = int(row["compute_ns"]) / span if span else None
    figures["memory_overhead"] = memop / kernel if kernel and memop is not None else None
    return figures


def warning_without_gpu_work(trace: Trace) -> str | None:
    """Warn if the filters leave none of the GPU's work.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    str or None
        A sentence; None where there is such work, or none in the whole trace either.
    """
    whole_count = sum(trace.whole.size(table) for table in GPU_TABLES)
    selected_count = sum(trace.size(table) for table in GPU_TABLES)
    if selected_count or not whole_count:
        return None
    return f"The filters leave none of the trace's {whole_count:,} GPU operations, so there is nothing to measure."


def note_on_idle_shares(trace: Trace, figures: Json) -> str | None:
    """Warn if nothing is left to measure, or if the GPU's idle shares of its span and of the steps differ.

    Parameters
    ----------
    trace : Trace
    figures : dict
        The answer of :func:`summary`.

    Returns
    -------
    str or None
        A sentence; None where the two shares are within five points of each other, or one of them is unknown.
    """
    warning = warning_without_gpu_work(trace)
    if warning is not None:
        return warning
    span_ns = figures["span_ns"]
    window_ns = figures["window_ns"]
    idle_ns = figures["window_idle_ns"]
    if not span_ns or not window_ns or idle_ns is None:
        return None
    # There are steps, since they have a window, and all are of one process.
    devices = steps.devices(trace, int(steps.find(trace)["process"].iloc[0]))
    span_share = figures["idle_ns"] / span_ns
    steps_share = idle_ns / (len(devices) * window_ns)
    if abs(span_share - steps_share) <= _LEAST_DIFFERENCE:
        return None
    return (
        f"The GPU was idle for {100 * steps_share:.0f}% of the steps, but for {100 * span_share:.0f}% of its span, "
        "which runs from its first operation to its last."
    )


def _step_window(trace: Trace) -> dict[str, int]:
    """Measure how long the steps last, and how long their process's devices idle in them; nothing without steps."""
    table = steps.summary(trace)
    window = {}
    if len(table):
        window["window_ns"] = int(table["wall_ns"].sum())
        if table["idle_ns"].notna().all():
            window["window_idle_ns"] = int(table["idle_ns"].sum())
    return window
