"""A synthetic PyTorch profiler trace of any size, with its sums known in advance.

Used by the reader's tests and by the benchmark: ``write(path, kernels=200_000)`` gives 1.0 M events in
about 270 MB, laid out byte for byte as Kineto prints them (four-space events, microseconds with three
decimals, flow events between launch and kernel).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

#: µs since Kineto's base time; beyond 2**42, where float64 no longer separates nanoseconds.
ORIGIN_NS = 7_100_000_000_123_457

_PID = 4242
_TENSORS = "at::detail::Array<char*, 3>"
_ADD = "at::native::CUDAFunctor_add<float>"
_BF16 = "c10::BFloat16"
_MEAN = "at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int, float, 4>"
_KERNELS = {
    f"void at::native::vectorized_elementwise_kernel<4, {_ADD}, {_TENSORS} >(int, {_ADD}, {_TENSORS})": "aten::add",
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn": "aten::mm",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel"
    f"<{_BF16}, float>(int, float, {_BF16} const*, {_BF16} const*, float*, {_BF16}*)": "aten::native_layer_norm",
    "void (anonymous namespace)::softmax_warp_forward"
    f"<{_BF16}, {_BF16}, float, 8, false>({_BF16}*, {_BF16} const*, int, int, int, bool const*)": "aten::softmax",
    f"void at::native::reduce_kernel<512, 1, {_MEAN} >({_MEAN})": "aten::mean",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(Flash_fwd_params)": "aten::sdpa",
}

_HEAD = """{
  "schemaVersion": 1,
  "deviceProperties": [
    {
      "id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85018279936,
      "computeMajor": 9, "computeMinor": 0, "warpSize": 32, "numSms": 132
    }
  ],
  "cuda_driver_version": 12090,
  "trace_id": "6AF14D21A4E84D36BF1640FC99AD118E",
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1751410836000000000,
  "traceEvents": [
  {
    "name": "process_name", "ph": "M", "ts": {origin}, "pid": {pid}, "tid": 0,
    "args": {
      "name": "python3"
    }
  },
  {
    "name": "thread_name", "ph": "M", "ts": {origin}, "pid": {pid}, "tid": {pid},
    "args": {
      "name": "thread {pid} (python3)"
    }
  }"""

_KERNEL = """,
  {
    "ph": "X", "cat": "cpu_op", "name": "%s", "pid": 4242, "tid": 4242,
    "ts": %s, "dur": %s,
    "args": {
      "External id": %d, "Record function id": 0, "Ev Idx": %d
    }
  },
  {
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4242, "tid": 4242,
    "ts": %s, "dur": %s,
    "args": {
      "External id": %d, "cbid": 211, "correlation": %d
    }
  },
  {
    "ph": "s", "id": %d, "pid": 4242, "tid": 4242, "ts": %s,
    "cat": "ac2g", "name": "ac2g"
  },
  {
    "ph": "X", "cat": "kernel", "name": "%s", "pid": 0, "tid": 7,
    "ts": %s, "dur": %s,
    "args": {
      "External id": %d,
      "queued": 0, "device": 0, "context": 1,
      "stream": 7, "correlation": %d,
      "registers per thread": 32,
      "shared memory": 2112,
      "blocks per SM": 1520.484863,
      "warps per SM": 12163.878906,
      "grid": [1568, 1, 128],
      "block": [256, 1, 1],
      "est. achieved occupancy %%": 100
    }
  },
  {
    "ph": "f", "id": %d, "pid": 0, "tid": 7, "ts": %s,
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  }"""

_STEP = """,
  {
    "ph": "X", "cat": "user_annotation", "name": "ProfilerStep#%d", "pid": 4242, "tid": 4242,
    "ts": %s, "dur": %s,
    "args": {
      "External id": %d, "Record function id": 0, "Ev Idx": 0
    }
  }"""

_TAIL = """
  ],
  "traceName": "trace.json"
}
"""


def us(ns: int) -> str:
    """Microseconds with three decimals, as Kineto prints them."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def write(path: str | Path, kernels: int = 200_000, *, per_step: int = 1000) -> dict[str, Any]:
    """Write a trace of one GPU and one launching thread; five events a kernel.

    Parameters
    ----------
    path : path-like
        Gzipped when it ends in ``.gz``.
    kernels : int
        A multiple of `per_step`.
    per_step : int
        Kernels in a ``ProfilerStep``.

    Returns
    -------
    dict
        ``kernel_count``, ``span_ns``, ``first_ns``, ``call_ns``, ``op_ns``, ``steps`` and ``by_name`` (name to count
        and total nanoseconds).
    """
    rng = np.random.default_rng(0)
    which = rng.integers(0, len(_KERNELS), kernels)
    duration = rng.integers(900, 9000, kernels)
    op_start = ORIGIN_NS + 10_000 + np.cumsum(rng.integers(4500, 6000, kernels))
    op_duration = rng.integers(3500, 4400, kernels)
    call_start = op_start + rng.integers(500, 1000, kernels)
    call_duration = rng.integers(1500, 2400, kernels)
    # In-order stream: a kernel starts when its launch has arrived and its predecessor is done.
    arrival = call_start + call_duration + 1000
    done = np.cumsum(duration)
    end = done + np.maximum.accumulate(arrival - (done - duration))
    start = end - duration

    names = list(_KERNELS.items())
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8", newline="\n") as out:
        out.write(_HEAD.replace("{origin}", us(ORIGIN_NS)).replace("{pid}", str(_PID)))
        rows = zip(
            *(a.tolist() for a in (which, op_start, op_duration, call_start, call_duration, start, duration)),
            strict=True,
        )
        for i, (k, o, od, c, cd, s, d) in enumerate(rows):
            if i % per_step == 0:
                last = min(i + per_step, kernels) - 1
                length = int(op_start[last] + op_duration[last]) - o + 200
                out.write(_STEP % (i // per_step, us(o - 100), us(length), 10**6 + i // per_step))
            n, name = i + 1, names[k]
            out.write(_KERNEL % (
                name[1], us(o), us(od), n, n, us(c), us(cd), n, n, n, us(c), name[0], us(s), us(d), n, n, n, us(s),
            ))  # fmt: skip
        out.write(_TAIL)
    return {
        "kernel_count": kernels,
        "span_ns": int(end[-1] - start[0]),
        "first_ns": int(op_start[0]) - 100,
        "call_ns": int(call_duration.sum()),
        "op_ns": int(op_duration.sum()),
        "steps": -(-kernels // per_step),
        "by_name": {
            name: (int((which == k).sum()), int(duration[which == k].sum())) for k, name in enumerate(_KERNELS)
        },
    }


_CATEGORY = {
    "kernels": "kernel",
    "memops": "gpu_memcpy",
    "calls": "cuda_runtime",
    "ranges": "user_annotation",
    "overhead": "overhead",
}
_ARGS = ("device", "stream", "correlation", "bytes")


def from_trace(path: str | Path, trace: Any) -> Path:
    """Write what the PyTorch profiler would have recorded of a run that another tool recorded.

    Kernels, copies, memsets, calls, ranges and profiler overhead, with three decimals of a microsecond. What Kineto
    has no events for (OS calls, CUDA graphs as one interval) is lost.

    Parameters
    ----------
    path : path-like
        Replaced when it exists; gzipped when it ends in ``.gz``.
    trace : nsightkit.trace.model.Trace
    """
    events = []
    for table, category in _CATEGORY.items():
        for row in trace[table].to_dict("records"):
            name = row.get("name", "Memset (Device)")
            if table == "memops" and row["kind"] != "memset":
                name = f"Memcpy {row['kind']} ({row['src_kind'].capitalize()} -> {row['dst_kind'].capitalize()})"
            args = {key: row[key] for key in _ARGS if key in row}
            for size in ("grid", "block"):
                args[size] = [row.get(f"{size}_{axis}", 0) for axis in "xyz"]
            pid = row.get("device", row["process"])
            tid = row["stream"] if "stream" in row else row["thread"] & 0xFFFFFF
            # Written by hand: json prints times as floats, which do not hold nanoseconds here.
            head = json.dumps({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "args": args})
            start, duration = us(ORIGIN_NS + row["start_ns"]), us(row["end_ns"] - row["start_ns"])
            events.append(f'{head[:-1]}, "ts": {start}, "dur": {duration}}}')
    gpus = [{"id": gpu.device, "name": gpu.name} for gpu in trace.meta.gpus]
    head = json.dumps({"schemaVersion": 1, "deviceProperties": gpus, "displayTimeUnit": "ms"})
    text = f'{head[:-1]}, "traceEvents": [\n' + ",\n".join(events) + "\n]}\n"
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8", newline="\n") as out:
        out.write(text)
    return path
