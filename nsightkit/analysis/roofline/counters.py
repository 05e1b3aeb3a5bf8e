"""Which limiter? What Nsight Compute's counters say about a kernel, and what to try.

The first cut is NVIDIA's own rule (``SpeedOfLight.py`` of Nsight Compute). Below it, each class has its questions;
every answer cites the value it rests on, and a question whose metric the report lacks ends in the section to collect.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

import pandas as pd

from nsightkit.analysis.core.categories import category_of
from nsightkit.analysis.core.names import compiled
from nsightkit.errors import UsageError
from nsightkit.trace import ncu_metrics
from nsightkit.trace.ncu import Report

__all__ = ["CLASSES", "COLUMNS", "classify", "occupancy_limiter", "stalls", "summary"]

#: What a kernel can be.
CLASSES = ("compute-bound", "memory-bound", "balanced", "latency-bound", "not-enough-data")
#: Columns of :func:`summary`.
COLUMNS = (
    *("kernel", "time_ns", "sm_pct", "memory_pct", "dram_pct", "occupancy_pct", "occupancy_limiter"),
    *("classification", "evidence", "next_steps"),
)
#: The four limits, by the names of NVIDIA's metrics ``launch__occupancy_limit_…``.
LIMITS = ("registers", "shared_mem", "warps", "blocks")

# NVIDIA's thresholds, in percent: no_bound_threshold, latency_bound_threshold and balanced_threshold of its rule.
_HIGH = 80.0
_LOW = 60.0
_APART = 10.0
#: Tensor-core use of kernels without matmuls stays below this, in percent.
_SOME = 2.0

# Thresholds of the questions. They are judgements, not facts; each is named in the evidence it gives.
_CONFLICTS = 0.10  # of the passes through shared memory: some conflicts are always counted
_USED_BYTES = 24.0  # of a sector's 32
_WIDEST_REQUEST = 16.0  # sectors a request needs at most: 32 threads, 16 bytes each
_TAIL = 0.2  # of the last wave's share of the time
_TOP_STALL = 0.15  # of the latency between two instructions
_UNEVEN = 20.0  # points between the warps that fit and those resident
_ISSUES = 80.0  # percent of the cycles: above it stalls cost little

_LIMITED_BY = {
    "registers": "registers (fewer live values a thread, a smaller block, or __launch_bounds__; forcing a number "
    "spills)",
    "shared_mem": "shared memory (smaller tiles or fewer stages)",
    "warps": "the warps of a block (another block size packs better)",
    "blocks": "the number of blocks (blocks are small: make them larger)",
}
_METRICS = {metric.name: metric for metric in ncu_metrics.METRICS}


def classify(sm_pct: float, memory_pct: float) -> str:
    """Say what bounds a kernel, by NVIDIA's own rule.

    Either throughput at 80 % or more: the greater one's side (compute where they are equal). Both below 60 %:
    latency, which includes grids too small for the GPU. In between: the greater side if they are 10 points apart,
    else balanced.

    Parameters
    ----------
    sm_pct, memory_pct : float
        ``sm__throughput`` and ``gpu__compute_memory_throughput``, in percent of peak sustained elapsed; NaN if not
        measured.

    Returns
    -------
    str
        One of :data:`CLASSES`.
    """
    if not math.isfinite(sm_pct + memory_pct):
        return "not-enough-data"
    least, most = sorted((sm_pct, memory_pct))
    if most < _LOW:
        return "latency-bound"
    if most < _HIGH and most - least < _APART:
        return "balanced"
    return "compute-bound" if sm_pct >= memory_pct else "memory-bound"


def occupancy_limiter(limits: Mapping[str, float]) -> str | None:
    """Say which resource limits how many blocks fit on an SM: the smallest of the four limits.

    Parameters
    ----------
    limits : mapping of str to float
        Blocks an SM can hold by ``registers``, ``shared_mem``, ``warps`` and ``blocks``.

    Returns
    -------
    str or None
        Its name; several that are equal are joined with ``+``. None unless all four are known.
    """
    values = [float(limits.get(name, math.nan)) for name in LIMITS]
    if not all(map(math.isfinite, values)):
        return None
    least = min(values)
    return "+".join(name for name, blocks in zip(LIMITS, values, strict=True) if blocks == least)


def stalls(report: Report, kernel: str | None = None, within: str | None = None) -> pd.DataFrame:
    """List why warps waited, kernel by kernel.

    Parameters
    ----------
    report : Report
    kernel : str, optional
        A regular expression; only kernels whose name it finds.
    within : str, optional
        A regular expression; only launches inside an NVTX range whose name it finds.

    Returns
    -------
    DataFrame
        ``id``, ``kernel``, ``reason``, ``share`` (of the cycles a warp spends between two instructions, ``selected``
        included: it sums to 1 for a launch), ``source`` (``ratio``: counted; ``samples``: of the program counter),
        ``meaning``, the longest first. Empty where the report has neither.

    Raises
    ------
    UsageError
        An expression is malformed, or no range matches `within`.
    """
    rows = []
    for findings in _chosen(report, kernel, within):
        shares, source = findings.stalls()
        launch = findings.launch
        for stall, share in shares.items():
            rows.append((launch["id"], launch["kernel"], stall.reason, share, source, stall.meaning))
    frame = pd.DataFrame(rows, columns=["id", "kernel", "reason", "share", "source", "meaning"])
    return frame.sort_values(["id", "share"], ascending=[True, False], kind="stable", ignore_index=True)


def summary(report: Report, kernel: str | None = None, within: str | None = None) -> pd.DataFrame:
    """Say for each profiled launch what bounds it, on what evidence, and what to try next.

    Parameters
    ----------
    report : Report
    kernel : str, optional
        A regular expression; only kernels whose name it finds.
    within : str, optional
        A regular expression; only launches inside an NVTX range whose name it finds.

    Returns
    -------
    DataFrame
        A row a launch, the longest first: ``kernel``; ``time_ns``; ``sm_pct``, ``memory_pct``, ``dram_pct`` and
        ``occupancy_pct`` in percent of peak (NaN where not measured); ``occupancy_limiter`` (see
        :func:`occupancy_limiter`; ties leave out shared memory where a block has none); ``classification`` (see
        :func:`classify`); ``evidence`` and ``next_steps``, lists of sentences. Each sentence of evidence cites its
        values.

    Raises
    ------
    UsageError
        An expression is malformed, or no range matches `within`.
    """
    rows = []
    for findings in _chosen(report, kernel, within):
        measured = findings.launch[list(COLUMNS[:6])].tolist()
        classification = _explain(findings)
        rows.append([*measured, findings.limiter(), classification, findings.evidence, findings.next_steps])
    frame = pd.DataFrame(rows, columns=pd.Index(COLUMNS))
    return frame.sort_values("time_ns", ascending=False, kind="stable", na_position="last", ignore_index=True)


def _chosen(report: Report, kernel: str | None, within: str | None) -> list[_Findings]:
    chosen = []
    for (_, launch), metrics in zip(report.launches.iterrows(), report.metrics, strict=True):
        chosen.append(_Findings(launch, metrics))
    if within is not None:
        pattern = compiled(within, "within")
        chosen = [findings for findings in chosen if any(map(pattern.search, findings.launch["ranges"]))]
        if not chosen:
            present = sorted({name for names in report.launches["ranges"] for name in names})
            known = f"there are {', '.join(present)}" if present else "the report has none: run ncu with --nvtx"
            raise UsageError(f"no launch is inside a range that {within!r} finds; {known}")
    if kernel is None:
        return chosen
    pattern = compiled(kernel, "kernel")
    return [findings for findings in chosen if pattern.search(str(findings.launch["kernel"]))]


# ---------------------------------------------------------------- what is found


@dataclasses.dataclass
class _Findings:
    """One launch, with the evidence and the advice that it gave so far. What was not measured is NaN."""

    launch: pd.Series
    metrics: Mapping[str, object]
    evidence: list[str] = dataclasses.field(default_factory=list)
    next_steps: list[str] = dataclasses.field(default_factory=list)

    def __getitem__(self, name: str) -> float:
        return float(self.launch[name])

    def has(self, name: str) -> bool:
        return math.isfinite(self[name])

    def cite(self, name: str, noun: str = "") -> str:
        """Give a value with NVIDIA's name for it, so that it can be found again in the report."""
        value, metric = self[name], _METRICS[name]
        reported = next((candidate for candidate in metric.nvidia if candidate in self.metrics), metric.nvidia[0])
        text = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        if metric.unit == "%":
            text = f"{value:.1f} %"
        return f"{text} {noun}".rstrip() + f" ({reported})"

    def cited(self, **nouns: str) -> str:
        """Give the values that the report has, each with a noun."""
        return ", ".join(self.cite(name, noun) for name, noun in nouns.items() if self.has(name))

    def limits(self) -> dict[str, float]:
        """Give how many blocks an SM can hold, by what limits them."""
        return {name: self[f"limit_{name}_blocks"] for name in LIMITS}

    def limiter(self) -> str | None:
        """Give the occupancy limiter; a block without shared memory is not limited by it where another limit is."""
        limiter = occupancy_limiter(self.limits())
        if self["static_shared_bytes"] + self["dynamic_shared_bytes"] == 0 and limiter is not None:
            return limiter.replace("+shared_mem", "").replace("shared_mem+", "")
        return limiter

    def stalls(self) -> tuple[dict[ncu_metrics.Stall, float], str]:
        """Give what warps wait for as shares of their time, and whether it was counted or sampled."""
        counted, sampled = {}, {}
        for stall in ncu_metrics.STALLS:
            value, samples = self[f"stall_{stall.reason}"], self.metrics.get(stall.sampled)
            if math.isfinite(value):
                counted[stall] = value
            if isinstance(samples, (int, float)):
                sampled[stall] = float(samples)
        values, source = (counted, "ratio") if counted else (sampled, "samples")
        total = sum(values.values())
        if not total:
            return {}, source
        return {stall: value / total for stall, value in values.items()}, source

    def say(self, text: str, *advice: str, **nouns: str) -> None:
        """Note evidence with the values it rests on, each with a noun, and advice."""
        cited = self.cited(**nouns)
        self.evidence.append(f"{text}: {cited}" if cited else text)
        self.advise(*advice)

    def advise(self, *advice: str) -> None:
        self.next_steps += [text for text in advice if text not in self.next_steps]


def _explain(findings: _Findings) -> str:
    """Say what bounds a launch; give its class."""
    classification = classify(findings["sm_pct"], findings["memory_pct"])
    if classification == "not-enough-data":
        missing = " and ".join(_METRICS[name].nvidia[0] for name in ("sm_pct", "memory_pct") if not findings.has(name))
        findings.say(f"the report lacks {missing}", _collect("SpeedOfLight", "what bounds the kernel"))
        return classification
    findings.say(f"compute throughput {findings.cite('sm_pct')}, memory throughput {findings.cite('memory_pct')}")
    if classification == "compute-bound":
        _compute(findings)
        _tail(findings)
    elif classification == "memory-bound":
        _memory(findings)
        _tail(findings)
    elif classification == "balanced":
        findings.advise("reduce both the work and the bytes: fusing saves bytes, cheaper operations save work")
        _access(findings)
        _waits(findings)
        _tail(findings)
    else:
        _latency(findings)
    findings.next_steps.sort(key=lambda text: text.startswith("collect "))  # what to change comes first
    return classification


def _collect(section: str, answer: str) -> str:
    return f"collect {section} to see {answer} (ncu --section {section})"


# ---------------------------------------------------------------- memory

#: Levels of memory: their names, own figures, and advice where a cache is the busiest.
_LEVELS = {
    "dram_pct": ("DRAM", ""),
    "l2_pct": ("L2", "reuse more in L1, shared memory or registers (larger tiles), so that less goes to L2"),
    "l1_pct": (
        "L1 (with shared memory)",
        "issue fewer, wider loads and stores: 128-bit accesses, and reuse in registers (larger tiles for each thread)",
    ),
}


def _memory(findings: _Findings) -> None:
    _access(findings)  # wasted traffic first: it decides how busy the levels are
    measured = [level for level in _LEVELS if findings.has(level)]
    if not measured:
        findings.advise(_collect("MemoryWorkloadAnalysis", "which level is busy"))
        return
    busiest = max(measured, key=lambda level: findings[level])
    name, advice = _LEVELS[busiest]
    if busiest != "dram_pct":
        findings.say("memory is the limit, and DRAM is not", dram_pct="")
        hits = busiest.replace("_pct", "_hit_pct")
        findings.say(f"{name} is the busiest level", advice, **{busiest: "", hits: "hits"})
    elif findings["dram_pct"] >= _HIGH:
        findings.say(
            "DRAM bandwidth itself is the limit",
            "move fewer bytes: fuse with the kernels before and after, use a narrower type, or keep data in L2; "
            "then compare with the bandwidth measured on this card",
            dram_pct="",
        )
    else:
        findings.say(
            "DRAM is the busiest level, and has room",
            "have more loads in flight (unroll, wider loads, more warps), and move fewer bytes",
            dram_pct="",
        )


def _access(findings: _Findings) -> None:
    """How memory is accessed: coalescing, bank conflicts, spills."""
    tables = ("global_load_requests", "global_load_bytes_per_sector", "shared_wavefronts")
    if not any(map(findings.has, tables)):
        findings.advise(_collect("MemoryWorkloadAnalysis_Tables", "coalescing, bank conflicts and spills"))
        return
    for word in ("load", "store"):
        used, sectors, requests = (f"global_{word}_{what}" for what in ("bytes_per_sector", "sectors", "requests"))
        advice = "coalesce: let neighbouring threads access neighbouring addresses"
        if 0 < findings[used] < _USED_BYTES:
            part = findings.cite(used, "bytes")
            findings.say(f"global {word}s use {part} of each 32-byte sector they ask for", advice)
        elif findings[sectors] > _WIDEST_REQUEST * findings[requests] > 0 and not findings.has(used):
            text = f"global {word}s take {findings[sectors] / findings[requests]:.1f} sectors a request"
            need = f"{text}, where 128-bit accesses need {_WIDEST_REQUEST:g}"
            findings.say(need, advice, **{sectors: "sectors", requests: "requests"})
    share = findings["bank_conflicts"] / (findings["shared_wavefronts"] or math.nan)
    if share >= _CONFLICTS:
        findings.say(
            f"{100 * share:.0f} % of the passes through shared memory are bank conflicts",
            "remove the bank conflicts: pad or swizzle the shared-memory layout",
            bank_conflicts="conflicts",
            shared_wavefronts="wavefronts",
        )
    if findings["local_loads"] > 0 or findings["local_stores"] > 0:
        findings.say(
            "there is local-memory traffic (spilled registers or indexed arrays)",
            "keep it in registers: smaller tiles a thread, no arrays indexed at run time, no forced register limit",
            local_loads="instructions",
            local_stores="instructions",
        )


# ---------------------------------------------------------------- compute

#: What to do by the busiest of the pipes that are not tensor cores.
_PIPES = {
    "fma": "do less FP32 arithmetic a result, or do it in a type or a unit with a higher rate",
    "alu": "move address and index arithmetic out of the inner loop, and look for integer divisions",
    "fp64": "look for doubles that need not be (a literal 1.0 in CUDA C is one): most GPUs have few FP64 units",
    "xu": "use fewer special functions and conversions (exp, rsqrt, int to float), or cheaper forms of them",
    "lsu": "issue fewer load and store instructions: 128-bit accesses, and reuse in registers",
}
#: Categories of kernels that are, contain or could be a matmul.
_PRODUCTS = ("GEMM", "convolution", "attention", "Triton-fused", "other")


def _compute(findings: _Findings) -> None:
    # Over active cycles where measured; the basic set has pipes over elapsed cycles only. The two are not mixed.
    suffix = "_pct" if findings.has("tensor_pct") or findings.has("fma_pct") else "_elapsed_pct"
    pipes = {}
    for pipe in ("tensor", "tensor_16bit", *_PIPES):
        name = f"{pipe}{suffix}"
        if name in findings.launch.index and findings.has(name):
            pipes[name] = findings[name]
    if not pipes:
        findings.advise(_collect("ComputeWorkloadAnalysis", "which pipe is busy"))
        return
    tensor = next((name for name in pipes if name.startswith("tensor")), "")
    tensor_pct = pipes.get(tensor, math.nan)
    if tensor_pct >= _LOW:
        findings.say(
            "the tensor cores are busy",
            "compare with the matrix rate measured on this card; beyond it only fewer operations or a narrower type "
            "help (low occupancy is normal here)",
            **{tensor: ""},
        )
        return
    types = _types(findings) if tensor else ""
    if types:
        findings.say("the tensor cores are not what is busy", **{tensor: ""})
    others = [name for name in pipes if not name.startswith("tensor")]
    unit = ""
    if others:
        busiest = max(others, key=lambda name: pipes[name])
        unit = busiest.partition("_")[0]
        other = "other " if types else ""
        findings.say(f"the busiest {other}pipe is {unit.upper()}", _PIPES[unit], **{busiest: ""})
    if tensor_pct >= _SOME:
        findings.advise(
            "feed the tensor cores: sizes that are multiples of 8 elements (bf16, fp16) for the aligned kernels, of 64 "
            "or 128 for full tiles, and a cheaper prologue and epilogue"
        )
    elif types and unit != "fp64" and category_of(str(findings.launch["kernel"])) in _PRODUCTS:
        findings.advise(
            f"if this is a matmul, put it on the tensor cores: {types}; a kernel named sgemm runs in FP32 without them"
        )


def _types(findings: _Findings) -> str:
    """What the card's tensor cores multiply; empty where its generation has none."""
    generation = re.match(r"\d{1,3}", str(findings.launch["compute_capability"]))
    if generation is None or int(generation[0]) >= 8:
        return "TF32, BF16 or FP16 inputs"
    return "FP16 inputs (cards named GTX 16 have no such cores)" if int(generation[0]) == 7 else ""


# ---------------------------------------------------------------- latency


def _latency(findings: _Findings) -> None:
    if findings["waves"] < 1:
        findings.say(
            "the grid is too small to fill the GPU once",
            "give the GPU more blocks: a larger batch, smaller tiles, splitting along the reduced dimension, or other "
            "work at the same time",
            waves="waves",
            grid_blocks="blocks",
            sm_count="SMs",
        )
        return
    _tail(findings)
    _access(findings)
    _occupancy(findings)
    _waits(findings)


def _tail(findings: _Findings) -> None:
    if not findings["waves"] > 1:
        return
    # What the whole kernel used of the GPU was not empty.
    room = 1 - max(findings["sm_pct"], findings["memory_pct"]) / 100
    idle = round(min(1 - findings["waves"] / math.ceil(findings["waves"]), room), 3)
    if idle >= _TAIL:
        findings.say(
            f"the last wave leaves up to {100 * idle:.0f} % of the SMs' time empty",
            "choose tiles so that the blocks fill whole waves, or let a persistent kernel share them out",
            waves="waves",
        )


def _occupancy(findings: _Findings) -> None:
    fit = "theoretical_occupancy_pct"
    if findings[fit] < _LOW:
        limiter = findings.limiter()
        text = f"few warps fit on an SM: {findings.cite(fit)}"
        advice = []
        if limiter is not None:
            values = ", ".join(f"{name} {value:.0f}" for name, value in findings.limits().items())
            text += f"; blocks an SM can hold, by limit: {values} (launch__occupancy_limit_…)"
            for name in limiter.split("+"):
                advice.append(f"more warps would hide latency; what limits them: {_LIMITED_BY[name]}")
        findings.say(text, *advice)
    elif findings[fit] - findings["occupancy_pct"] >= _UNEVEN:
        findings.say(
            "fewer warps are resident than fit, so blocks or warps end at different times",
            "balance the work between blocks and warps",
            occupancy_pct="resident",
            theoretical_occupancy_pct="fit",
        )
    elif not findings.has("occupancy_pct"):
        findings.advise(_collect("Occupancy", "how many warps fit"))


def _waits(findings: _Findings) -> None:
    if findings["issue_pct"] >= _ISSUES:
        findings.say("the schedulers issue in most cycles, so waits cost little", issue_pct="")
        return
    shares, source = findings.stalls()
    if not shares:
        findings.advise(
            "collect SchedulerStats and WarpStateStats to see what the warps wait for "
            "(ncu --section SchedulerStats --section WarpStateStats)"
        )
        return
    waits = [stall for stall in shares if stall.reason not in ("selected", "not_selected")]
    waits.sort(key=lambda stall: -shares[stall])
    for stall in waits[:2]:
        if shares[stall] < _TOP_STALL:
            continue
        if source == "samples":
            cited = f"{findings.metrics[stall.sampled]:,} samples ({stall.sampled})"
        else:
            cited = findings.cite(f"stall_{stall.reason}", "warps an issue")
        findings.say(
            f"{100 * shares[stall]:.0f} % of a warp's time between two instructions is {stall.reason}, {cited}: it "
            f"{stall.meaning}"
        )
        if stall.next_step:
            findings.advise(f"{stall.reason}: {stall.next_step}")
