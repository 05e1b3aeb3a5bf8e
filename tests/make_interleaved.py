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


def interleaved(start=1_000, seed=0):
    """Two GPUs, overlapping kernels on a stream, every table, names that would break text made by hand."""
    rng = np.random.default_rng(seed)
    process, other = 4242, 7
    main, side, lone = process << 24 | process, process << 24 | 5, other << 24 | 9

    def times(n, longest):
        begin = np.sort(rng.integers(0, 100_000, n)) + start
        return {"start_ns": begin, "end_ns": begin + rng.integers(0, longest, n)}

    def names(n):
        return [HOSTILE[i % len(HOSTILE)] for i in range(n)]

    n = 300
    gpu = {"device": rng.integers(0, 2, n), "stream": rng.integers(7, 10, n), "process": process}
    correlation = rng.permutation(n) + 1
    frames = {
        "kernels": {
            **times(n, 2000), **gpu, "correlation": correlation, "name": names(n), "short_name": names(n + 1)[1:],
            **{c: rng.integers(1, 100, n) for c in TABLES["kernels"] if c.startswith(("grid", "block", "reg"))},
            "static_shared_bytes": rng.integers(0, 9, n), "dynamic_shared_bytes": rng.integers(0, 9, n),
            "graph_node": rng.integers(0, 3, n),
        },
        "memops": {
            **times(6, 500), "device": 0, "stream": 7, "process": other, "correlation": [1, 2, 3, 4, 5, 6],
            "kind": ["HtoD", "DtoH", "memset", "PtoP", "unified HtoD", "other"],
            "src_kind": ["pageable", "device", "", "device", "pageable", "unknown"],
            "dst_kind": ["device", "pinned", "device", "device", "managed static", "array"],
            "bytes": [1, 2**40, 3, 4, 5, 0], "graph_node": [0, 0, 0, 0, 0, 9],
        },
        "graphs": {**times(3, 5000), "device": 1, "stream": 7, "process": process, "correlation": 3, "graph_id": 12},
        "calls": {**times(n, 60), "process": process, "thread": main, "name": names(n),
                  "correlation": np.arange(n) + 1, "kernel": names(n)[::-1]},
        "syncs": {**times(4, 60), "device": 0, "stream": [7, -1, 8, 7], "process": process, "correlation": 8,
                  "kind": ["event", "context", "stream", "stream-wait-event"]},
        "ranges": {
            "start_ns": np.array([0, 10, 20, 20, 500, 100, 300]) + start,
            "end_ns": np.array([1000, 400, 30, 30, 2000, 700, 800]) + start,
            "process": [process] * 4 + [other] + [process] * 2,
            "thread": [main, main, main, side, lone, main, main],
            "end_thread": [main, main, main, side, lone, side, main],
            "name": HOSTILE, "domain": ["", "NCCL", "", 'd"', "", "", "NCCL"],
            "kind": ["pushpop", "pushpop", "annotation", "pushpop", "pushpop", "startend", "startend"],
            "open": [False, False, False, False, True, False, True],
            "level": [0, 1, 2, 0, 0, 0, 0], "parent": [-1, 0, 1, -1, -1, -1, -1],
        },
        "ops": {**times(9, 60), "process": process, "thread": side, "correlation": np.arange(9), "name": names(9),
                "sequence": [-1, 0, 1, 2, 3, 4, 3, 1, -1], "forward_thread": [-1, 0, 0, 0, 0, 0, 1, 2, -1]},
        "frames": {**times(9, 60), "process": process, "thread": main, "name": names(9)},
        "os_calls": {**times(9, 60), "process": other, "thread": lone, "name": names(9)},
        "overhead": {**times(2, 60), "process": [-1, process], "thread": [-1, main], "name": names(2)},
    }  # fmt: skip
    meta = TraceMeta(
        tool="Nsight Systems",
        tool_version="2026.2",
        gpus=[Gpu(0, "A <b>", "9.0"), Gpu(1, None)],
        window_ns=(start - 50, start + 10**6),
        thread_names={main: "main", side: 'au"to'},
        distributed={"rank": 1},
    )
    return Trace.from_frames({t: pd.DataFrame(f) for t, f in frames.items()}, meta)
