"""A step's phases on the clocks of the CPU and the GPU: a synthetic step, and what runs come to (page 07)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from _lib import synthetic
from nsightkit.analysis.timeline import phases
from nsightkit.api import Trace

if TYPE_CHECKING:
    from nsightkit.guide import Measurement

#: By phase: the thread that launches, launches, time between them, time of a kernel, and its tile.
_PLAN = {
    "forward": (synthetic.MAIN, 60, 25_000, 50_000, "128x256"),
    "backward": (synthetic.AUTOGRAD, 120, 10_000, 55_000, "256x128"),
    "optimizer": (synthetic.MAIN, 10, 10_000, 40_000, None),
}
_GEMM = "void cutlass::Kernel2<tensorop_bf16_s16816gemm_{}_nn>(T1::Params)"
_ADAM = "void multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>(T1)"
#: The forward parts of the workload's attention.
_PARTS = ["qkv_projections", "rope", "qk_mask", "softmax", "attention_v", "output_projection"]


def one_step() -> tuple[Trace, dict[str, int]]:
    """Make a step that reads a value back before its optimizer.

    Returns
    -------
    (Trace, dict of str to int)
        The synthetic trace, and the true nanoseconds of each phase on the GPU.
    """
    events = synthetic.Events()
    now, free, true_ns = 1_000, 0, {}
    for phase, (thread, launches, every_ns, kernel_ns, tile) in _PLAN.items():
        begin = now
        if phase == "optimizer":
            now = max(now, free) + 5_000
            events.wait("cudaStreamSynchronize", begin + 500, now)
        for _ in range(launches):
            now += every_ns
            call = events.call("cudaLaunchKernel", now - 4_000, now, thread)
            start = max(now + 1_500, free)
            free = start + kernel_ns
            events.kernel(_GEMM.format(tile) if tile else _ADAM, start, free, call)
        events.range(phase, begin, now + 100)
        now += 200
        true_ns[phase] = launches * kernel_ns
    events.range("step", 900, now)
    return events.trace(), true_ns


class Instances(NamedTuple):
    """Each instance of a range, in order.

    Parameters
    ----------
    cpu_ns, gpu_ns : Series
        Time of each instance, and of the kernels launched in it.
    ahead : int
        Instances before the CPU first waits for a place in the launch queue.
    queued : int
        Kernels that were launched and had not ended by then.
    """

    cpu_ns: pd.Series
    gpu_ns: pd.Series
    ahead: int
    queued: int


def instances(trace: Trace, name: str) -> Instances:
    """Find the kernels of each instance of a range.

    Parameters
    ----------
    trace : Trace
    name : str
    """
    ranges = trace["ranges"]
    marked = ranges[ranges["name"] == name].sort_values("start_ns")
    calls = trace["calls"][["correlation", "start_ns"]]
    kernels = trace["kernels"][["correlation", "start_ns", "end_ns"]]
    launched = kernels.merge(calls, on="correlation", suffixes=("", "_call"))
    place = np.searchsorted(marked["start_ns"], launched["start_ns_call"]) - 1
    ends = marked["end_ns"].to_numpy()[place]
    inside = (place >= 0) & (launched["start_ns_call"] < ends)
    ran_ns = (launched["end_ns"] - launched["start_ns"])[inside]
    cpu_ns = marked["end_ns"] - marked["start_ns"]
    ahead = int((cpu_ns.to_numpy() > 1_000_000).argmax())
    waits_from = marked["start_ns"].iloc[ahead]
    queued = (launched["start_ns_call"] < waits_from) & (launched["end_ns"] > waits_from)
    return Instances(cpu_ns, ran_ns.groupby(place[inside]).sum(), ahead, int(queued.sum()))


def per_step(trace: Trace) -> pd.DataFrame:
    """Give phases with their CPU and GPU time in a mean step."""
    table, count = phases.summary(trace), len(trace.steps())
    columns = {"phase": table["phase"], "CPU (ms)": table["cpu_ns"] / count / 1e6}
    columns |= {"GPU (ms)": table["gpu_ns"] / count / 1e6, "kernels": table["kernel_count"] / count}
    return pd.DataFrame({**columns, "share of GPU busy": table["share_of_busy"]})


def phase_ns(run: Measurement) -> pd.Series:
    """Give the time of each phase in a mean step, on the GPU's clock, or the CPU's without a GPU."""
    clock = "GPU (ms)" if run.trace.recorded("kernels") else "CPU (ms)"
    return per_step(run.trace).set_index("phase")[clock].astype(float) * 1e6


def two_profilers(run: Measurement) -> pd.DataFrame:
    """Compare the phases of a run under both profilers; empty if it did not run under Nsight Systems."""
    if run.nsys_trace is None:
        if "notice" in run.provenance.get("nsys", {}):
            print("not under Nsight Systems:", run.provenance["nsys"]["notice"])
        return pd.DataFrame()
    columns = ["phase", "CPU (ms)", "GPU (ms)", "kernels"]
    other = per_step(run.nsys_trace)[columns]
    return per_step(run.trace)[columns].merge(other, on="phase", suffixes=(", torch.profiler", ", Nsight Systems"))


def _flops(run: Measurement) -> pd.Series:
    """Give the FLOPs of attention's forward parts; two of them have no matmul."""
    sizes = run.parameters
    tokens = sizes["batch"] * sizes["context"]
    projection = 2 * sizes["layers"] * tokens * sizes["d_model"] ** 2
    scores = 2 * sizes["layers"] * tokens * sizes["context"] * sizes["d_model"]
    return pd.Series([3 * projection, 0, scores, 0, scores, projection], index=_PARTS)


def answer(before: Measurement, after: Measurement) -> str:
    """Say how long backward takes, and which part of attention takes the most time for its FLOPs.

    Parameters
    ----------
    before, after : Measurement
        With unfused and with fused attention.
    """
    spent = phase_ns(before)
    ratio = float(spent["backward"] / spent["forward"])
    as_expected = 1.6 <= round(ratio, 1) <= 1.7
    table = before.trace.ranges(match=f"^({'|'.join(_PARTS)})$").set_index("name")
    clock = "gpu_ns" if before.trace.recorded("kernels") else "total_ns"
    took = table[clock].reindex(_PARTS).astype(float).fillna(0)
    flops = _flops(before)
    took_share, flops_share = took / took.sum(), flops / flops.sum()
    most = (took_share - flops_share).idxmax()
    was_ms, now_ms = before.median("step_ns") / 1e6, after.median("step_ns") / 1e6
    return (
        f"With unfused attention, backward takes {ratio:.1f}x as long as forward, "
        f"{'as' if as_expected else 'not as'} expected. {most} takes {took_share[most]:.0%} of attention's forward "
        f"time and has {flops_share[most]:.0%} of its FLOPs. A step takes {was_ms:.1f} ms unfused and {now_ms:.1f} ms "
        f"fused."
    )
