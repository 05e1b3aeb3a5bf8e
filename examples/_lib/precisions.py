"""Which unit of a GPU multiplies, and what another precision can gain and did gain (page 09)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from _lib import climb
from nsightkit.analysis.core import noise
from nsightkit.analysis.timeline import kernels
from nsightkit.api import Trace
from nsightkit.hardware import Gpu

if TYPE_CHECKING:
    from nsightkit.guide import Measurement

_TENSOR = re.compile(r"tensorop|hmma|s1688|s16816|bf16bf16|f16f16|nvjet|flash|fmha")
_ORDINARY = re.compile(r"sgemm|scudnn|ffma|<float")
#: The speedup if kernels that only move bytes move half of them.
HALVED = "if the rest halves its bytes"
_MATMULS = "gemm|gemv|nvjet|cutlass|cublas|attention|flash|fmha"


def unit(name: str, category: str) -> str:
    """Tell from a kernel's name which unit of the GPU multiplies.

    Examples
    --------
    >>> unit("ampere_sgemm_128x64_tn", "GEMM"), unit("nvjet_hsh_256x128", "GEMM")
    ('CUDA cores, fp32', 'tensor cores, bf16 or fp16')
    """
    if category not in ("GEMM", "attention", "convolution"):
        return "(other kernels)"
    if _TENSOR.search(name):
        return "tensor cores, bf16 or fp16"
    if _ORDINARY.search(name):
        return "CUDA cores, fp32"
    return "(other kernels)"


def gain(share: float, faster: float, rest: float = 1) -> float:
    """Give the speedup of a step by Amdahl's law.

    Parameters
    ----------
    share : float
        Of the time, in what becomes `faster`.
    faster, rest : float
        How many times faster that part and the rest become.

    Examples
    --------
    >>> round(gain(0.5, 8), 1)
    1.8
    """
    return 1 / (share / faster + (1 - share) / rest)


def bounds(trace: Trace, card: Gpu, share: float) -> pd.DataFrame:
    """Predict what TF32 and bf16 can gain a program in fp32, by Amdahl's law and by a replay.

    Parameters
    ----------
    trace : Trace
    card : Gpu
    share : float
        Of the kernel time, in matmuls.
    """
    rows = {}
    for kind in ("tf32", "bf16"):
        faster = card.peak(kind).tflops / card.peak("fp32").tflops
        replayed = trace.whatif(scale=f"sgemm={1 / faster}")["speedup"].iloc[0]
        row = {"matmul speedup": faster, "Amdahl": gain(share, faster), "replay": replayed}
        row[HALVED] = gain(share, faster, 2) if kind == "bf16" else None
        rows[kind] = row
    return pd.DataFrame(rows).T.astype(float).rename_axis("precision")


def by_kind(run: Measurement) -> pd.Series:
    """Give the time per step by kind of kernel."""
    table = kernels.summary(run.trace, by="category").set_index("name")
    return table["total_ns"] / len(run.trace.steps())


def table(runs: Mapping[str, Measurement]) -> pd.DataFrame:
    """Make one row per precision.

    Parameters
    ----------
    runs : mapping of str to Measurement
        One of them is ``fp32``.
    """
    rows = []
    for name, run in runs.items():
        step_ns, kinds = run.median("step_ns"), by_kind(run)
        row = {"precision": name, "median step (ms)": step_ns / 1e6}
        row["times fp32"] = runs["fp32"].median("step_ns") / step_ns
        row["peak (GB)"] = run.median("peak_bytes") / 1e9
        rows.append({**row, "share in GEMMs": kinds.get("GEMM", 0) / kinds.sum()})
    return pd.DataFrame(rows)


def _bound(run: Measurement) -> str:
    """Give the speedup that bf16 can bring a run in fp32."""
    gpu = climb.gpu_of(run)
    if gpu is None or gpu.peak("bf16") is None:
        return "no bound known"
    faster = gpu.peak("bf16").tflops / gpu.peak("fp32").tflops
    matmuls_ns = by_kind(run).reindex(["GEMM", "attention"]).sum()
    bound = f"at most {gain(min(matmuls_ns / run.median('step_ns'), 1), faster, 2):.1f}"
    replayed = run.trace.whatif(scale=f"{_MATMULS}={1 / faster:.3f}")["speedup"].iloc[0]
    return bound if pd.isna(replayed) else f"{bound}, replay {replayed:.1f}"


def answer(runs: Mapping[str, Measurement]) -> str:
    """Say how much faster each precision is, and whether fp16 differs from bf16.

    Parameters
    ----------
    runs : mapping of str to Measurement
        ``fp32``, ``tf32``, ``bf16``, ``fp16`` and ``bf16, again``.
    """
    rows = table(runs).set_index("precision")
    faster, share = rows["times fp32"], rows["share in GEMMs"]
    bf16 = [runs[name].values("step_ns") for name in ("bf16", "bf16, again")]
    differ = noise.judge(bf16, [runs["fp16"].values("step_ns")])
    apart = differ.value / runs["bf16"].median("step_ns")
    return (
        f"A step in TF32, bf16 and fp16 is {faster['tf32']:.2f}x, {faster['bf16']:.2f}x and {faster['fp16']:.2f}x "
        f"faster than in fp32 (bf16 expected: {_bound(runs['fp32'])}). GEMMs are {share['fp32']:.0%} of the time in "
        f"fp32 and {share['bf16']:.0%} in bf16. fp16 takes {abs(apart):.1%} {'more' if apart > 0 else 'less'} time "
        f"than bf16, which is {'' if differ.word == noise.CHANGED else 'not '}more than noise."
    )
