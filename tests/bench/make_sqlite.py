"""A big Nsight Systems SQLite export for the benchmarks: the tables of a real 2024.6 export, synthetic contents.

At full size: 5,000,000 kernels of 68 names on two streams of one device, 5,150,000 API calls on two threads (forward
and backward), 1,052,500 NVTX ranges three levels deep, 100,000 copies, 50,000 synchronisations. About 650 MB.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import numpy as np
import pandas as pd

#: Threads of process 4242, whose ranges export.sql has on the first.
_MAIN = 1 << 56 | 4242 << 24 | 4242
_BACKWARD = _MAIN + 9
_LAUNCH, _COPY, _SYNCHRONIZE = 1, 2, 3
_FIRST_KERNEL, _KERNELS = 10, 68
_FIRST_RANGE = 100
#: Layers of a step, operations of a layer.
_LAYERS = 20
_OPERATIONS = 20


def make(path: Path, kernels: int = 5_000_000) -> None:
    """Write the export.

    Parameters
    ----------
    path : Path
        Where; replaced when it exists.
    kernels : int
        How many kernels; the other tables keep their proportions.
    """
    rng = np.random.default_rng(7)
    steps = max(1, kernels // 2000)
    per_step = kernels // steps
    kernels = steps * per_step
    # The CPU launches every 4-ish us; one launch in 100 stalls; the GPU runs each kernel when it is free.
    apart = rng.integers(2500, 6500, kernels)
    apart[rng.random(kernels) < 0.01] += 120_000
    call_ns = rng.integers(1500, 2400, kernels)
    usual_ns = rng.choice([900, 1700, 2600, 5200, 11_000], kernels, p=[0.3, 0.3, 0.25, 0.1, 0.05])
    duration = usual_ns + rng.integers(0, 400, kernels)
    launched = np.cumsum(apart)
    total = np.cumsum(duration)
    end = total + np.maximum.accumulate(launched + call_ns + 1200 - (total - duration))
    at = np.sort(rng.choice(kernels - 1, kernels // 100, replace=False))
    begun = launched[at] + call_ns[at] + 700
    syncs = pd.DataFrame({"at": at, "start": begun, "end": begun + 900})
    returned = launched + call_ns
    is_backward = np.arange(kernels) % per_step >= per_step // 3
    thread = np.where(is_backward, _BACKWARD, _MAIN)
    correlation = np.arange(kernels) + 1000
    name = rng.integers(0, _KERNELS, kernels) + _FIRST_KERNEL
    stream = np.where(rng.random(kernels) < 0.1, 13, 7)
    ran = pd.DataFrame({"start": end - duration, "end": end, "streamId": stream, "correlationId": correlation})
    ran = ran.assign(gridId=correlation, gridX=rng.integers(1, 4096, kernels))
    ran = ran.assign(demangledName=name, shortName=name, mangledName=name)

    at = np.sort(rng.choice(kernels - 1, kernels // 50, replace=False))
    number = np.arange(len(at)) + kernels + 1000
    copied = pd.DataFrame({"start": end[at] + 50, "end": end[at] + 750, "correlationId": number, "streamId": 7})

    waited = syncs[["start", "end"]].assign(streamId=7)
    waited["correlationId"] = np.arange(len(syncs)) + kernels + len(at) + 1000

    calls = [
        _calls(_LAUNCH, launched, returned, thread, correlation),
        _calls(_COPY, returned[at] + 10, returned[at] + 600, thread[at], number),
        _calls(_SYNCHRONIZE, syncs["start"], syncs["end"], thread[syncs["at"]], waited["correlationId"]),
    ]
    tables = {
        "CUPTI_ACTIVITY_KIND_KERNEL": ran,
        "CUPTI_ACTIVITY_KIND_RUNTIME": pd.concat(calls),
        "CUPTI_ACTIVITY_KIND_MEMCPY": copied,
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": waited,
        "NVTX_EVENTS": _ranges(steps, per_step, launched, returned),
        "ANALYSIS_DETAILS": pd.DataFrame({"duration": end[-1:], "stopTime": end[-1:]}),
        "StringIds": _strings(),
    }
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    connection.executescript(Path(__file__).with_name("export.sql").read_text(encoding="utf-8"))
    for table, frame in tables.items():
        frame.to_sql(table, connection, if_exists="append", index=False, chunksize=250_000)
    connection.commit()
    connection.close()


def _calls(name: int, start: np.ndarray, end: np.ndarray, thread: np.ndarray, correlation: np.ndarray) -> pd.DataFrame:
    calls = pd.DataFrame({"start": start, "end": end, "globalTid": thread, "correlationId": correlation})
    return calls.assign(nameId=name)


def _ranges(steps: int, per_step: int, launched: np.ndarray, returned: np.ndarray) -> pd.DataFrame:
    """Ranges around launches: each step, and in its forward third layers and their operations."""
    first = np.arange(steps) * per_step
    width = max(1, per_step // 3 // _LAYERS)
    share = max(1, width // _OPERATIONS)
    spans = [(0, 0, 0, per_step - 1)]  # level, number of the name, first and last launch
    for layer in range(_LAYERS):
        begin = layer * width
        spans.append((1, 1 + layer, begin, begin + width - 1))
        for operation in range(min(_OPERATIONS, width)):
            start = min(operation * share, width - 1)
            stop = min((operation + 1) * share, width) - 1
            spans.append((2, 1 + _LAYERS + operation, begin + start, begin + stop))
    parts = []
    for level, name, begin, finish in spans:
        margin = 300 - 100 * level
        times = {"start": launched[first + begin] - margin, "end": returned[first + finish] + margin}
        parts.append(pd.DataFrame(times).assign(textId=_FIRST_RANGE + name))
    return pd.concat(parts)


def _strings() -> pd.DataFrame:
    texts = {_FIRST_RANGE: "step"}
    for number in range(_KERNELS):
        texts[_FIRST_KERNEL + number] = f"void planted::kernel_{number:02d}<float, {number}>(float*, int)"
    for number in range(_LAYERS):
        texts[_FIRST_RANGE + 1 + number] = f"layer_{number}"
    for number in range(_OPERATIONS):
        texts[_FIRST_RANGE + 1 + _LAYERS + number] = f"op_{number}"
    return pd.DataFrame({"id": list(texts), "value": list(texts.values())})


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5_000_000)
