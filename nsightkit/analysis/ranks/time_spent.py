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
from nsightkit.analysis.core.intervals import Coverage, Int, uncovered, union
from nsightkit.analysis.timeline import gaps, steps
from nsightkit.analysis.timeline.ranges import threads_with_ranges
from nsightkit.trace.model import Trace

__all__ = ["COUNT", "TIME", "WAITING", "of"]


#: Prefixes of the columns: time spent, and kernels that began.
TIME, COUNT = "time: ", "count: "
#: Time that the rank itself does not decide: in collectives it waits for others.
WAITING = f"{TIME}communication"
#: So many names of ranges, those with the most time, get a column of their own.
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
    bounds = ["device", "start_ns", "end_ns"]
    kernels = trace.table("kernels", [*bounds, "name"])
    graphs, copies, idle = trace.table("graphs", bounds), trace.table("memops", bounds), gaps.causes(trace)
    labels = [*(f"kernels of {category}" for category in CATEGORIES), "CUDA graphs"]
    counted = [label for label in labels[:-1] if label != "kernels of communication"]
    codes: Int = np.concatenate([categorize(kernels["name"]).codes, np.full(len(graphs), len(labels) - 1, np.int8)])
    work = pd.concat([kernels[bounds], graphs]).assign(what=pd.Categorical.from_codes(codes, pd.Index(labels)))
    talking = (work["what"] == "kernels of communication").to_numpy()
    work, talk = work[~talking], work[talking]
    # What each operation adds to those that began before it.
    work = work.assign(fresh_ns=work["end_ns"] - uncovered(work["start_ns"], work["end_ns"], work["device"]))
    spent = [*counted, "CUDA graphs", "copies", "communication", *(f"idle, {cause}" for cause in gaps.CAUSES)]
    out = {f"{TIME}{what}": np.zeros(len(low), np.int64) for what in spent}
    out |= {f"{COUNT}{what}": np.zeros(len(low), np.int64) for what in counted}
    for parts, begin in ((work, "fresh_ns"), (idle.assign(what="idle, " + idle["cause"].astype(str)), "start_ns")):
        for (_, what), rows in parts.groupby(["device", "what"], observed=True):
            out[TIME + str(what)] += Coverage(rows[begin], rows["end_ns"]).of(low, high)
    for what, rows in work[work["what"].isin(counted)].groupby("what", observed=True):
        begun = np.sort(rows["start_ns"].to_numpy())
        out[COUNT + str(what)] += np.searchsorted(begun, high) - np.searchsorted(begun, low)
    devices = sorted({int(d) for frame in (kernels, graphs, copies) for d in pd.unique(frame["device"])})
    for device in devices:
        mine = [frame[frame["device"] == device] for frame in (work, copies, talk)]
        bounds_of = [(rows["start_ns"], rows["end_ns"]) for rows in mine]
        computed, moved, all_of_it = (Coverage(*union(*bounds_of[:n])).of(low, high) for n in (1, 2, 3))
        out[f"{TIME}copies"] += moved - computed
        out[WAITING] += all_of_it - moved
    rest = (high - low) * max(len(devices), 1) - sum(out[f"{TIME}{what}"] for what in spent)
    return out | {f"{TIME}before or after all GPU work": rest}


def _of_thread(trace: Trace, low: Int, high: Int) -> dict[str, Int]:
    """Among the outermost ranges, other than steps, of the thread with the most time in ranges of its own."""
    ranges = trace.table("ranges", ["start_ns", "end_ns", "thread", "name", "parent"])
    ranges = ranges[ranges["thread"].isin(threads_with_ranges(trace)).to_numpy()]
    length = ranges["end_ns"] - ranges["start_ns"]
    longest = length.groupby(ranges["thread"]).sum().sort_values(kind="stable", ascending=False).index[:1]
    outer = ranges[ranges["thread"].isin(longest) & ~ranges["name"].isin(set(steps.find(trace)["step"]))]
    # In no range but a step.
    outer = outer[~outer["parent"].isin(outer.index)]
    # ``epoch 1``, ``epoch 2`` are one thing to spend time on.
    name = outer["name"].astype("str").map(lambda text: _NUMBERED.sub("#", text))
    total = length[outer.index].groupby(name).sum().sort_values(ascending=False)
    out: dict[str, Int] = {}
    for one in total.index[:_MOST_NAMES]:
        some = outer[name == one]
        out[f"{TIME}range {one}"] = Coverage(some["start_ns"], some["end_ns"]).of(low, high)
    out[f"{TIME}in no range"] = high - low - sum(out.values(), np.zeros(len(low), np.int64))
    return out
