"""Advice on a bottleneck: one sentence for each cause, and what the card, the program and the shapes add."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from nsightkit import hardware
from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.verdict.finding import Finding
from nsightkit.analysis.verdict.rules import CHANGE_OF, LEAST_SHARE, share_by_shape, share_of_rate
from nsightkit.errors import UsageError
from nsightkit.text import matching, share_text, short_name
from nsightkit.trace.model import Trace

#: Commands that record more, by what is missing.
_CAPTURE = {
    "nsys": "nsightkit capture nsys -o again -- COMMAND",
    "nodes": "nsightkit capture nsys --cuda-graph-trace=node -o nodes -- COMMAND",
    "torch": "nsightkit capture torch -o again -- COMMAND",
    "shapes": "nsightkit capture torch --record-shapes -o shapes -- COMMAND",
    "ncu": "nsightkit capture ncu --launch-count 20 -o kernels -- COMMAND",
}
#: Kernels that reach this share of the datasheet's rate are as fast as such kernels get.
_GOOD_RATE = 0.8
#: A program is compiled if compiled regions take this part of its time, or their kernels this part of the kernels'.
_COMPILED_SHARE = 0.05
#: A change that saves so many times the time of the cause that it removes also shortens the time of other causes.
_MORE_THAN_ITS_OWN = 1.2
#: Ranges and kernels that a compiler made.
_COMPILED = re.compile(r"^triton_|Torch-Compiled Region|CompiledFxGraph|inductor")
_ALLOCATE_ONCE = "allocate once and use the memory again (PyTorch: no empty_cache() in the loop)"
_ALLOCATES = re.compile(r"\b(cuda|hip|cu)\w*(Malloc|Free|Alloc)")
_GRAPH_LAUNCH = re.compile("GraphLaunch")
_PINNED = "copy from or into pinned memory without waiting (PyTorch: pin_memory=True, non_blocking=True)"
#: Large copies to or from the host that are slower than this use pageable memory: PCIe 3 moves 12 GB/s.
_PAGEABLE_GB_PER_S = 6.0
_LARGE_COPY_BYTES = 1_000_000
#: Advice where copies or collectives fill the time, but running them beside other work would gain little.
_SEND_LESS = {
    "memory-transfer": "copy less: keep on the device what fits there, or send narrower types",
    "communication": "send less: narrower types, rarer reductions",
}
#: Names of kernels that multiply in FP32 without tensor cores, and of kernels that multiply FP32 tensors on any cores.
_WITHOUT_TENSOR_CORES = re.compile(r"(?<!tf32_)(?<!tf32)sgemm|scudnn|simt|f32f32_f32f32", re.IGNORECASE)
_FP32_INPUTS = re.compile(r"sgemm|scudnn|simt|tf32|tensorop_s1688|f32f32_f32f32|fmha_cutlass\w*_f32", re.IGNORECASE)
#: Matmuls in bf16 or fp16 with their recorded shapes, such as "aten::mm 512x768 768x3137 bf16": the groups are the last
#: extents of both matrices, K and N. Names of kernels tell no sizes: without tensor cores they end in align1 always.
_MATMUL = re.compile(r"^aten::(?:add|b|badd)?mm\b.* (?:\d+x)*(\d+) (?:\d+x)*(\d+) (?:fp16|bf16)$")
#: Names of kernels that convert between the layouts NCHW and NHWC.
_LAYOUT = re.compile(r"n[ch]\w*to_?n[hc]\w*|AddPadding", re.IGNORECASE)
#: Kernels that take less of the kernel time than this are not worth advice.
_LEAST_KERNEL_SHARE = 0.1
#: How to use bf16 and fp16, the preferred one first.
_HALF_PRECISION = {"bf16": "autocast to BF16", "fp16": "autocast to FP16 with a gradient scaler"}
#: Compute capabilities with which NVIDIA's tensor cores multiply in all of these, for cards that are not listed.
_ALL_PRECISIONS = re.compile(r"([89]|1\d)\.\d")
#: The launch of a kernel: how many blocks, and how many threads each of them has.
_GRID = ["grid_x", "grid_y", "grid_z"]
_BLOCK = ["block_x", "block_y", "block_z"]
#: The multiprocessors of a card that is not listed: few, as a small card may have no more.
_SMALL_CARD_MULTIPROCESSORS = 16
_WARP_THREADS = 32
_FEW_BLOCKS = (
    "launches with so few blocks that half of the multiprocessors or more stand idle: split the work into more blocks, "
    "or do more per launch"
)
_BELOW_WARP = "blocks with fewer threads than a warp has (32): use blocks of 128 threads or more"
_AMD = re.compile(r"\bamd\b|instinct|\bmi\d|gfx", re.IGNORECASE)


def next_steps(finding: Finding) -> Iterator[str]:
    """Say what to change, the largest predicted gain first.

    Parameters
    ----------
    finding : Finding

    Yields
    ------
    str
        One piece of advice; a change with a prediction ends in its name and gain in brackets.
    """
    decision = finding.decision
    if finding.name == "not-enough-data":
        yield from _more_parallelism(finding)
        yield _record_more(finding)
        return
    if finding.name in ("compute-bound", "memory-bound"):
        yield from _more_parallelism(finding)
        yield from _faster_kernels(finding)
        return
    # No gain was predicted for the answer: its advice comes first.
    if decision.change is None:
        if finding.replay.refused is None and finding.name in _SEND_LESS:
            yield _SEND_LESS[finding.name]
            return
        yield _advice(finding, finding.name)
    cause_of = {change: slug for slug, change in CHANGE_OF.items()}
    for row in finding.changes:  # the largest gain first
        change = row["change"]
        saved = finding.replay.saved(change)
        if change in cause_of and saved >= LEAST_SHARE:
            slug = cause_of[change]
            gain = f"{change}, predicted {row['speedup']:.2f}x faster"
            if saved > _MORE_THAN_ITS_OWN * finding.account.share(slug):
                gain += "; it shortens other waits, too"
            yield f"{_advice(finding, slug)} ({gain})"


def again(trace: Trace) -> str:
    """Give the command that captures such a trace again.

    Parameters
    ----------
    trace : Trace
    """
    return _CAPTURE["torch" if "torch" in trace.meta.tool.lower() else "nsys"]


def _advice(finding: Finding, slug: str) -> str:
    """Choose the sentence of advice that fits the cause `slug` in this program."""
    advice = CAUSES[slug].advice
    if slug == "memory-transfer" and _is_pageable(finding):
        return _PINNED
    if slug == "unknown":
        if not finding.account.trace.recorded("calls"):
            return f"record the CPU side, the calls that launch the GPU's work first of all: {_CAPTURE['nsys']}"
        return f"{advice}: {_CAPTURE['nsys']}"
    if slug == "cpu-work":
        return _cpu_work_advice(finding) or advice
    if slug == "launch-overhead":
        return _launch_advice(finding) or advice
    return advice


def _cpu_work_advice(finding: Finding) -> str:
    """Advise on the CPU work that costs most; empty if it has no name, or nothing special to be said."""
    if finding.name == "cpu-work":
        # It is the bottleneck: its names are at hand, the longest first.
        if finding.named.empty:
            return ""
        kind, name = finding.named.loc[0, ["kind", "name"]]
        if finding.is_step(name):
            return "put NVTX or record_function ranges around the parts of a step to find out what this is"
        if kind == "call" and _ALLOCATES.search(str(name)):
            return _ALLOCATE_ONCE
        return ""
    # It is not: the replay names the work that it could take away, the longest or the largest gain first.
    longest = next(iter(finding.replay.work), "")
    if _ALLOCATES.search(longest):
        return _ALLOCATE_ONCE
    for row in finding.changes:
        if row["change"].startswith("no-cpu-work:"):
            _, _, name = row["change"].partition(":")
            return f"shorten this CPU work, or move it off the thread that launches: {short_name(name)}"
    return ""


def _launch_advice(finding: Finding) -> str:
    """Advise on launches in a program that is compiled, or replays graphs, already; empty for others."""
    trace = finding.account.trace
    if trace.size("graphs") or matching(trace.whole.table("calls", ["name"])["name"], _GRAPH_LAUNCH).any():
        return "the program replays graphs already: put what is still launched one by one into them"
    regions = steps.summary(trace)["regions"]
    # More than one compiled region per step: NA in all steps sums to 0.
    if regions.sum() > len(regions):
        entered = f"a step enters {regions.mean():.0f} compiled regions"
        return f"{entered}: look for graph breaks (TORCH_LOGS=graph_breaks), then use mode='reduce-overhead'"
    if _is_compiled(finding):
        return "the program is compiled already: capture it into graphs (mode='reduce-overhead')"
    return ""


def _is_pageable(finding: Finding) -> bool:
    """Whether most of the time of exposed copies is pageable: by the recorded kind of host memory, else by the rate."""
    moments = finding.account.moments("memory-transfer")
    # A gap whose cause a copy decided is of kind "copy", too, but has no row.
    rows = moments.loc[(moments["kind"] == "copy") & (moments["row"] >= 0), "row"]
    columns = ["kind", "src_kind", "dst_kind", "bytes", "duration_ns"]
    copies = finding.account.trace.table("memops", columns).loc[rows]
    host_kind = copies["src_kind"].astype(str).where(copies["kind"] == "HtoD", copies["dst_kind"].astype(str))
    is_host_copy = copies["kind"].isin(["HtoD", "DtoH"])
    # Bytes per ns are GB/s.
    is_slow = (copies["bytes"] >= _LARGE_COPY_BYTES) & (copies["bytes"] < _PAGEABLE_GB_PER_S * copies["duration_ns"])
    is_pageable = is_host_copy & ((host_kind == "pageable") | ((host_kind != "pinned") & is_slow))
    return bool(2 * copies.loc[is_pageable, "duration_ns"].sum() > copies["duration_ns"].sum())


# ---------------------------------------------------------------- kernels that fill the time


def _record_more(finding: Finding) -> str:
    """Advise on what to record to learn what bounds the kernels; first of all, those inside graphs."""
    trace = finding.account.trace
    graphs_ns = trace.table("graphs", ["duration_ns"])["duration_ns"].sum()
    if 2 * graphs_ns >= finding.time_ns:
        return f"record the kernels inside the graphs: {_CAPTURE['nodes']}"
    return f"{CAUSES['not-enough-data'].advice}: {_CAPTURE['ncu']}"


def _more_parallelism(finding: Finding) -> Iterator[str]:
    """Advise where most of the kernels' time leaves the card idle: too few blocks, or blocks smaller than a warp."""
    account = finding.account
    moments = account.moments(finding.name)
    rows = moments.loc[moments["kind"] == "kernel", "row"]
    kernels = account.trace.table("kernels", ["duration_ns", *_GRID, *_BLOCK]).loc[rows]
    # Both are 0 where the trace does not record how kernels were launched.
    blocks = kernels[_GRID].prod(axis=1)
    threads = kernels[_BLOCK].prod(axis=1)
    card = _card(finding)
    multiprocessors = _SMALL_CARD_MULTIPROCESSORS if card is None else card.multiprocessors
    # Half, since persistent kernels leave some multiprocessors out on purpose, where their clusters do not fit.
    has_few_blocks = (blocks > 0) & (2 * blocks <= multiprocessors)
    is_below_warp = (threads > 0) & (threads < _WARP_THREADS)
    kernels_ns = kernels["duration_ns"].sum()
    for is_wasteful, advice in ((has_few_blocks, _FEW_BLOCKS), (is_below_warp, _BELOW_WARP)):
        wasteful_ns = kernels.loc[is_wasteful, "duration_ns"].sum()
        if 2 * wasteful_ns > kernels_ns:
            yield f"{share_text(wasteful_ns / kernels_ns)} of these kernels' time is in {advice}"


def _faster_kernels(finding: Finding) -> Iterator[str]:
    """Advise on kernels that fill the time: types, sizes, layouts, fusion, and then what bounds them."""
    account = finding.account
    shaped = list(sol.operator_groups(account.trace))  # empty if no shapes were recorded
    kernels_ns = _kernel_time_ns(finding)
    yield from _precision_advice(finding)
    if _has_odd_sizes(shaped):
        yield "most of the time in these matmuls has sizes that are not multiples of 8: pad them"
    layout_ns = _kernel_time_ns(finding, pattern=_LAYOUT)
    if layout_ns > _LEAST_KERNEL_SHARE * kernels_ns:
        share = share_text(layout_ns / kernels_ns)
        yield f"{share} of the kernel time converts layouts: keep tensors in channels_last (PyTorch: memory_format)"
    if _kernel_time_ns(finding, "softmax") > _LEAST_KERNEL_SHARE * kernels_ns:
        fused = "use a fused attention that never writes its scores (PyTorch: scaled_dot_product_attention)"
        yield f"if these softmaxes belong to attention, {fused}"
    reached = share_of_rate(finding.operators)
    if reached is not None and reached >= _GOOD_RATE:
        yield (
            f"nothing cheap is left: these operators reach {share_text(reached)} of the datasheet's rate, and the "
            "largest matmuls reach about 80%"
        )
    elif finding.name == "memory-bound" and account.decodes:
        yield "decode more sequences at once, which share each reading of the weights; or use narrower weights"
    else:
        yield CAUSES[finding.name].advice
    if shaped and _card(finding) is None:
        yield "for a comparison with the card's peaks, name the card or its nearest in nsightkit peaks: --gpu NAME"
    elif share_by_shape(account, finding.name) < 0.5 and not account.decodes:
        if "torch" in account.trace.meta.tool.lower():
            yield f"record shapes, to learn how far the operators are from their bound: {_CAPTURE['shapes']}"
        else:
            yield _record_more(finding)


def _kernel_time_ns(finding: Finding, *categories: str, pattern: re.Pattern[str] | None = None) -> int:
    """Add up the time of the kernels of some categories (none: of all) whose names match a pattern (None: any)."""
    kernels = finding.account.kernels
    if categories:
        kernels = kernels[kernels["category"].isin(categories)]
    if pattern is not None:
        kernels = kernels[matching(kernels["name"], pattern)]
    return int(kernels["duration_ns"].sum())


def _has_odd_sizes(shaped: list[sol.Group]) -> bool:
    """Whether most of the time of matmuls with recorded shapes has sizes that are not multiples of 8.

    GEMMs in bf16 and fp16 load 16 bytes, 8 elements, at a time: other sizes need padding or a slower kernel.
    """
    odd_ns = 0
    matmuls_ns = 0
    for group in shaped:
        sizes = _MATMUL.match(group.operation.name)
        if sizes is not None:
            matmuls_ns += group.time_ns
            if any(int(size) % 8 for size in sizes.groups()):
                odd_ns += group.time_ns
    return 2 * odd_ns > matmuls_ns


def _precision_advice(finding: Finding) -> Iterator[str]:
    """Advise TF32, bf16 or fp16, as the card supports them, where matmuls of FP32 tensors take much of the time."""
    kernels_ns = _kernel_time_ns(finding)
    products_ns = _kernel_time_ns(finding, "GEMM", "convolution")
    without_tensor_cores_ns = _kernel_time_ns(finding, "GEMM", "convolution", pattern=_WITHOUT_TENSOR_CORES)
    fp32_inputs_ns = _kernel_time_ns(finding, "GEMM", "convolution", "attention", pattern=_FP32_INPUTS)
    # TF32 speeds up products only: it helps if most run without tensor cores and take enough of all kernels' time.
    avoids_tensor_cores = 2 * without_tensor_cores_ns > products_ns
    ways = []
    if (
        avoids_tensor_cores
        and without_tensor_cores_ns > _LEAST_KERNEL_SHARE * kernels_ns
        and _supports(finding, "tf32")
    ):
        ways.append("allow TF32")
    # Half precision changes the whole program: worth it where FP32 products take most of the kernel time.
    half_precision = [way for precision, way in _HALF_PRECISION.items() if _supports(finding, precision)]
    if 2 * fp32_inputs_ns > kernels_ns:
        ways += half_precision[:1]
    if ways:
        where = "on FP32 tensors"
        if avoids_tensor_cores:
            where = "in FP32 without tensor cores"
        yield f"matmuls and attention run {where}: {', or '.join(ways)}"


def _card(finding: Finding) -> hardware.Gpu | None:
    """Find the card in the hardware table; None where it is not listed."""
    account = finding.account
    try:
        return hardware.find(account.gpu or sol.gpu_of(account.trace))
    except UsageError:
        return None


def _supports(finding: Finding, precision: str) -> bool:
    """Whether the card's tensor cores multiply in a precision; a card of which nothing is known does not."""
    card = _card(finding)
    if card is not None:
        return card.supports(precision)
    # An NVIDIA card that is not listed, but whose compute capability was recorded.
    gpus = finding.account.trace.meta.gpus
    # AMD's numbers look alike: a gfx942 is recorded as 9.4.
    if not gpus or not gpus[0].name or _AMD.search(gpus[0].name):
        return False
    return _ALL_PRECISIONS.fullmatch(gpus[0].compute_capability or "") is not None


def _is_compiled(finding: Finding) -> bool:
    """Whether compiled regions, or the kernels of a compiler, take enough of the time to call the program compiled."""
    trace = finding.account.trace
    shares = [_kernel_time_ns(finding, pattern=_COMPILED) / max(_kernel_time_ns(finding), 1)]
    for table in ("ranges", "ops"):
        events = trace.table(table, ["name", "duration_ns"])
        compiled_ns = events.loc[matching(events["name"], _COMPILED), "duration_ns"].sum()
        shares.append(compiled_ns / np.ptp(finding.account.edges))  # of the length of the judged time
    return max(shares) > _COMPILED_SHARE
