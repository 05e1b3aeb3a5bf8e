"""A big Nsight Systems SQLite export for the benchmarks: the DDL of a real 2024.6 export, planted contents.

Shape at full size: 5,000,000 kernels of 68 names on three streams of one device, 5,150,000 API calls on
two threads (forward and backward), 1,052,500 NVTX ranges four levels deep, 100,000 copies, 50,000
synchronisations. About 650 MB.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import numpy as np

_PID = 4242
_GLOBAL_PID = (1 << 56) | (_PID << 24)
_MAIN, _BACKWARD = _GLOBAL_PID | _PID, _GLOBAL_PID | (_PID + 9)

_KERNEL = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, "
    "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, "
    "mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, "
    "gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, "
    "staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL, "
    "localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER"
)
_MEMCPY = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, "
    "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, "
    "deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER, srcDeviceId INTEGER, srcContextId INTEGER, dstDeviceId INTEGER, "
    "dstContextId INTEGER, migrationCause INTEGER, graphNodeId INTEGER, virtualAddress INTEGER"
)
_SYNC = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, "
    "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, syncType INTEGER NOT NULL, eventId INTEGER NOT NULL"
)
_RUNTIME = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, "
    "nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER"
)
_NVTX = (
    "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER, text TEXT, "
    "globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, "
    "doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL, jsonTextId INTEGER, jsonText TEXT"
)
_LAUNCH, _COPY, _SYNCHRONIZE = 1, 2, 3
_FIRST_KERNEL, _KERNELS = 10, 68
_FIRST_RANGE = 100


def make(path: Path, kernels: int = 5_000_000, seed: int = 7, *, waits: bool = False) -> None:
    """Write the export.

    Parameters
    ----------
    path : Path
        Where; replaced when it exists.
    kernels : int
        How many kernels; the other tables keep their proportions.
    seed : int
    waits : bool
        One thread and one stream of kernels, and every 50 kernels a synchronisation that does wait: 100,000 of them.
    """
    rng = np.random.default_rng(seed)
    steps = max(1, kernels // 2000)
    per_step = kernels // steps
    kernels = steps * per_step
    # The CPU launches every 4-ish us; one launch in 40 stalls; the GPU runs each kernel when it is free.
    cpu_gap = rng.integers(2500, 6500, kernels)
    cpu_gap[rng.random(kernels) < 0.01] += 120_000
    launch_start = np.cumsum(cpu_gap)
    launch_end = launch_start + rng.integers(1500, 2400, kernels)
    duration = rng.choice([900, 1700, 2600, 5200, 11_000], kernels, p=[0.3, 0.3, 0.25, 0.1, 0.05]) + rng.integers(
        0, 400, kernels
    )
    ready = launch_end + 1200
    # start[i] = max(ready[i], end[i-1]) without a loop: end[i] = cumsum + running maximum of (ready - cumsum before i)
    total = np.cumsum(duration)
    end = total + np.maximum.accumulate(ready - (total - duration))
    start = end - duration
    copies, syncs = kernels // 50, kernels // 100
    copy_at = np.sort(rng.choice(kernels - 1, copies, replace=False))
    sync_at = np.sort(rng.choice(kernels - 1, syncs, replace=False))
    sync_call = launch_end[sync_at] + 700
    sync_end = sync_call + 900
    if waits:
        launch_start, start, end, sync_at, sync_call, sync_end = _waiting(cpu_gap, launch_end - launch_start, duration)
        launch_end = launch_start + (launch_end - np.cumsum(cpu_gap))
        syncs = len(sync_at)
    name = rng.integers(0, _KERNELS, kernels)
    stream = np.where(rng.random(kernels) < (0 if waits else 0.1), 13, 7)
    backward = (np.arange(kernels) % per_step) >= per_step // 3
    thread = np.where(backward & (not waits), _BACKWARD, _MAIN)
    correlation = np.arange(kernels) + 1000

    copy_call = launch_end[copy_at]
    copy_start = end[copy_at] + 50

    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    for table, ddl in {
        "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
        "CUPTI_ACTIVITY_KIND_RUNTIME": _RUNTIME,
        "NVTX_EVENTS": _NVTX,
        "CUPTI_ACTIVITY_KIND_MEMCPY": _MEMCPY,
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": _SYNC,
        "CUPTI_ACTIVITY_KIND_KERNEL": _KERNEL,
        "META_DATA_EXPORT": "name TEXT, value TEXT",
        "META_DATA_CAPTURE": "name TEXT, value TEXT",
        "ANALYSIS_DETAILS": "globalVid INTEGER NOT NULL, duration INTEGER NOT NULL, startTime INTEGER NOT NULL, stopTime INTEGER NOT NULL",
    }.items():
        connection.execute(f"CREATE TABLE {table} ({ddl})")
    strings = {
        _LAUNCH: "cudaLaunchKernel_v7000",
        _COPY: "cudaMemcpyAsync_v3020",
        _SYNCHRONIZE: "cudaStreamSynchronize_v3020",
    }
    strings |= {_FIRST_KERNEL + i: f"void planted::kernel_{i:02d}<float, {i}>(float*, int)" for i in range(_KERNELS)}
    ranges = ["step", *(f"layer_{i}" for i in range(20)), *(f"op_{i}" for i in range(20))]
    strings |= {_FIRST_RANGE + i: text for i, text in enumerate(ranges)}
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", strings.items())
    connection.executemany(
        "INSERT INTO META_DATA_EXPORT VALUES (?, ?)",
        [("EXPORT_PRODUCT_VERSION", "2024.6.2.225"), ("EXPORT_SCHEMA_VERSION", "3.16.1")],
    )
    connection.executemany(
        "INSERT INTO META_DATA_CAPTURE VALUES ('CAPTURE_EVENT_TYPE', ?)", [("NvtxEvents",), ("Cuda",)]
    )
    connection.execute("INSERT INTO ANALYSIS_DETAILS VALUES (1, ?, 0, ?)", (int(end[-1]), int(end[-1])))

    rows = "?" + ", ?" * 27
    grid = rng.integers(1, 4096, kernels)
    for low in range(0, kernels, 250_000):
        high = min(kernels, low + 250_000)
        part = slice(low, high)
        n = high - low
        one, zero = [1] * n, [0] * n
        columns = [
            start[part].tolist(), end[part].tolist(), zero, one, zero, stream[part].tolist(), correlation[part].tolist(), [_GLOBAL_PID] * n,
            (name[part] + _FIRST_KERNEL).tolist(), (name[part] + _FIRST_KERNEL).tolist(), (name[part] + _FIRST_KERNEL).tolist(), one, zero, [32] * n,
            grid[part].tolist(), one, one, [256] * n, one, one, zero, zero, zero, zero, correlation[part].tolist(), [102400] * n, [None] * n, zero,
        ]  # fmt: skip
        connection.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({rows})", zip(*columns, strict=True))
        calls = [
            launch_start[part].tolist(),
            launch_end[part].tolist(),
            zero,
            thread[part].tolist(),
            correlation[part].tolist(),
            one,
            zero,
            [None] * n,
        ]
        connection.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?, ?)", zip(*calls, strict=True)
        )
    copy_correlation = np.arange(copies) + kernels + 1000
    connection.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, 0, 1, 0, ?, ?, ?, 4096, 1, NULL, 1, 2, NULL, NULL, NULL, NULL, NULL, NULL, NULL)",
        (
            (int(s), int(s) + 700, 13 if waits else 7, int(c), _GLOBAL_PID)
            for s, c in zip(copy_start, copy_correlation, strict=True)
        ),
    )
    connection.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 2, 0, NULL)",
        (
            (int(s) + 10, int(s) + 600, int(t), int(c))
            for s, t, c in zip(copy_call, thread[copy_at], copy_correlation, strict=True)
        ),
    )
    sync_correlation = np.arange(syncs) + kernels + copies + 1000
    connection.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 3, 0, NULL)",
        (
            (int(s), int(e), int(t), int(c))
            for s, e, t, c in zip(sync_call, sync_end, thread[sync_at], sync_correlation, strict=True)
        ),
    )
    connection.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (?, ?, 0, 1, 0, 7, ?, ?, 3, 0)",
        ((int(s), int(e), int(c), _GLOBAL_PID) for s, e, c in zip(sync_call, sync_end, sync_correlation, strict=True)),
    )
    # Ranges on the main thread of each step's forward third: one step, 20 layers, 20 operations a layer.
    forward = per_step // 3
    layers, operations = 20, 20
    first = np.arange(steps) * per_step
    spans = [(0, first, first + per_step - 1)]
    width = max(1, forward // layers)
    for layer in range(layers):
        begin = first + layer * width
        spans.append((1 + layer, begin, begin + width - 1))
        share = max(1, width // operations)
        spans.extend(
            (1 + layers + o, begin + min(o * share, width - 1), begin + min((o + 1) * share, width) - 1)
            for o in range(operations)
            if o < width
        )
    for which, begin, finish in spans:
        level = 0 if which == 0 else (1 if which <= layers else 2)
        s = launch_start[begin] - (300 - 100 * level)
        e = launch_end[finish] + (300 - 100 * level)
        connection.executemany(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, NULL, NULL, NULL, ?, NULL, ?, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)",
            ((int(a), int(b), _MAIN, _FIRST_RANGE + which) for a, b in zip(s, e, strict=True)),
        )
    connection.commit()
    connection.close()


def _waiting(apart: np.ndarray, call: np.ndarray, duration: np.ndarray, every: int = 50) -> tuple[np.ndarray, ...]:
    """Launch and run kernels in order, with a wait for the last one every so many: times of launches, kernels, waits."""
    launched, end, waits = np.empty_like(apart), np.empty_like(apart), []
    now = free = 0
    for low in range(0, len(apart), every):
        part = slice(low, low + every)
        launched[part] = now + np.cumsum(apart[part])
        total = np.cumsum(duration[part])
        ready = launched[part] + call[part] + 1200 - (total - duration[part])
        end[part] = total + np.maximum(np.maximum.accumulate(ready), free)
        last = min(low + every, len(apart)) - 1
        free, begun = end[last], launched[last] + call[last] + 700
        now = max(free, begun) + 6000
        waits.append((last, begun, now))
    return (launched, end - duration, end, *np.array(waits).T)


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5_000_000)
