"""Which limiter? What Nsight Compute's counters say about a kernel, and what to try.

The first cut is NVIDIA's own rule (``SpeedOfLight.py`` of Nsight Compute). Below it, each class has its tree of
questions; every answer cites the value it rests on, and a question whose metric the report lacks ends in the
section to collect.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import pandas as pd

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

# Thresholds of the trees. They are judgements, not facts; each is named in the evidence it gives.
_CONFLICTS = 0.10  # of the passes through shared memory: some conflicts are always counted
_USED_BYTES = 24.0  # of a 32-byte sector
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
    if not (math.isfinite(sm_pct) and math.isfinite(memory_pct)):
        return "not-enough-data"
    heavier = "compute-bound" if sm_pct >= memory_pct else "memory-bound"
    if max(sm_pct, memory_pct) >= _HIGH:
        return heavier
    if sm_pct < _LOW and memory_pct < _LOW:
        return "latency-bound"
    return heavier if abs(sm_pct - memory_pct) >= _APART else "balanced"


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
    if not all(map(math.isfinite, known.values())):
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
    for place in _chosen(report, kernel, within):
        launch = report.launches.iloc[place]
        shares, source = _stall_shares(launch, report.metrics[place])
        identity = launch["id"], launch["kernel"]
        for stall in ncu_metrics.STALLS:
            if stall.reason in shares:
                rows.append([*identity, stall.reason, shares[stall.reason], source, stall.meaning])  # noqa: PERF401
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
        :func:`occupancy_limiter`); ``classification`` (see :func:`classify`); ``evidence`` and ``next_steps``,
        lists of sentences. Each sentence of evidence cites its values.

    Raises
    ------
    UsageError
        An expression is malformed, or no range matches `within`.
    """
    rows = []
    for place in _chosen(report, kernel, within):
        launch = report.launches.iloc[place]
        told = _Telling(launch, report.metrics[place])
        classification = classify(launch["sm_pct"], launch["memory_pct"])
        _explain(told, classification)
        rows.append(
            {
                **{name: launch[name] for name in COLUMNS[:6]},
                "occupancy_limiter": occupancy_limiter(_limits(launch)),
                "classification": classification,
                "evidence": told.evidence,
                "next_steps": told.next_steps,
            }
        )
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.sort_values("time_ns", ascending=False, kind="stable", na_position="last", ignore_index=True)


def _chosen(report: Report, kernel: str | None, within: str | None) -> list[int]:
    chosen = list(range(len(report)))
    if within is not None:
        pattern = compiled(within, "within")
        around = report.launches["ranges"]
        chosen = [place for place in chosen if any(pattern.search(name) for name in around.iloc[place])]
        if not chosen:
            present = sorted({name for names in around for name in names})
            known = f"there are {', '.join(present)}" if present else "the report has none: run ncu with --nvtx"
            raise UsageError(f"no launch lies in a range that {within!r} finds; {known}")
    if kernel is not None:
        pattern = compiled(kernel, "kernel")
        chosen = [place for place in chosen if pattern.search(str(report.launches["kernel"].iloc[place]))]
    return chosen


def _limits(launch: pd.Series) -> dict[str, float]:
    return {name: launch[f"limit_{name}_blocks"] for name in LIMITS}


# ---------------------------------------------------------------- telling


@dataclasses.dataclass
class _Telling:
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
        value = self[name]
        metric = next(m for m in ncu_metrics.METRICS if m.name == name)
        found = next((n for n in metric.nvidia if n in self.metrics), metric.nvidia[0])
        text = f"{value:.1f} %" if metric.unit == "%" else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        return f"{text} {noun}".rstrip() + f" ({found})"

    def cited(self, *names: tuple[str, str]) -> str:
        """Give those of some values, each with a noun, that the report has."""
        return ", ".join(self.cite(name, noun) for name, noun in names if self.has(name))

    def busiest(self, name: str) -> tuple[str, float] | None:
        """Give the unit with the highest value in the breakdown of a throughput."""
        nvidia = next(m for m in ncu_metrics.METRICS if m.name == name).nvidia[0]
        parts = [part.strip() for part in str(self.metrics.get(f"breakdown:{nvidia}", "")).split(",")]
        values = {part: self.metrics.get(part) for part in parts}
        known = {part: float(value) for part, value in values.items() if isinstance(value, (int, float))}
        top = max(known, key=lambda part: known[part], default=None)
        return None if top is None else (top, known[top])

    def say(self, text: str) -> None:
        self.evidence.append(text)

    def try_(self, text: str) -> None:
        if text not in self.next_steps:
            self.next_steps.append(text)


def _explain(told: _Telling, classification: str) -> None:
    if classification == "not-enough-data":
        lacking = [name for name in ("sm_pct", "memory_pct") if not told.has(name)]
        missing = " and ".join(next(m for m in ncu_metrics.METRICS if m.name == n).nvidia[0] for n in lacking)
        told.say(f"the report lacks {missing}")
        told.try_("collect the section SpeedOfLight (ncu --section SpeedOfLight)")
        return
    told.say(f"compute throughput {told.cite('sm_pct')}, memory throughput {told.cite('memory_pct')}: {_rule(told)}")
    compute, memory = told.busiest("sm_pct"), told.busiest("memory_pct")
    if compute and memory:
        told.say(
            f"the busiest unit of compute is at {compute[1]:.1f} % ({compute[0]}), of memory at {memory[1]:.1f} % "
            f"({memory[0]})"
        )
    tree = {"compute-bound": _compute, "memory-bound": _memory, "balanced": _balanced, "latency-bound": _latency}
    tree[classification](told)


def _rule(told: _Telling) -> str:
    sm, memory = told["sm_pct"], told["memory_pct"]
    if max(sm, memory) >= _HIGH:
        heavier = "compute" if sm >= memory else "memory"
        also = f", and so is {'memory' if sm >= memory else 'compute'}" if min(sm, memory) >= _HIGH else ""
        return f"{heavier} is at {_HIGH:g} % of its peak or more{also}"
    if sm < _LOW and memory < _LOW:
        return f"both are below {_LOW:g} % of their peaks, so neither is the limit"
    if abs(sm - memory) >= _APART:
        return f"neither reaches {_HIGH:g} %, and they are {_APART:g} points apart or more"
    return f"neither reaches {_HIGH:g} %, one reaches {_LOW:g} %, and they are less than {_APART:g} points apart"


# ---------------------------------------------------------------- memory


def _memory(told: _Telling) -> None:
    # First what moves bytes for nothing: to use less of a level helps little while that is so.
    looked = _access(told)
    level = _level(told)
    if level == "DRAM":
        if told.has("dram_pct") and told["dram_pct"] >= _HIGH:
            told.say(f"DRAM bandwidth itself is the limit: {told.cite('dram_pct')}")
            told.try_(
                "move fewer bytes: fuse with the kernels before and after, use a narrower type, or keep data in L2; "
                "then compare with the bandwidth measured on this card"
            )
        else:
            if told.has("dram_pct"):
                told.say(f"DRAM is the busiest level, and has room: {told.cite('dram_pct')}")
            told.try_("have more loads in flight (unroll, wider loads, more warps), and move fewer bytes")
    elif told.has("dram_pct"):
        told.say(f"memory is the limit, and DRAM is not: {told.cite('dram_pct')}")
    if level == "L2":
        told.say(f"L2 is the busiest level: {told.cited(('l2_pct', ''), ('l2_hit_pct', 'hits')) or 'by the breakdown'}")
        told.try_("reuse more in L1, shared memory or registers (larger tiles), so that less goes to L2")
    elif level == "L1":
        values = told.cited(("l1_pct", ""), ("l1_hit_pct", "hits")) or "by the breakdown"
        told.say(f"L1, which is shared memory too, is the busiest level: {values}")
        told.try_(
            "issue fewer load and store instructions for the same bytes: 128-bit accesses, and reuse in registers "
            "(each thread computes a larger tile)"
        )
    elif level is None:
        told.try_("collect MemoryWorkloadAnalysis to see which level is busy (ncu --section MemoryWorkloadAnalysis)")
    if not looked:
        told.try_(_TABLES)


def _level(told: _Telling) -> str | None:
    """Which level of memory is busiest: by the breakdown, as NVIDIA's rule does, else by the levels' own figures."""
    top = told.busiest("memory_pct")
    for prefix, level in (("dram", "DRAM"), ("fbp", "DRAM"), ("lts", "L2"), ("ltc", "L2"), ("l1tex", "L1")):
        if top is not None and top[0].startswith(prefix):
            return level
    levels = {"DRAM": told["dram_pct"], "L2": told["l2_pct"], "L1": told["l1_pct"]}
    known = {level: value for level, value in levels.items() if math.isfinite(value)}
    return max(known, key=lambda level: known[level], default=None)


_TABLES = (
    "collect MemoryWorkloadAnalysis_Tables to see coalescing, bank conflicts and spills "
    "(ncu --section MemoryWorkloadAnalysis_Tables)"
)


def _access(told: _Telling) -> bool:
    """How memory is accessed: coalescing, bank conflicts, spills; whether the report says."""
    if not any(told.has(n) for n in ("global_load_requests", "global_load_bytes_per_sector", "shared_wavefronts")):
        return False
    _coalescing(told)
    _conflicts(told)
    _spills(told)
    return True


def _coalescing(told: _Telling) -> None:
    for word in ("load", "store"):
        used, sectors, requests = (f"global_{word}_{what}" for what in ("bytes_per_sector", "sectors", "requests"))
        if told.has(used) and 0 < told[used] < _USED_BYTES:
            told.say(f"global {word}s use {told.cite(used, 'bytes')} of each 32-byte sector they move")
        elif told.has(sectors, requests) and told[sectors] > _WIDEST_REQUEST * told[requests] > 0:
            told.say(
                f"global {word}s take {told[sectors] / told[requests]:.1f} sectors a request, where even 128-bit "
                f"accesses need {_WIDEST_REQUEST:g}: {told.cited((sectors, 'sectors'), (requests, 'requests'))}"
            )
        else:
            continue
        told.try_("coalesce: let neighbouring threads access neighbouring addresses")


def _conflicts(told: _Telling) -> None:
    if not told.has("bank_conflicts", "shared_wavefronts") or not told["shared_wavefronts"]:
        return
    share = told["bank_conflicts"] / told["shared_wavefronts"]
    if share >= _CONFLICTS:
        told.say(
            f"{100 * share:.0f} % of the passes through shared memory are bank conflicts: "
            f"{told.cited(('bank_conflicts', 'conflicts'), ('shared_wavefronts', 'wavefronts'))}"
        )
        told.try_("remove the bank conflicts: pad or swizzle the shared-memory layout")


def _spills(told: _Telling) -> None:
    present = [(n, "instructions") for n in ("local_loads", "local_stores") if told.has(n) and told[n] > 0]
    if present:
        told.say(f"there is local-memory traffic (spilled registers or indexed arrays): {told.cited(*present)}")
        told.try_(
            "keep it in registers: smaller tiles a thread, no arrays indexed at run time, no forced register limit"
        )


# ---------------------------------------------------------------- compute


def _compute(told: _Telling) -> None:
    # Over active cycles where measured; the basic set has pipes over elapsed cycles only. The two are not mixed.
    suffix = "_pct" if told.has("tensor_pct") or told.has("fma_pct") else "_elapsed_pct"
    matrix = "tensor_16bit" if suffix == "_pct" and not told.has("tensor_pct") else "tensor"
    names = [f"{pipe}{suffix}" for pipe in (matrix, "fma", "alu", "fp64", "xu", "lsu")]
    pipes = {name: told[name] for name in names if name in told.launch.index and told.has(name)}
    if not pipes:
        told.try_("collect ComputeWorkloadAnalysis to see which pipe is busy (ncu --section ComputeWorkloadAnalysis)")
        return
    tensor = next((name for name in pipes if name.startswith("tensor")), None)
    if tensor is not None and pipes[tensor] >= _LOW:
        told.say(f"the tensor cores are busy: {told.cite(tensor)}")
        told.try_(
            "compare with the matrix rate measured on this card; beyond it only fewer operations or a narrower type "
            "help (low occupancy is normal here)"
        )
        return
    if tensor is not None:
        told.say(f"the tensor cores are not what is busy: {told.cite(tensor)}")
    pipe = max((name for name in pipes if name != tensor), key=lambda name: pipes[name], default=None)
    if pipe is not None:
        told.say(f"the busiest other pipe is {pipe.partition('_')[0].upper()}: {told.cite(pipe)}")
        told.try_(_PIPES[pipe.partition("_")[0]])
    if tensor is None:
        return
    if pipes[tensor] == 0.0:
        told.try_(
            "if this is a matrix product, put it on the tensor cores: TF32, BF16 or FP16 inputs; a kernel named sgemm "
            "runs in FP32 without them"
        )
    else:
        told.try_(
            "feed the tensor cores: sizes that are multiples of 8 elements in 16 bit for the aligned kernels, of 64 or "
            "128 for full tiles, and a cheaper prologue and epilogue"
        )


_PIPES = {
    "fma": "do less FP32 arithmetic a result, or do it in a type or a unit with a higher rate",
    "alu": "move address and index arithmetic out of the inner loop, and look for integer divisions",
    "fp64": "look for doubles that need not be (a literal 1.0 in CUDA C is one): most GPUs have few FP64 units",
    "xu": "use fewer special functions and conversions (exp, rsqrt, int to float), or cheaper forms of them",
    "lsu": "issue fewer load and store instructions: 128-bit accesses, and reuse in registers",
}


def _balanced(told: _Telling) -> None:
    told.try_("bring down both the work and the bytes: fusing saves bytes, fewer or cheaper operations save work")
    if not _access(told):
        told.try_(_TABLES)
    _waits(told)


# ---------------------------------------------------------------- latency


def _latency(told: _Telling) -> None:
    if told.has("waves") and told["waves"] < 1:
        values = told.cited(("waves", "waves"), ("grid_blocks", "blocks"), ("sm_count", "SMs"))
        told.say(f"the grid is too small to fill the GPU once: {values}")
        told.try_(
            "give the GPU more blocks: a larger batch, smaller tiles, splitting along the reduced dimension, or other "
            "work at the same time"
        )
        return
    if told.has("waves") and (idle := 1 - told["waves"] / math.ceil(told["waves"])) >= _TAIL:
        told.say(f"the last wave leaves up to {100 * idle:.0f} % of the SMs' time empty: {told.cite('waves', 'waves')}")
        told.try_("choose tiles so that the blocks fill whole waves, or let a persistent kernel share them out")
    if not _access(told):
        told.try_(_TABLES)
    _occupancy(told)
    _waits(told)


def _occupancy(told: _Telling) -> None:
    limiter = occupancy_limiter(_limits(told.launch))
    if told.has("theoretical_occupancy_pct") and told["theoretical_occupancy_pct"] < _LOW:
        told.say(f"few warps fit on an SM: {told.cite('theoretical_occupancy_pct')}{_four(told)}")
        for name in limiter.split("+") if limiter else ():
            told.try_(f"more warps would hide latency; what limits them: {_LIMITED_BY[name]}")
    elif told.has("theoretical_occupancy_pct", "occupancy_pct"):
        if told["theoretical_occupancy_pct"] - told["occupancy_pct"] >= _UNEVEN:
            values = told.cited(("occupancy_pct", "resident"), ("theoretical_occupancy_pct", "fit"))
            told.say(f"fewer warps are resident than fit, so blocks or warps end at different times: {values}")
            told.try_("balance the work between blocks and warps")
    elif not told.has("occupancy_pct"):
        told.try_("collect the section Occupancy (ncu --section Occupancy)")


def _four(told: _Telling) -> str:
    limits = _limits(told.launch)
    if not all(map(math.isfinite, limits.values())):
        return ""
    values = ", ".join(f"{name} {value:.0f}" for name, value in limits.items())
    return f"; blocks an SM can hold, by limit: {values} (launch__occupancy_limit_…)"


def _waits(told: _Telling) -> None:
    if told.has("issue_pct"):
        if told["issue_pct"] >= _ISSUES:
            told.say(f"the schedulers issue in most cycles, so waits cost little: {told.cite('issue_pct')}")
            return
        warps = told.cited(("active_warps", "resident"), ("eligible_warps", "ready"))
        told.say(
            f"the schedulers issue in few of their cycles: {told.cite('issue_pct')}{warps and f'; warps: {warps}'}"
        )
    shares, source = _stall_shares(told.launch, told.metrics)
    if not shares:
        told.try_(
            "collect SchedulerStats and WarpStateStats to see what the warps wait for "
            "(ncu --section SchedulerStats --section WarpStateStats)"
        )
        return
    waits = [s for s in ncu_metrics.STALLS if s.reason not in ("selected", "not_selected") and s.reason in shares]
    waits.sort(key=lambda stall: -shares[stall.reason])
    for stall in waits[:2]:
        if shares[stall.reason] < _TOP_STALL:
            break
        if source == "ratio":
            counted = told.cite(f"stall_{stall.reason}", "warps an issue")
        else:
            counted = f"{told.metrics[stall.sampled]:,} samples ({stall.sampled})"
        told.say(
            f"{100 * shares[stall.reason]:.0f} % of a warp's time between two instructions is {stall.reason}, "
            f"{counted}: it {stall.meaning}"
        )
        if stall.next_step:
            told.try_(f"{stall.reason}: {stall.next_step}")


def _stall_shares(launch: pd.Series, metrics: Mapping[str, object]) -> tuple[dict[str, float], str]:
    counted = {stall.reason: float(launch[f"stall_{stall.reason}"]) for stall in ncu_metrics.STALLS}
    counted = {reason: value for reason, value in counted.items() if math.isfinite(value)}
    source = "ratio"
    if not counted:
        sampled = {stall.reason: metrics.get(stall.sampled) for stall in ncu_metrics.STALLS}
        counted = {reason: float(value) for reason, value in sampled.items() if isinstance(value, (int, float))}
        source = "samples"
    total = sum(counted.values())
    return ({reason: value / total for reason, value in counted.items()} if total else {}), source
