"""Which limiter? What Nsight Compute's counters say about a kernel, and what to try.

The first cut is NVIDIA's own rule (``SpeedOfLight.py`` of Nsight Compute). Below it, each class has its questions;
every answer (``counters.toml``) cites the value it rests on, and a question whose metric the report lacks ends in the
section to collect.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import pandas as pd

from nsightkit.analysis.core.categories import category_of
from nsightkit.errors import UsageError
from nsightkit.text import Json, compiled, matching, read_toml
from nsightkit.trace import ncu_metrics
from nsightkit.trace.ncu import Report

_MEASURED = ["kernel", "time_ns", "sm_pct", "memory_pct", "dram_pct", "occupancy_pct"]
#: Columns of :func:`summary`.
COLUMNS = (*_MEASURED, "occupancy_limiter", "classification", "evidence", "next_steps")
#: The four limits, by the names of NVIDIA's metrics ``launch__occupancy_limit_…``.
LIMITS = ("registers", "shared_mem", "warps", "blocks")

# NVIDIA's thresholds, in percent of peak: no_bound_threshold, latency_bound_threshold, balanced_threshold of its rule.
_HIGH_PCT = 80.0
_LOW_PCT = 60.0
_APART_POINTS = 10.0
#: Tensor-core use of kernels without matmuls stays below this, in percent.
_SOME_TENSOR_PCT = 2.0

# Thresholds of the questions. They are judgements, not facts; each is named in the evidence it gives.
_CONFLICT_SHARE = 0.10  # of the passes through shared memory: some conflicts are always counted
_WELL_USED_BYTES = 24.0  # of a sector's 32: accesses that use fewer are not coalesced
_WIDEST_REQUEST_SECTORS = 16.0  # sectors a request needs at most: 32 threads, 16 bytes each
_TAIL_SHARE = 0.2  # of the SMs' time, empty in the last wave: less is not worth another tiling
_TOP_STALL_SHARE = 0.15  # of the time between two instructions: lesser stalls are left out
_UNEVEN_POINTS = 20.0  # of occupancy, between the warps that fit and those resident
_ISSUES_WELL_PCT = 80.0  # of the cycles: schedulers that issue in so many lose little to stalls

_MEMORY_LEVELS = ("dram_pct", "l2_pct", "l1_pct")
_PIPES = ("fma", "alu", "fp64", "xu", "lsu")
#: Categories of kernels that are, contain or could be a matmul.
_MATMUL_CATEGORIES = ("GEMM", "convolution", "attention", "Triton-fused", "other")
_METRICS = {metric.name: metric for metric in ncu_metrics.METRICS}

#: What each question answers: ``text``, ``advice`` and what it ``cites``.
_ANSWERS: dict[str, Json] = read_toml(__file__, "counters")


def classify(sm_pct: float, memory_pct: float) -> str:
    """Say what bounds a kernel, by NVIDIA's own rule.

    Either throughput at 80% or more: the greater one's side (compute where they are equal). Both below 60%:
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
        compute-bound, memory-bound, balanced, latency-bound or not-enough-data.
    """
    if not math.isfinite(sm_pct + memory_pct):
        return "not-enough-data"
    lower_pct, higher_pct = sorted((sm_pct, memory_pct))
    if higher_pct < _LOW_PCT:
        return "latency-bound"
    if higher_pct < _HIGH_PCT and higher_pct - lower_pct < _APART_POINTS:
        return "balanced"
    if sm_pct >= memory_pct:
        return "compute-bound"
    return "memory-bound"


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
        included: it sums to 1 for a launch), ``source`` (``ratio``: from hardware counters; ``samples``: from samples
        of the program counter), ``meaning``, the longest first. Empty where the report has neither of these sources.

    Raises
    ------
    UsageError
        An expression is malformed, or no range matches `within`.
    """
    rows = []
    for findings in _chosen_launches(report, kernel, within):
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
        ``occupancy_pct`` in percent of peak (NaN where not measured); ``occupancy_limiter`` (the resource that limits
        how many blocks fit on an SM, several joined with ``+``; None unless all are known); ``classification`` (see
        :func:`classify`); ``evidence`` and ``next_steps``, lists of sentences. Each sentence of evidence cites its
        values.

    Raises
    ------
    UsageError
        An expression is malformed, or no range matches `within`.
    """
    rows = []
    for findings in _chosen_launches(report, kernel, within):
        measured = findings.launch[_MEASURED].tolist()
        classification = _explain_launch(findings)  # it also fills the evidence and the next steps
        rows.append([*measured, findings.limiter(), classification, findings.evidence, findings.next_steps])
    frame = pd.DataFrame(rows, columns=pd.Index(COLUMNS))
    return frame.sort_values("time_ns", ascending=False, kind="stable", na_position="last", ignore_index=True)


def _chosen_launches(report: Report, kernel: str | None, within: str | None) -> list[_Findings]:
    """The launches of kernels that `kernel` finds, inside ranges that `within` finds, still without findings."""
    launches = report.launches
    if within is not None:
        # One row per launch and range around it, so the index repeats.
        range_names = launches["ranges"].explode().dropna().astype("category")
        is_inside = matching(range_names, compiled(within, "within"))
        launches = launches.loc[range_names.index[is_inside].unique()]
        if launches.empty:
            present = ", ".join(sorted(range_names.unique()))
            hint = "the report has none: run ncu with --nvtx"
            if present:
                hint = f"there are {present}"
            raise UsageError(f"no launch is inside a range that {within!r} finds; {hint}")
    if kernel is not None:
        launches = launches[matching(launches["kernel"].astype("category"), compiled(kernel, "kernel"))]
    return [_Findings(report.launches.loc[row], report.metrics[row]) for row in launches.index.tolist()]


# ---------------------------------------------------------------- what is found


@dataclasses.dataclass
class _Findings:
    """One launch of a kernel: its counters, read by ``findings["sm_pct"]``, and the sentences found about it so far.

    A counter that was not collected is NaN, for which no comparison holds.
    """

    launch: pd.Series  # our metrics, by our names
    metrics: Mapping[str, object]  # all that the report has, by NVIDIA's names
    evidence: list[str] = dataclasses.field(default_factory=list)
    next_steps: list[str] = dataclasses.field(default_factory=list)

    def __getitem__(self, name: str) -> float:
        """Give a counter by our name; NaN if it was not collected."""
        return float(self.launch.get(name, math.nan))

    def has(self, name: str) -> bool:
        """Whether a counter was collected."""
        return math.isfinite(self[name])

    def cite(self, name: str, noun: str = "") -> str:
        """Write a counter, what it counts and NVIDIA's name for it: "97.0% hits (lts__t_sector_hit_rate.pct)"."""
        value = self[name]
        metric = _METRICS[name]
        # NVIDIA's names of it that this report holds; if none does, all.
        reported = [candidate for candidate in metric.nvidia if candidate in self.metrics] or metric.nvidia
        text = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        if metric.unit == "%":
            text = f"{value:.1f}%"
        if noun:
            text += f" {noun}"
        return f"{text} ({reported[0]})"

    def limits(self) -> dict[str, float]:
        """Give how many blocks fit on an SM by each limit: registers, shared memory, warps, blocks."""
        return {name: self[f"limit_{name}_blocks"] for name in LIMITS}

    def limiter(self) -> str | None:
        """Name the smallest of the four limits of how many blocks fit on an SM, equal ones joined with ``+``.

        None unless all are known. A block without shared memory is not limited by it where another limit is.
        """
        limits = self.limits()
        if not math.isfinite(sum(limits.values())):
            return None
        fewest_blocks = min(limits.values())
        names = [name for name, blocks in limits.items() if blocks == fewest_blocks]
        # Also true (NaN) if they were not collected.
        uses_shared = self["static_shared_bytes"] + self["dynamic_shared_bytes"] != 0
        if len(names) > 1 and "shared_mem" in names and not uses_shared:
            names.remove("shared_mem")
        return "+".join(names)

    def stalls(self) -> tuple[dict[ncu_metrics.Stall, float], str]:
        """Give the share of a warp's time in each state, and whether it was counted (``ratio``) or sampled."""
        values = {stall: self[f"stall_{stall.reason}"] for stall in ncu_metrics.STALLS}
        source = "ratio"
        if all(map(math.isnan, values.values())):
            source = "samples"
            for stall in values:
                samples = self.metrics.get(stall.sampled)
                values[stall] = float(samples) if isinstance(samples, (int, float)) else math.nan
        collected = {stall: value for stall, value in values.items() if value >= 0}
        total = sum(collected.values())
        return {stall: value / total for stall, value in collected.items() if total}, source

    def say(self, answer: str, **values: object) -> None:
        """Add an answer of ``counters.toml`` to the evidence and the next steps, with the counters it cites."""
        entry: Json = {"text": "", "advice": "", "cites": {}} | _ANSWERS[answer]
        text = entry["text"].format(**values)
        cited = [self.cite(name, noun) for name, noun in entry["cites"].items() if self.has(name)]
        if cited:
            text += f": {', '.join(cited)}"
        if text:
            self.evidence.append(text)
        self.advise(entry["advice"])

    def advise(self, advice: str) -> None:
        """Add advice to the next steps, once."""
        if advice and advice not in self.next_steps:
            self.next_steps.append(advice)


def _explain_launch(findings: _Findings) -> str:
    """Note what bounds a launch and what to try; return its class, as :func:`classify` does."""
    classification = classify(findings["sm_pct"], findings["memory_pct"])
    if classification == "not-enough-data":
        missing = [_METRICS[name].nvidia[0] for name in ("sm_pct", "memory_pct") if not findings.has(name)]
        findings.say("lacking", metrics=" and ".join(missing))
        return classification
    findings.say("throughput", compute=findings.cite("sm_pct"), memory=findings.cite("memory_pct"))
    if classification == "latency-bound":
        _latency_causes(findings)
    elif classification == "compute-bound":
        _busiest_pipe(findings)
    elif classification == "memory-bound":
        _memory_access(findings)  # wasted traffic first: it decides how busy the levels are
        _busiest_memory_level(findings)
    else:
        findings.say("balanced")
        _memory_access(findings)
        _warp_stalls(findings)
    _last_wave(findings)
    findings.next_steps.sort(key=lambda text: text.startswith("collect "))  # what to change comes first
    return classification


# ---------------------------------------------------------------- memory


def _busiest_memory_level(findings: _Findings) -> None:
    """Note which level of the memory is busiest: DRAM, L2 or L1.

    The answers are sections of ``counters.toml``; one for each level has the name of that level's metric.
    """
    busy = findings.launch[list(_MEMORY_LEVELS)].astype(float)
    if busy.isna().all():
        findings.say("no-levels")
        return
    level = str(busy.idxmax())
    if level != "dram_pct":
        findings.say("not-dram")
        findings.say(level)
    elif findings[level] >= _HIGH_PCT:
        findings.say("dram-full")
    else:
        findings.say(level)


def _memory_access(findings: _Findings) -> None:
    """Note how memory is accessed: uncoalesced accesses, bank conflicts, spills."""
    # Counters of ncu's section MemoryWorkloadAnalysis_Tables.
    section_counters = ("global_load_requests", "global_load_bytes_per_sector", "shared_wavefronts")
    if not any(map(findings.has, section_counters)):
        findings.say("no-tables")
        return
    for word in ("load", "store"):
        used_bytes = f"global_{word}_bytes_per_sector"
        sectors = f"global_{word}_sectors"
        requests = f"global_{word}_requests"
        if 0 < findings[used_bytes] < _WELL_USED_BYTES:
            findings.say("sectors", word=word, used=findings.cite(used_bytes, "bytes"))
        elif findings[requests] > 0 and not findings.has(used_bytes):
            # Without the used bytes of a sector, the sectors of a request are the next best sign.
            sectors_per_request = findings[sectors] / findings[requests]
            if sectors_per_request > _WIDEST_REQUEST_SECTORS:
                cited = f"{findings.cite(sectors, 'sectors')}, {findings.cite(requests, 'requests')}"
                findings.say("requests", word=word, sectors=sectors_per_request, cited=cited)
    # NaN instead of a division by 0 where nothing passes through shared memory.
    conflict_share = findings["bank_conflicts"] / (findings["shared_wavefronts"] or math.nan)
    if conflict_share >= _CONFLICT_SHARE:
        findings.say("conflicts", percent=100 * conflict_share)
    if findings["local_loads"] > 0 or findings["local_stores"] > 0:
        findings.say("spills")


# ---------------------------------------------------------------- compute


def _busiest_pipe(findings: _Findings) -> None:
    """Note whether the tensor cores are busy, else which other pipe is."""
    # Over active cycles where measured; the basic set has pipes over elapsed cycles only. The two are not mixed.
    suffix = "_elapsed_pct"
    if findings.has("tensor_pct") or findings.has("fma_pct"):
        suffix = "_pct"
    pipes = [pipe for pipe in _PIPES if findings.has(pipe + suffix)]
    # Tensor cores by all types of work; some reports have only floating point.
    tensor_counters = [name for name in ("tensor" + suffix, "tensor_16bit" + suffix) if findings.has(name)]
    if not pipes and not tensor_counters:
        findings.say("no-pipes")
        return
    tensor_pct = findings[tensor_counters[0]] if tensor_counters else math.nan
    if tensor_pct >= _LOW_PCT:
        findings.say("tensor", busy=findings.cite(tensor_counters[0]))
        return
    if tensor_counters:
        findings.say("tensor-idle", busy=findings.cite(tensor_counters[0]))
    busiest = max(pipes, key=lambda pipe: findings[pipe + suffix], default="")
    if busiest:
        findings.say(busiest, busy=findings.cite(busiest + suffix))
    if tensor_pct >= _SOME_TENSOR_PCT:
        findings.say("feed")
    # Doubles are left out: the advice is to use narrower types.
    elif tensor_counters and busiest != "fp64" and category_of(str(findings.launch["kernel"])) in _MATMUL_CATEGORIES:
        findings.say("use-tensor")


# ---------------------------------------------------------------- latency


def _latency_causes(findings: _Findings) -> None:
    """Note why neither compute nor memory is busy: a small grid, else accesses, occupancy and stalls."""
    if findings["waves"] < 1:
        findings.say("small-grid")
        return
    _memory_access(findings)
    _low_occupancy(findings)
    _warp_stalls(findings)


def _last_wave(findings: _Findings) -> None:
    """Note how much of the SMs' time the last wave of blocks, which fills only some SMs, leaves empty."""
    waves = findings["waves"]
    if not waves > 1:  # also if it was not collected
        return
    # A kernel of 1.6 waves takes the time of 2, of which 20% are empty; but what it used of the GPU was not empty.
    unused = 1 - max(findings["sm_pct"], findings["memory_pct"]) / 100
    empty = round(min(1 - waves / math.ceil(waves), unused), 3)  # rounded: 1 - 0.8 is just below 0.2
    if empty >= _TAIL_SHARE:
        findings.say("tail", percent=100 * empty)


def _low_occupancy(findings: _Findings) -> None:
    """Note why few warps are resident: few fit on an SM, or fewer are there than fit."""
    fitting_pct = findings["theoretical_occupancy_pct"]
    if fitting_pct < _LOW_PCT:
        limits = [f"{name} {blocks:.0f}" for name, blocks in findings.limits().items()]
        findings.say("few-warps", fit=findings.cite("theoretical_occupancy_pct"), limits=", ".join(limits))
        limiter = findings.limiter()
        if limiter is not None:
            for name in limiter.split("+"):
                findings.say(name)
    elif fitting_pct - findings["occupancy_pct"] >= _UNEVEN_POINTS:
        findings.say("uneven")
    elif not findings.has("occupancy_pct"):
        findings.say("no-occupancy")


def _warp_stalls(findings: _Findings) -> None:
    """Note the two largest reasons why warps stall, unless the schedulers issue in most cycles anyway."""
    if findings["issue_pct"] >= _ISSUES_WELL_PCT:
        findings.say("issuing")
        return
    shares, source = findings.stalls()
    if not shares:
        findings.say("no-stalls")
        return
    # A warp in one of these two states issued, or could have.
    stalls = [stall for stall in shares if stall.reason not in ("selected", "not_selected")]
    stalls.sort(key=shares.__getitem__, reverse=True)
    for stall in stalls[:2]:
        if shares[stall] < _TOP_STALL_SHARE:
            continue
        if source == "samples":
            cited = f"{findings.metrics[stall.sampled]:,} samples ({stall.sampled})"
        else:
            cited = findings.cite(f"stall_{stall.reason}", noun="warps an issue")
        findings.say("stall", percent=100 * shares[stall], reason=stall.reason, cited=cited, meaning=stall.meaning)
        if stall.next_step:
            findings.advise(f"{stall.reason}: {stall.next_step}")
