"""Which limiter? What Nsight Compute's counters say about a kernel, and what to try.

The first cut is NVIDIA's own rule (``SpeedOfLight.py`` of Nsight Compute). Below it, each class has its tree of
questions; every answer cites the value it rests on, and a question whose metric the report lacks ends in the
section to collect.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np
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
#: What kernels without matrix products show of the tensor cores, in percent, stays below this.
_SOME = 2.0
_APART = 10.0

# Thresholds of the trees. They are judgements, not facts; each is named in the evidence it gives.
_CONFLICTS = 0.10  # of the passes through shared memory: some conflicts are always counted
_MOSTLY = 0.5  # of the requests to L2
_SECTOR = 32  # bytes
_USED_BYTES = 24.0  # of a sector
_LITTLE = 0.05  # of the sectors of loads and stores: they matter little, however they are asked for
_WARP = 32  # threads
_LOST = 0.2  # of the threads of a block's warps: a block's last warp is rarely full
_TOGETHER = 0.75  # of a warp's threads: some branches part them in any kernel
_WIDEST_REQUEST = 16.0  # sectors a request needs at most: 32 threads, 16 bytes each
_TAIL = 0.2  # of the last wave's share of the time
_CROWDED = 85.0  # percent of the warps that an SM can hold: more would add little
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
    return _ruled(sm_pct, memory_pct)[0]


def _ruled(sm: float, memory: float) -> tuple[str, str]:
    """Apply the rule; give the class and what it rests on."""
    if not math.isfinite(sm + memory):
        return "not-enough-data", ""
    heavier, other = ("compute", "memory") if sm >= memory else ("memory", "compute")
    least, most = sorted((sm, memory))
    if most >= _HIGH:
        also = f", and so is {other}" if least >= _HIGH else ""
        return f"{heavier}-bound", f"{heavier} is at {_HIGH:g} % of its peak or more{also}"
    if most < _LOW:
        return "latency-bound", f"both are below {_LOW:g} % of their peaks, so neither is the limit"
    if most - least >= _APART:
        return f"{heavier}-bound", f"neither reaches {_HIGH:g} %, and they are {_APART:g} points apart or more"
    why = f"neither reaches {_HIGH:g} %, one reaches {_LOW:g} %, and they are less than {_APART:g} points apart"
    return "balanced", why


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
    known = {name: float(limits.get(name, math.nan)) for name in LIMITS}
    if not all(math.isfinite(blocks) for blocks in known.values()):
        return None
    least = min(known.values())
    return "+".join(name for name in LIMITS if known[name] == least)


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
        for stall, share in shares.items():
            launch = findings.launch
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
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
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
            raise UsageError(f"no launch lies in a range that {within!r} finds; {known}")
    if kernel is None:
        return chosen
    pattern = compiled(kernel, "kernel")
    return [findings for findings in chosen if pattern.search(str(findings.launch["kernel"]))]


# ---------------------------------------------------------------- what is found


@dataclasses.dataclass
class _Findings:
    """One launch, and what has been said about it."""

    launch: pd.Series
    metrics: Mapping[str, object]
    evidence: list[str] = dataclasses.field(default_factory=list)
    next_steps: list[str] = dataclasses.field(default_factory=list)

    def __getitem__(self, name: str) -> float:
        return float(self.launch[name])

    def has(self, *names: str) -> bool:
        return all(math.isfinite(self[name]) for name in names)

    def cite(self, name: str, noun: str = "") -> str:
        """Give a value with NVIDIA's name for it, so that it can be found again in the report."""
        value, metric = self[name], _METRICS[name]
        reported = next((candidate for candidate in metric.nvidia if candidate in self.metrics), metric.nvidia[0])
        if metric.unit == "%":
            text = f"{value:.1f} %"
        else:
            text = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        return f"{text} {noun}".rstrip() + f" ({reported})"

    def cited(self, *names: tuple[str, str]) -> str:
        """Give those of some values, each with a noun, that the report has."""
        return ", ".join(self.cite(name, noun) for name, noun in names if self.has(name))

    def busiest(self, name: str) -> tuple[str, float] | None:
        """Give the unit with the highest value in the breakdown of a throughput."""
        parts = str(self.metrics.get(f"breakdown:{_METRICS[name].nvidia[0]}", "")).split(",")
        known = {}
        for part in map(str.strip, parts):
            value = self.metrics.get(part)
            if isinstance(value, (int, float)):
                known[part] = float(value)
        return max(known.items(), key=lambda item: item[1], default=None)

    def limits(self) -> dict[str, float]:
        """Give how many blocks an SM can hold, by what limits them."""
        return {name: self[f"limit_{name}_blocks"] for name in LIMITS}

    def limiter(self) -> str | None:
        """Give the occupancy limiter; a block without shared memory is not limited by it where another limit is."""
        limiter = occupancy_limiter(self.limits())
        unused = self["static_shared_bytes"] + self["dynamic_shared_bytes"] == 0
        others = "+".join(name for name in (limiter or "").split("+") if name != "shared_mem")
        return others if unused and others else limiter

    def stalls(self) -> tuple[dict[ncu_metrics.Stall, float], str]:
        """Give what warps wait for as shares of their time, and whether it was counted or sampled."""
        counted, sampled = {}, {}
        for stall in ncu_metrics.STALLS:
            value, samples = self[f"stall_{stall.reason}"], self.metrics.get(stall.sampled)
            if math.isfinite(value):
                counted[stall] = value
            if isinstance(samples, (int, float)):
                sampled[stall] = float(samples)
        known, source = (counted, "ratio") if counted else (sampled, "samples")
        total = sum(known.values())
        if not total:
            return {}, source
        return {stall: value / total for stall, value in known.items()}, source

    def say(self, text: str, *advice: str) -> None:
        self.evidence.append(text)
        self.advise(*advice)

    def advise(self, *advice: str) -> None:
        self.next_steps += [text for text in advice if text not in self.next_steps]


def _explain(findings: _Findings) -> str:
    """Say what bounds a launch; give its class."""
    classification, why = _ruled(findings["sm_pct"], findings["memory_pct"])
    lanes = _lanes(findings)
    if classification == "not-enough-data":
        missing = " and ".join(_METRICS[name].nvidia[0] for name in ("sm_pct", "memory_pct") if not findings.has(name))
        findings.say(f"the report lacks {missing}", "collect the section SpeedOfLight (ncu --section SpeedOfLight)")
        return classification
    findings.say(
        f"compute throughput {findings.cite('sm_pct')}, memory throughput {findings.cite('memory_pct')}: {why}"
    )
    compute, memory = findings.busiest("sm_pct"), findings.busiest("memory_pct")
    if compute and memory:
        findings.say(
            f"the busiest unit of compute is at {compute[1]:.1f} % ({compute[0]}), of memory at {memory[1]:.1f} % "
            f"({memory[0]})"
        )
    tree = {"compute-bound": _compute, "memory-bound": _memory, "balanced": _balanced, "latency-bound": _latency}
    tree[classification](findings)
    if classification != "latency-bound":
        _tail(findings)
    if findings["threads_per_instruction"] < _TOGETHER * lanes:
        active = findings.cite("threads_per_instruction")
        findings.say(
            f"threads of a warp branch apart: {active} of its {lanes:g} take part in an instruction",
            "let the threads of a warp take the same branches and loop as often: sort or group what they work on",
        )
    return classification


def _lanes(findings: _Findings) -> float:
    """How many threads a warp of the launch has; says so where many are missing."""
    if not findings["block_threads"] > 0:
        return _WARP
    warps = math.ceil(findings["block_threads"] / _WARP)
    lost = 1 - findings["block_threads"] / (_WARP * warps)
    if lost >= _LOST:
        findings.say(
            f"the warps of a block are {100 * (1 - lost):.0f} % full, and the rest of them does nothing: "
            f"{findings.cite('block_threads')} of {_WARP * warps} threads",
            f"make blocks a multiple of {_WARP} threads, such as 128 or 256",
        )
    return findings["block_threads"] / warps


# ---------------------------------------------------------------- memory


def _memory(findings: _Findings) -> None:
    # First what moves bytes for nothing: to use less of a level helps little while that is so.
    level = _level(findings)
    looked = _access(findings, level)
    full = findings["dram_pct"] >= _HIGH
    dram = "DRAM bandwidth itself is the limit" if full else "DRAM is the busiest level, and has room"
    if findings.has("dram_pct"):
        findings.say(
            f"{dram if level == 'DRAM' else 'memory is the limit, and DRAM is not'}: {findings.cite('dram_pct')}"
        )
    if level in _CACHES:
        name, advice = _CACHES[level]
        own = f"{level.lower()}_pct"
        # It has parts that the memory throughput leaves out, and that of L1 is over active cycles only.
        apart = "by its own measure, not the memory throughput's" if findings[own] > findings["memory_pct"] else ""
        figures = findings.cited((own, apart), (f"{level.lower()}_hit_pct", "hits"))
        findings.say(f"{name} is the busiest level: {figures or 'by the breakdown'}", advice)
    else:
        in_flight = _MORE_IN_FLIGHT.format("" if findings["occupancy_pct"] >= _CROWDED else ", more warps")
        findings.advise((_BANDWIDTH if full else in_flight) if level else _WORKLOAD)
    findings.advise(*looked)


def _level(findings: _Findings) -> str | None:
    """Which level of memory is busiest: by the breakdown, as NVIDIA's rule does, else by the levels' own figures."""
    top, _ = findings.busiest("memory_pct") or ("", 0)
    known = {level: findings[name] for level, name in _LEVELS if findings.has(name)}
    by_breakdown = (level for prefix, level in _UNITS if top.startswith(prefix))
    return next(by_breakdown, max(known, key=lambda level: known[level], default=None))


#: Levels of memory by the beginning of their units' names, and their own figures.
_UNITS = (("dram", "DRAM"), ("fbp", "DRAM"), ("lts", "L2"), ("ltc", "L2"), ("l1tex", "L1"))
_LEVELS = (("DRAM", "dram_pct"), ("L2", "l2_pct"), ("L1", "l1_pct"))
#: Of a cache that is the busiest level: its name in a sentence, and what to do.
_CACHES = {
    "L2": ("L2", "reuse more in L1, shared memory or registers (larger tiles), so that less goes to L2"),
    "L1": (
        "L1, which is shared memory too,",
        (
            "issue fewer load and store instructions for the same bytes: 128-bit accesses, and reuse in registers "
            "(each thread computes a larger tile)"
        ),
    ),
}
_BANDWIDTH = (
    "move fewer bytes: fuse with the kernels before and after, use a narrower type, or keep data in L2; "
    "then compare with the bandwidth measured on this card"
)
_MORE_IN_FLIGHT = "have more loads in flight (unroll, wider loads{}), and move fewer bytes"
_WORKLOAD = "collect MemoryWorkloadAnalysis to see which level is busy (ncu --section MemoryWorkloadAnalysis)"
_TABLES = (
    "collect MemoryWorkloadAnalysis_Tables to see coalescing, bank conflicts and spills "
    "(ncu --section MemoryWorkloadAnalysis_Tables)"
)


#: Stalls of warps that wait for what they asked of memory, or for room to ask.
_ON_MEMORY = ("drain", "long_scoreboard", "lg_throttle")


def _access(findings: _Findings, level: str | None = None) -> tuple[str, ...]:
    """How memory is accessed: coalescing, bank conflicts, spills; gives what to collect where the report does not say.

    `level` is the one that is the limit, if one is. What was not measured is NaN, and comparisons with NaN are false.
    """
    tables = ("global_load_requests", "global_load_bytes_per_sector", "shared_wavefronts")
    if not any(findings.has(name) for name in tables):
        return (_TABLES,)
    _atomics(findings)
    _coalescing(findings, "load", level)
    _coalescing(findings, "store", level)
    share = findings["bank_conflicts"] / (findings["shared_wavefronts"] or math.nan)
    if share >= _CONFLICTS:
        cited = findings.cited(("bank_conflicts", "conflicts"), ("shared_wavefronts", "wavefronts"))
        findings.say(
            f"{100 * share:.0f} % of the passes through shared memory are bank conflicts: {cited}",
            "remove the bank conflicts: pad or swizzle the shared-memory layout",
        )
    spills = [(name, "instructions") for name in ("local_loads", "local_stores") if findings[name] > 0]
    if spills:
        findings.say(
            f"there is local-memory traffic (spilled registers or indexed arrays): {findings.cited(*spills)}",
            "keep it in registers: smaller tiles a thread, no arrays indexed at run time, no forced register limit",
        )
    return ()


def _atomics(findings: _Findings) -> None:
    atomics = ("l2_reductions", "l2_atomics", "l2_swaps")
    if not sum(findings[name] for name in atomics) > _MOSTLY * findings["l2_requests"]:
        return
    shares, _ = findings.stalls()
    wait = max(shares, key=lambda stall: shares[stall]).reason if shares else ""
    if wait not in _ON_MEMORY:
        return
    counts = [(name, name.removeprefix("l2_")) for name in (*atomics, "l2_requests") if findings[name]]
    findings.say(
        f"most requests to L2 are atomic operations, and warps wait in {wait} above all: {findings.cited(*counts)}",
        "do fewer atomic operations: on few addresses they wait for one another, so let a warp or a block reduce "
        "first (__shfl_down_sync, shared memory) and do one for all of it",
    )


def _coalescing(findings: _Findings, word: str, level: str | None) -> None:
    """Whether loads or stores (`word`) ask for much that they do not use."""
    used, sectors, requests = (f"global_{word}_{what}" for what in ("bytes_per_sector", "sectors", "requests"))
    if findings[sectors] < _LITTLE * (findings["global_load_sectors"] + findings["global_store_sectors"]):
        return
    advice = "coalesce: let neighbouring threads access neighbouring addresses"
    reach = _reach(findings, word, level)
    if 0 < findings[used] < _USED_BYTES * reach:
        findings.say(f"global {word}s use {findings.cite(used, 'bytes')} of each 32-byte sector they ask for", advice)
    elif findings[sectors] * reach > _WIDEST_REQUEST * findings[requests] > 0 and not findings.has(used):
        cited = findings.cited((sectors, "sectors"), (requests, "requests"))
        findings.say(
            f"global {word}s take {findings[sectors] / findings[requests]:.1f} sectors a request, where even 128-bit "
            f"accesses need {_WIDEST_REQUEST:g}: {cited}",
            advice,
        )


def _reach(findings: _Findings, word: str, level: str | None) -> float:
    """How many of the sectors that loads or stores ask for reach the level that is the limit: a cache has the others.

    What it keeps until a neighbour asks for the rest of a sector does not move twice. DRAM's own bytes tell; for L2, or
    where warps wait, the rate at which loads hit L1, through which stores go all the same. 1 where nothing tells.
    """
    if level == "DRAM":
        moved = findings["dram_read_bytes" if word == "load" else "dram_write_bytes"]
        return float(np.fmin(moved / (_SECTOR * findings[f"global_{word}_sectors"] or math.nan), 1))
    return 1 if level == "L1" or word == "store" else 1 - float(np.fmax(findings["global_load_hit_pct"], 0)) / 100


# ---------------------------------------------------------------- compute


def _compute(findings: _Findings) -> None:
    # Over active cycles where measured; the basic set has pipes over elapsed cycles only. The two are not mixed.
    suffix = "_pct" if findings.has("tensor_pct") or findings.has("fma_pct") else "_elapsed_pct"
    matrix = "tensor_16bit" if suffix == "_pct" and not findings.has("tensor_pct") else "tensor"
    names = [f"{pipe}{suffix}" for pipe in (matrix, "fma", "alu", "fp64", "xu", "lsu")]
    pipes = {name: findings[name] for name in names if name in findings.launch.index and findings.has(name)}
    if not pipes:
        findings.advise(
            "collect ComputeWorkloadAnalysis to see which pipe is busy (ncu --section ComputeWorkloadAnalysis)"
        )
        return
    tensor = next((name for name in pipes if name.startswith("tensor")), "")
    matrices = pipes.pop(tensor, math.nan)
    if matrices >= _LOW:
        findings.say(f"the tensor cores are busy: {findings.cite(tensor)}", _TENSORS["busy"])
        return
    types = _types(findings) if tensor else ""
    if types:
        findings.say(f"the tensor cores are not what is busy: {findings.cite(tensor)}")
    unit = ""
    for pipe in sorted(pipes, key=lambda name: -pipes[name])[:1]:
        unit = pipe.partition("_")[0]
        findings.say(
            f"the busiest {'other ' if types else ''}pipe is {unit.upper()}: {findings.cite(pipe)}", _PIPES[unit]
        )
    if matrices >= _SOME:
        findings.advise(_TENSORS["in part"])
    elif types and unit != "fp64" and category_of(str(findings.launch["kernel"])) in _PRODUCTS:
        findings.advise(_TENSORS["idle"].format(types=types))


def _types(findings: _Findings) -> str:
    """What the card's tensor cores multiply, so that advice names only what it can do; empty where it has none."""
    known = re.match(r"\d{1,3}", str(findings.launch["compute_capability"]))
    generation = int(known[0]) if known else math.inf
    if generation < 7 or findings.metrics.get("device__attribute_chip") in _NO_TENSOR_CORES:
        return ""
    return "TF32, BF16 or FP16 inputs" if generation >= 8 else "FP16 inputs (cards named GTX 16 have no such cores)"


#: TU117 and TU116: the chips of Turing without tensor cores, whose compute capability is that of a T4.
_NO_TENSOR_CORES = (0x167, 0x168)
#: Categories of kernels that are, contain or could be a matrix product.
_PRODUCTS = ("GEMM", "attention", "Triton-fused", "other")
#: What to do by how busy the tensor cores are, and by the busiest of the other pipes.
_TENSORS = {
    "busy": "compare with the matrix rate measured on this card; beyond it only fewer operations or a narrower type "
    "help (low occupancy is normal here)",
    "idle": "if this is a matrix product, put it on the tensor cores: {types}; a kernel named sgemm runs in FP32 "
    "without them",
    "in part": "feed the tensor cores: sizes that are multiples of 8 elements in 16 bit for the aligned kernels, of 64 "
    "or 128 for full tiles, and a cheaper prologue and epilogue",
}
_PIPES = {
    "fma": "do less FP32 arithmetic a result, or do it in a type or a unit with a higher rate",
    "alu": "move address and index arithmetic out of the inner loop, and look for integer divisions",
    "fp64": "look for doubles that need not be (a literal 1.0 in CUDA C is one): most GPUs have few FP64 units",
    "xu": "use fewer special functions and conversions (exp, rsqrt, int to float), or cheaper forms of them",
    "lsu": "issue fewer load and store instructions: 128-bit accesses, and reuse in registers",
}


def _balanced(findings: _Findings) -> None:
    findings.advise("bring down both the work and the bytes: fusing saves bytes, fewer or cheaper operations save work")
    findings.advise(*_access(findings))
    _waits(findings)


# ---------------------------------------------------------------- latency


def _latency(findings: _Findings) -> None:
    if findings["waves"] < 1:
        findings.say(
            "the grid is too small to fill the GPU once: "
            + findings.cited(("waves", "waves"), ("grid_blocks", "blocks"), ("sm_count", "SMs")),
            "give the GPU more blocks: a larger batch, smaller tiles, splitting along the reduced dimension, or other "
            "work at the same time",
        )
        return
    _tail(findings)
    findings.advise(*_access(findings))
    _occupancy(findings)
    _waits(findings)


def _tail(findings: _Findings) -> None:
    # What is used of the GPU over the whole kernel was not empty.
    if findings["waves"] > 1:
        room = 1 - max(findings["sm_pct"], findings["memory_pct"]) / 100
        idle = round(min(1 - findings["waves"] / math.ceil(findings["waves"]), room), 3)
        if idle >= _TAIL:
            waves = findings.cite("waves", "waves")
            findings.say(
                f"the last wave leaves up to {100 * idle:.0f} % of the SMs' time empty: {waves}",
                "choose tiles so that the blocks fill whole waves, or let a persistent kernel share them out",
            )


def _occupancy(findings: _Findings) -> None:
    limits, limiter = findings.limits(), findings.limiter() or ""
    if findings["theoretical_occupancy_pct"] < _LOW:
        values = ", ".join(f"{name} {value:.0f}" for name, value in limits.items())
        four = f"; blocks an SM can hold, by limit: {values} (launch__occupancy_limit_…)" if limiter else ""
        advice = (
            f"more warps would hide latency; what limits them: {_LIMITED_BY[name]}" for name in limiter.split("+")
        )
        findings.say(
            f"few warps fit on an SM: {findings.cite('theoretical_occupancy_pct')}{four}", *(advice if limiter else ())
        )
    elif findings["theoretical_occupancy_pct"] - findings["occupancy_pct"] >= _UNEVEN:
        findings.say(
            "fewer warps are resident than fit, so blocks or warps end at different times: "
            + findings.cited(("occupancy_pct", "resident"), ("theoretical_occupancy_pct", "fit")),
            "balance the work between blocks and warps",
        )
    elif not findings.has("occupancy_pct"):
        findings.advise("collect the section Occupancy (ncu --section Occupancy)")


def _waits(findings: _Findings) -> None:
    if findings["issue_pct"] >= _ISSUES:
        findings.say(f"the schedulers issue in most cycles, so waits cost little: {findings.cite('issue_pct')}")
        return
    if findings.has("issue_pct"):
        warps = findings.cited(("active_warps", "resident"), ("eligible_warps", "ready"))
        findings.say(
            f"the schedulers issue in few of their cycles: {findings.cite('issue_pct')}{warps and f'; warps: {warps}'}"
        )
    shares, source = findings.stalls()
    if not shares:
        findings.advise(
            "collect SchedulerStats and WarpStateStats to see what the warps wait for "
            "(ncu --section SchedulerStats --section WarpStateStats)"
        )
        return
    waits = {stall: share for stall, share in shares.items() if stall.reason not in ("selected", "not_selected")}
    for stall in sorted((stall for stall in waits if waits[stall] >= _TOP_STALL), key=lambda stall: -waits[stall])[:2]:
        counted = f"{findings.metrics.get(stall.sampled):,} samples ({stall.sampled})" if source == "samples" else ""
        findings.say(
            f"{100 * shares[stall]:.0f} % of a warp's time between two instructions is {stall.reason}, "
            f"{counted or findings.cite(f'stall_{stall.reason}', 'warps an issue')}: it {stall.meaning}",
            *([f"{stall.reason}: {stall.next_step}"] if stall.next_step else []),
        )
