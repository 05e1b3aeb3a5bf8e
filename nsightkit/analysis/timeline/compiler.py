"""What compilers did while the program ran: which frames of torch.compile they compiled, and which regions ran.

What `memoised` functions return must not be changed.
"""

from __future__ import annotations

import re

import pandas as pd

from nsightkit.text import matching
from nsightkit.trace.model import Trace, memoised

#: Names under which compilers record themselves.
COMPILES = re.compile(
    r"(?i)\(dynamo_timed\)|_compile\.(compile_inner|<locals>)|\b(inductor|backend|triton|jit|nvrtc)[\s_.:]*compil|"
    r"nvrtc::|\bcompile_?fx\b|\bcompile_?(kernel|fusion|program|module|graph)\b|::compile\w*|async_compile|triton\.compile|"
    r"^entire_(frame|backward)_compile$|\bautotun(e|ing)|^Xla(Compile|EmitGpuAsm|Autotuner)"
)
#: The range that PyTorch opens each time that compiled code runs.
_REGION = re.compile("^Torch-Compiled Region")
#: Dynamo's number of a frame, and how often it had compiled that frame before.
_FRAME = re.compile(r"\bcompile_id=\D?(\d+)/(\d+)")


@memoised
def compiles(trace: Trace) -> pd.DataFrame:
    """Find when compilers ran, outermost events only.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        ``start_ns, end_ns, thread, frame``, in order of time; ``frame`` is Dynamo's number of the frame, NA where it is
        not recorded.
    """
    events = _named_events(trace, COMPILES)
    # Outermost events only: each ends later than all earlier events of its thread.
    reach = events.groupby("thread")["end_ns"].cummax().groupby(events["thread"]).shift(fill_value=-1)
    events = events[events["end_ns"] > reach].reset_index(drop=True)
    frame_ranges = trace.table("ranges", ["name", "start_ns", "thread"])
    frame_ranges = frame_ranges[matching(frame_ranges["name"], _FRAME)].sort_values("start_ns")
    frame_ranges["frame"] = frame_ranges["name"].astype(str).str.extract(_FRAME)[0].astype("Int64")
    # An event gets the frame of the first range inside the event that names a frame.
    first_inside = pd.merge_asof(
        events[["start_ns", "thread"]],
        frame_ranges[["start_ns", "thread", "frame"]].assign(named_ns=frame_ranges["start_ns"]),
        on="start_ns",
        by="thread",
        direction="forward",
    )
    events["frame"] = first_inside["frame"].where(first_inside["named_ns"] <= events["end_ns"])
    return events


@memoised
def regions(trace: Trace) -> pd.DataFrame:
    """Find when compiled code ran.

    A graph break begins another region, inside the one that it breaks, and so does a call of another compiled function.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        ``start_ns, end_ns, thread``, in order of time.
    """
    return _named_events(trace, _REGION)


def _named_events(trace: Trace, expression: re.Pattern[str]) -> pd.DataFrame:
    """Operators and ranges whose name matches, in order of time; of equal starts the longest first."""
    columns = ["start_ns", "end_ns", "thread"]
    parts = []
    for table in ("ops", "ranges"):
        events = trace.table(table, ["name", *columns])
        parts.append(events.loc[matching(events["name"], expression), columns])
    return pd.concat(parts).sort_values(["start_ns", "end_ns"], ascending=[True, False], ignore_index=True)
