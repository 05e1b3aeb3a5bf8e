"""What windows of a rank's time were spent on, in parts that add up: the account by which ranks are compared.

With GPU work, a device's time is divided among kernels by category, copies, communication and idle time by cause. What
goes on at once counts once: for computing before copying before communicating, and of two kernels for the one that
began first. Without, it is the time of the thread that makes the steps, among its outermost ranges.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.categories import CATEGORIES, categorize
from nsightkit.analysis.core.intervals import Coverage
from nsightkit.analysis.timeline import gaps, steps
from nsightkit.analysis.timeline.ranges import threads_with_ranges
from nsightkit.trace.model import Trace

__all__ = ["COUNT", "TIME", "WAITING", "of"]

Int = npt.NDArray[np.int64]

#: Prefixes of the columns: time spent, and kernels that began.
TIME, COUNT = "time: ", "count: "
#: Time that is no doing of the rank itself: in collectives it waits for others.
WAITING = f"{TIME}communication"
#: Of the names of ranges, those with the most time are told apart.
_MOST_NAMES = 24
_NUMBERED = re.compile(r"\d+")


def of(trace: Trace, start: npt.ArrayLike, end: npt.ArrayLike) -> pd.DataFrame:
    """Divide the time of some windows among what it was spent on.

    Parameters
    ----------
    trace : Trace
    start, end : array_like of int
        The windows.

    Returns
    -------
    DataFrame
        One row a window. Columns ``time: …`` in nanoseconds: ``time: kernels of GEMM`` and the like,
        ``time: CUDA graphs``, ``time: copies``, ``time: communication``, ``time: idle, input-pipeline`` and the like,
        ``time: before or after all GPU work``; their sum is the windows' length times the number of devices.
        ``count: kernels of GEMM`` and the like, how many began. Without GPU work ``time: range NAME`` and
        ``time: in no range``, whose sum is the windows' length.
    """
    low, high = np.asarray(start, np.int64), np.asarray(end, np.int64)
    on_gpu = any(trace.size(table) for table in ("kernels", "memops", "graphs"))
    out = _of_gpu(trace, low, high) if on_gpu else _of_thread(trace, low, high)
    return pd.DataFrame(out, index=pd.RangeIndex(len(low)))


def _of_gpu(trace: Trace, low: Int, high: Int) -> dict[str, Int]:
    kernels = trace.table("kernels", ["device", "start_ns", "end_ns", "name"])
    kernels = kernels.assign(category=categorize(kernels["name"]))
    graphs = trace.table("graphs", ["device", "start_ns", "end_ns"])
    copies = trace.table("memops", ["device", "start_ns", "end_ns"])
    idle = gaps.causes(trace)
    labels = [f"kernels of {category}" for category in CATEGORIES if category != "communication"] + ["CUDA graphs"]
    counted = [label for label in labels if label.startswith("kernels")]
    out = {f"{TIME}{label}": np.zeros(len(low), np.int64) for label in labels}
    out |= {f"{TIME}{what}": np.zeros(len(low), np.int64) for what in ("copies", "communication")}
    out |= {f"{TIME}idle, {cause}": np.zeros(len(low), np.int64) for cause in gaps.CAUSES}
    out |= {f"{COUNT}{label}": np.zeros(len(low), np.int64) for label in counted}
    devices = sorted({int(d) for frame in (kernels, graphs, copies) for d in pd.unique(frame["device"])})
    for device in devices:
        mine, replays, copied = (frame[frame["device"] == device] for frame in (kernels, graphs, copies))
        talking = (mine["category"] == "communication").to_numpy()
        work, talk = mine[~talking], mine[talking]
        label = np.concatenate(
            [np.array([f"kernels of {c}" for c in work["category"]], dtype=object), np.full(len(replays), labels[-1])]
        )
        begun, done = (np.concatenate([work[c].to_numpy(), replays[c].to_numpy()]) for c in ("start_ns", "end_ns"))
        order = np.argsort(begun, kind="stable")
        begun, done, label = begun[order], done[order], label[order]
        # What each operation adds to those that began before it.
        reach = np.maximum.accumulate(done) if len(done) else done
        fresh = np.maximum(begun, np.concatenate(([begun[0]], reach[:-1]))) if len(begun) else begun
        for one in pd.unique(label).tolist():
            of_one = label == one
            out[f"{TIME}{one}"] += Coverage(fresh[of_one], done[of_one]).of(low, high)
            if f"{COUNT}{one}" in out:
                first = begun[of_one]
                out[f"{COUNT}{one}"] += np.searchsorted(first, high) - np.searchsorted(first, low)
        computed = Coverage(begun, done)
        moved = _both(computed, copied)
        talked = _both(moved, talk)
        out[f"{TIME}copies"] += moved.of(low, high) - computed.of(low, high)
        out[f"{TIME}communication"] += talked.of(low, high) - moved.of(low, high)
        of_device = idle[idle["device"] == device]
        for cause in gaps.CAUSES:
            some = of_device[of_device["cause"] == cause]
            out[f"{TIME}idle, {cause}"] += Coverage(some["start_ns"], some["end_ns"]).of(low, high)
    told = sum(column for name, column in out.items() if name.startswith(TIME))
    out[f"{TIME}before or after all GPU work"] = (high - low) * max(len(devices), 1) - told
    return out


def _both(one: Coverage, other: pd.DataFrame) -> Coverage:
    return Coverage(
        np.concatenate((one.start, other["start_ns"].to_numpy())), np.concatenate((one.end, other["end_ns"].to_numpy()))
    )


def _of_thread(trace: Trace, low: Int, high: Int) -> dict[str, Int]:
    """Among the outermost ranges, other than steps, of the thread with the most time in ranges of its own."""
    ranges = trace.table("ranges", ["start_ns", "end_ns", "thread", "name", "parent"])
    ranges = ranges[ranges["thread"].isin(threads_with_ranges(trace)).to_numpy()]
    out: dict[str, Int] = {}
    if len(ranges):
        length = ranges["end_ns"] - ranges["start_ns"]
        ranges = ranges[ranges["thread"] == length.groupby(ranges["thread"]).sum().idxmax()]
        step = set(steps.find(trace)["step"])
        stepping = ranges["name"].isin(step).to_numpy()
        outer = ranges[~stepping]
        # In no range but a step.
        outer = outer[~outer["parent"].isin(outer.index).to_numpy()]
        # ``epoch 1``, ``epoch 2`` are one thing to spend time on.
        name = outer["name"].astype("str").map(lambda text: _NUMBERED.sub("#", text))
        total = (outer["end_ns"] - outer["start_ns"]).groupby(name).sum().sort_values(ascending=False)
        for one in total.index[:_MOST_NAMES]:
            some = outer[(name == one).to_numpy()]
            out[f"{TIME}range {one}"] = Coverage(some["start_ns"], some["end_ns"]).of(low, high)
    out[f"{TIME}in no range"] = high - low - (sum(out.values()) if out else np.zeros(len(low), np.int64))
    return out
