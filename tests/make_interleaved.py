"""A trace of every table on two GPUs, with names that would break text made by hand."""

import numpy as np
import pandas as pd

from nsightkit.trace.model import TABLES, Gpu, Trace, TraceMeta

HOSTILE = [
    '<img src=x onerror="alert(1)">',
    'a"b\\c',
    "line\nbreak\ttab\x00",
    "</script>{}[],",
    "µs → 時間",
    "",
    "%s {0} $(x)",
]


PROCESS, OTHER = 4242, 7
MAIN, SIDE, LONE = PROCESS << 24 | PROCESS, PROCESS << 24 | 5, OTHER << 24 | 9
COPIES = ["HtoD", "DtoH", "memset", "PtoP", "unified HtoD", "other", "HtoD", "DtoD", "HtoH"]
#: What is not any number or any name: per table, columns of nine rows or of all.
GIVEN = {
    "kernels": {"collective": ""},
    "memops": {"kind": COPIES, "src_kind": "device", "dst_kind": "pinned", "process": OTHER},
    "calls": {"correlation": np.arange(300) + 1},
    "syncs": {"kind": "stream", "stream": [7, -1, 8] * 3},
    "ops": {"thread": SIDE, "inputs": "", "forward_thread": -1},
    "os_calls": {"process": OTHER, "thread": LONE},
    "overhead": {"process": [-1] * 4 + [PROCESS] * 5, "thread": [-1] * 4 + [MAIN] * 5},
}
RANGES = pd.DataFrame(
    {
        "start_ns": [0, 10, 20, 20, 500, 100, 300],
        "end_ns": [1000, 400, 30, 30, 2000, 700, 800],
        "process": [PROCESS] * 4 + [OTHER] + [PROCESS] * 2,
        "thread": [MAIN, MAIN, MAIN, SIDE, LONE, MAIN, MAIN],
        "end_thread": [MAIN, MAIN, MAIN, SIDE, LONE, SIDE, MAIN],
        "name": HOSTILE,
        "domain": ["", "NCCL", "", 'd"', "", "", "NCCL"],
        "kind": ["pushpop", "pushpop", "annotation", "pushpop", "pushpop", "startend", "startend"],
        "open": [False, False, False, False, True, False, True],
        "level": [0, 1, 2, 0, 0, 0, 0],
        "parent": [-1, 0, 1, -1, -1, -1, -1],
    }
)


def interleaved(start=1_000):
    """Two GPUs, overlapping kernels on a stream, every table, names that would break text made by hand."""
    rng = np.random.default_rng(0)
    frames = {"ranges": RANGES.assign(start_ns=RANGES["start_ns"] + start, end_ns=RANGES["end_ns"] + start)}
    for table, columns in TABLES.items():
        if table in ("ranges", "samples"):
            continue
        rows = 300 if table in ("kernels", "calls") else 9
        frame = pd.DataFrame(index=range(rows))
        for column, dtype in columns.items():
            frame[column] = np.resize(HOSTILE, rows) if dtype == "category" else rng.integers(0, 9, rows)
        frame["start_ns"] = np.sort(rng.integers(0, 100_000, rows)) + start
        frame["end_ns"] = frame["start_ns"] + rng.integers(0, 2000, rows)
        fixed = {"process": PROCESS, "thread": MAIN, "device": rng.integers(0, 2, rows), "stream": 7}
        fixed = {column: values for column, values in fixed.items() if column in columns}
        frames[table] = frame.assign(**fixed | GIVEN.get(table, {}))
    meta = TraceMeta(
        tool="Nsight Systems",
        tool_version="2026.2",
        gpus=[Gpu(0, "A <b>", "9.0"), Gpu(1, None)],
        window_ns=(start - 50, start + 10**6),
        thread_names={MAIN: "main", SIDE: 'au"to'},
        distributed={"rank": 1},
    )
    return Trace.from_frames(frames, meta)
