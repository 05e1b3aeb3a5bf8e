"""Which limiter? What Nsight Compute's counters say about a kernel, and what to try.

The first cut is NVIDIA's own rule (``SpeedOfLight.py`` of Nsight Compute). Below it, each class has its questions;
every answer (``counters.toml``) cites the value it rests on, and a question whose metric the report lacks ends in the
section to collect.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from nsightkit.analysis.core.categories import category_of
from nsightkit.analysis.core.names import compiled, matching
from nsightkit.errors import UsageError
from nsightkit.safe import Json
from nsightkit.trace import ncu_metrics
from nsightkit.trace.ncu import Report

__all__ = ["CLASSES", "COLUMNS", "classify", "stalls", "summary"]

#: What a kernel can be.
CLASSES = ("compute-bound", "memory-bound", "balanced", "latency-bound", "not-enough-data")
_MEASURED = ["kernel", "time_ns", "sm_pct", "memory_pct", "dram_pct", "occupancy_pct"]
#: Columns of :func:`summary`.
COLUMNS = (*_MEASURED, "occupancy_limiter", "classification", "evidence", "next_steps")
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

_LEVELS = ("dram_pct", "l2_pct", "l1_pct")
_PIPES = ("fma", "alu", "fp64", "xu", "lsu")
#: Categories of kernels that are, contain or could be a matmul.
_PRODUCTS = ("GEMM", "convolution", "attention", "Triton-fused", "other")
_METRICS = {metric.name: metric for metric in ncu_metrics.METRICS}


#: What each question answers: ``text``, ``advice`` and what it ``cites``.
_ANSWERS: dict[str, Json] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


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
        One of :data:`CLASSES`.
    """
    if not math.isfinite(sm_pct + memory_pct):
        return "not-enough-data"
    least, most = sorted((sm_pct, memory_pct))
    if most < _LOW:
        return "latency-bound"
    if most < _HIGH and most - least < _APART:
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
    for findings in _chosen(report, kernel, within):
        measured = findings.launch[_MEASURED].tolist()
        classification = _explain(findings)
        rows.append([*measured, findings.limiter(), classification, findings.evidence, findings.next_steps])
    frame = pd.DataFrame(rows, columns=pd.Index(COLUMNS))
    return frame.sort_values("time_ns", ascending=False, kind="stable", na_position="last", ignore_index=True)


def _chosen(report: Report, kernel: str | None, within: str | None) -> list[_Findings]:
    launches = report.launches
    if within is not None:
        names = launches["ranges"].explode().dropna().astype("category")
        is_inside = matching(names, compiled(within, "within"))
        launches = launches.loc[names.index[is_inside].unique()]
        if launches.empty:
            present = ", ".join(sorted(names.unique()))
            known = "the report has none: run ncu with --nvtx"
            if present:
                known = f"there are {present}"
            raise UsageError(f"no launch is inside a range that {within!r} finds; {known}")
    if kernel is not None:
        launches = launches[matching(launches["kernel"].astype("category"), compiled(kernel, "kernel"))]
    return [_Findings(report.launches.loc[row], report.metrics[row]) for row in launches.index.tolist()]


# ---------------------------------------------------------------- what is found


@dataclasses.dataclass
class _Findings:
    """One launch, with the evidence and the advice that it gave so far. What was not measured is NaN."""

    launch: pd.Series
    metrics: Mapping[str, object]
    evidence: list[str] = dataclasses.field(default_factory=list)
    next_steps: list[str] = dataclasses.field(default_factory=list)

    def __getitem__(self, name: str) -> float:
        return float(self.launch.get(name, math.nan))

    def has(self, name: str) -> bool:
        return math.isfinite(self[name])

    def cite(self, name: str, noun: str = "") -> str:
        """Give a value with NVIDIA's name for it, so that it can be found again in the report."""
        value = self[name]
        metric = _METRICS[name]
        reported = [candidate for candidate in metric.nvidia if candidate in self.metrics] or metric.nvidia
        text = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        if metric.unit == "%":
            text = f"{value:.1f}%"
        if noun:
            text += f" {noun}"
        return f"{text} ({reported[0]})"

    def limits(self) -> dict[str, float]:
        """Give how many blocks an SM can hold, by what limits them."""
        return {name: self[f"limit_{name}_blocks"] for name in LIMITS}

    def limiter(self) -> str | None:
        """Name the smallest of the four limits of how many blocks fit on an SM, equal ones joined with ``+``.

        None unless all are known. A block without shared memory is not limited by it where another limit is.
        """
        limits = self.limits()
        if not math.isfinite(sum(limits.values())):
            return None
        least = min(limits.values())
        names = [name for name, blocks in limits.items() if blocks == least]
        uses_shared = self["static_shared_bytes"] + self["dynamic_shared_bytes"] != 0
        if len(names) > 1 and "shared_mem" in names and not uses_shared:
            names.remove("shared_mem")
        return "+".join(names)

    def stalls(self) -> tuple[dict[ncu_metrics.Stall, float], str]:
        """Give what warps wait for as shares of their time, and whether it was counted or sampled."""
        values = {stall: self[f"stall_{stall.reason}"] for stall in ncu_metrics.STALLS}
        source = "ratio"
        if all(map(math.isnan, values.values())):
            source = "samples"
            for stall in values:
                samples = self.metrics.get(stall.sampled)
                values[stall] = float(samples) if isinstance(samples, (int, float)) else math.nan
        known = {stall: value for stall, value in values.items() if value >= 0}
        total = sum(known.values())
        return {stall: value / total for stall, value in known.items() if total}, source

    def say(self, answer: str, **values: object) -> None:
        """Note an answer of ``counters.toml``, with the values it rests on."""
        row: Json = {"text": "", "advice": "", "cites": {}} | _ANSWERS[answer]
        text = row["text"].format(**values)
        cited = [self.cite(name, noun) for name, noun in row["cites"].items() if self.has(name)]
        if cited:
            text += f": {', '.join(cited)}"
        if text:
            self.evidence.append(text)
        self.advise(row["advice"])

    def advise(self, advice: str) -> None:
        if advice and advice not in self.next_steps:
            self.next_steps.append(advice)


def _explain(findings: _Findings) -> str:
    """Say what bounds a launch; give its class."""
    classification = classify(findings["sm_pct"], findings["memory_pct"])
    if classification == "not-enough-data":
        missing = [_METRICS[name].nvidia[0] for name in ("sm_pct", "memory_pct") if not findings.has(name)]
        findings.say("lacking", metrics=" and ".join(missing))
        return classification
    findings.say("throughput", compute=findings.cite("sm_pct"), memory=findings.cite("memory_pct"))
    if classification == "latency-bound":
        _latency(findings)
    elif classification == "compute-bound":
        _compute(findings)
    elif classification == "memory-bound":
        _access(findings)  # wasted traffic first: it decides how busy the levels are
        _busiest_level(findings)
    else:
        findings.say("balanced")
        _access(findings)
        _waits(findings)
    _tail(findings)
    findings.next_steps.sort(key=lambda text: text.startswith("collect "))  # what to change comes first
    return classification


# ---------------------------------------------------------------- memory


def _busiest_level(findings: _Findings) -> None:
    """Which level of the memory is busy."""
    busy = findings.launch[list(_LEVELS)].astype(float)
    if busy.isna().all():
        findings.say("no-levels")
        return
    level = str(busy.idxmax())
    if level != "dram_pct":
        findings.say("not-dram")
        findings.say(level)
    elif findings[level] >= _HIGH:
        findings.say("dram-full")
    else:
        findings.say(level)


def _access(findings: _Findings) -> None:
    """How memory is accessed: coalescing, bank conflicts, spills."""
    tables = ("global_load_requests", "global_load_bytes_per_sector", "shared_wavefronts")
    if not any(map(findings.has, tables)):
        findings.say("no-tables")
        return
    for word in ("load", "store"):
        used = f"global_{word}_bytes_per_sector"
        sectors = f"global_{word}_sectors"
        requests = f"global_{word}_requests"
        if 0 < findings[used] < _USED_BYTES:
            findings.say("sectors", word=word, used=findings.cite(used, "bytes"))
        elif findings[sectors] > _WIDEST_REQUEST * findings[requests] > 0 and not findings.has(used):
            cited = f"{findings.cite(sectors, 'sectors')}, {findings.cite(requests, 'requests')}"
            findings.say("requests", word=word, sectors=findings[sectors] / findings[requests], cited=cited)
    share = findings["bank_conflicts"] / (findings["shared_wavefronts"] or math.nan)
    if share >= _CONFLICTS:
        findings.say("conflicts", percent=100 * share)
    if findings["local_loads"] > 0 or findings["local_stores"] > 0:
        findings.say("spills")


# ---------------------------------------------------------------- compute


def _compute(findings: _Findings) -> None:
    """Which pipe is busy."""
    # Over active cycles where measured; the basic set has pipes over elapsed cycles only. The two are not mixed.
    suffix = "_elapsed_pct"
    if findings.has("tensor_pct") or findings.has("fma_pct"):
        suffix = "_pct"
    pipes = {pipe: f"{pipe}{suffix}" for pipe in _PIPES if findings.has(f"{pipe}{suffix}")}
    tensors = [name for name in (f"tensor{suffix}", f"tensor_16bit{suffix}") if findings.has(name)]
    if not pipes and not tensors:
        findings.say("no-pipes")
        return
    tensor_pct = findings[tensors[0]] if tensors else math.nan
    if tensor_pct >= _LOW:
        findings.say("tensor", busy=findings.cite(tensors[0]))
        return
    if tensors:
        findings.say("tensor-idle", busy=findings.cite(tensors[0]))
    busiest = max(pipes, key=lambda pipe: findings[pipes[pipe]], default="")
    if busiest:
        findings.say(busiest, busy=findings.cite(pipes[busiest]))
    if tensor_pct >= _SOME:
        findings.say("feed")
    elif tensors and busiest != "fp64" and category_of(str(findings.launch["kernel"])) in _PRODUCTS:
        findings.say("use-tensor")


# ---------------------------------------------------------------- latency


def _latency(findings: _Findings) -> None:
    if findings["waves"] < 1:
        findings.say("small-grid")
        return
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
        findings.say("tail", percent=100 * idle)


def _occupancy(findings: _Findings) -> None:
    fit = findings["theoretical_occupancy_pct"]
    if fit < _LOW:
        limits = [f"{name} {blocks:.0f}" for name, blocks in findings.limits().items()]
        findings.say("few-warps", fit=findings.cite("theoretical_occupancy_pct"), limits=", ".join(limits))
        limiter = findings.limiter()
        if limiter is not None:
            for name in limiter.split("+"):
                findings.say(name)
    elif fit - findings["occupancy_pct"] >= _UNEVEN:
        findings.say("uneven")
    elif not findings.has("occupancy_pct"):
        findings.say("no-occupancy")


def _waits(findings: _Findings) -> None:
    if findings["issue_pct"] >= _ISSUES:
        findings.say("issuing")
        return
    shares, source = findings.stalls()
    if not shares:
        findings.say("no-stalls")
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
        findings.say("stall", percent=100 * shares[stall], reason=stall.reason, cited=cited, meaning=stall.meaning)
        if stall.next_step:
            findings.advise(f"{stall.reason}: {stall.next_step}")
