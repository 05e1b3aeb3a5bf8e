"""What to do about a bottleneck: one sentence for each cause, and what the card, the program and the shapes add."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from nsightkit import hardware
from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.core.text import share_text
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.verdict.finding import Finding
from nsightkit.analysis.verdict.rules import CHANGE_OF, by_shape, rate
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace

__all__ = ["CAPTURE", "next_steps"]

CAPTURE = {
    "nsys": "nsightkit capture nsys -o more -- COMMAND",
    "nodes": "nsightkit capture nsys --cuda-graph-trace=node -o nodes -- COMMAND",
    "torch": "nsightkit capture torch -o more -- COMMAND",
    "shapes": "nsightkit capture torch --record-shapes -o shapes -- COMMAND",
    "ncu": "nsightkit capture ncu --launch-count 20 -o kernels -- COMMAND",
}
#: Kernels that reach this share of the datasheet's rate are as fast as such kernels get.
_GOOD = 0.8
#: A program is compiled if compiled regions take this part of its time, or their kernels this part of the kernels'.
_COMPILES = 0.05
_OF_TORCH = re.compile(r"\bat::|\bc10::|^triton_")
_BACKWARD = re.compile(r"(?i)backward|autograd|optimizer")
#: Ranges and kernels that a compiler made.
_COMPILED = re.compile(r"^triton_|Torch-Compiled Region|CompiledFxGraph|inductor")
_ALLOCATES = re.compile(r"Malloc|Free|Alloc")
_GRAPH_LAUNCH = re.compile("GraphLaunch")

_PINNED = "copy from pinned memory without waiting (PyTorch: pin_memory=True, non_blocking=True)"
#: Advice by what most of the exposed copies are.
_ON_COPY = {
    "HtoD": CAUSES["memory-transfer"].advice,
    "DtoH": "read back less, or into pinned memory on a separate stream",
    "DtoD": "avoid clones and changes of layout between tensors of one device",
    "PtoP": "overlap copies between devices with kernels, or send less",
    "unified": "prefetch managed memory before it is needed (cudaMemPrefetchAsync), or copy it as a whole",
}
#: Large copies from the host that are slower than this come from pageable memory: PCIe 3 moves 12 GB/s.
_PAGEABLE_GB_PER_S, _LARGE_COPY = 6.0, 1 << 20
#: Where copies or collectives fill the time, and running them beside other work would gain little.
_LESS = {
    "memory-transfer": "copy less: keep on the device what fits there, or send narrower types",
    "communication": "send less: narrower types, rarer reductions",
}
#: Products in FP32 on ordinary cores, and products and attention of FP32 tensors on any.
_FP32_CORES = re.compile(r"(?<!tf32_)(?<!tf32)sgemm|scudnn|simt|f32f32_f32f32", re.IGNORECASE)
_FP32_TENSORS = re.compile(r"sgemm|scudnn|simt|tf32|tensorop_s1688|f32f32_f32f32|fmha_cutlass\w*_f32", re.IGNORECASE)
#: Tensor-core kernels for odd sizes; kernels of ordinary cores (simt) have such names for all sizes.
_UNALIGNED = re.compile(r"^(?!.*simt).*align[12](?!\d)", re.IGNORECASE)
_LAYOUT = re.compile(r"n[ch]\w*to_?n[hc]\w*|AddPadding", re.IGNORECASE)
#: Kernels that hold less of the kernel time than this are not worth advice.
_WORTH = 0.1
_HALF = {"bf16": "autocast to BF16", "fp16": "autocast to FP16 with a gradient scaler"}
#: The compute capability from which tensor cores multiply in them, for cards that are not listed.
_SINCE = {"tf32": 8.0, "bf16": 8.0, "fp16": 7.0}
#: Cards of such a capability without tensor cores, and cards of another maker's without TF32.
_WITHOUT_TENSOR_CORES, _WITHOUT_TF32 = re.compile(r"GTX 16|MX\d"), re.compile(r"(?i)\bamd\b|instinct|\bmi\d|gfx")


def next_steps(finding: Finding) -> Iterator[str]:
    """Say what to change first, and what that would gain.

    Parameters
    ----------
    finding : Finding
    """
    decision = finding.decision
    if finding.name == "not-enough-data":
        yield _record_more(finding)
        return
    if finding.name in ("compute-bound", "memory-bound"):
        yield from _faster_kernels(finding)
        return
    if decision.change is None and finding.replay.refused is None and finding.name in _LESS:
        yield _LESS[finding.name]
        return
    yield _advice(finding, finding.name) + _gain(finding, decision.change)
    causes = {change: slug for slug, change in CHANGE_OF.items()}
    for row in finding.other_changes():
        if row["change"] in causes:
            second = causes[row["change"]]
            yield f"then {second}: {_advice(finding, second)}{_gain(finding, row['change'])}"
            return


def _gain(finding: Finding, change: str | None) -> str:
    if change is None or finding.replay.refused is not None:
        return ""
    speedup = finding.replay.row(change)["speedup"]
    return f": predicted {speedup:.2f}x" if speedup else ""


def _advice(finding: Finding, slug: str) -> str:
    """One sentence that fits a cause, this program and this card."""
    trace = finding.account.trace
    if slug == "memory-transfer":
        return _on_copies(finding)
    if slug == "unknown":
        return _on_the_unknown(trace)
    if slug == "cpu-work":
        return _on_cpu_work(finding)
    if slug == "launch-overhead":
        if _has_graphs(trace):
            return "the program replays graphs already: put what is still launched one by one into them"
        if _is_compiled(finding):
            return "the program is compiled already: capture it into graphs (mode='reduce-overhead')"
        if not _is_torch(trace):
            return "launch less: fuse kernels, or capture them into CUDA graphs"
    if slug == "input-pipeline" and not _is_torch(trace):
        return "have the next data ready in time: read ahead on another thread while the GPU works"
    if slug == "communication" and not _trains(trace):
        return "overlap collectives with other kernels, or send less: narrower types, fewer of them"
    return CAUSES[slug].advice


def _on_the_unknown(trace: Trace) -> str:
    """What to record so that the idle time gets a cause, in one command."""
    if not trace.recorded("calls"):
        return f"record the CPU side, the calls that launch the GPU's work first of all: {CAPTURE['nsys']}"
    if not trace.whole.size("os_calls"):
        return f"record OS calls, and name what the launching thread does with NVTX ranges: {CAPTURE['nsys']}"
    sampling = "nsightkit capture nsys --sample=process-tree -o more -- COMMAND"
    return f"name what the launching thread does with NVTX ranges, or sample the CPU: {sampling}"


def _on_copies(finding: Finding) -> str:
    copies = finding.account.exposed_copies
    if copies.empty:
        return _PINNED
    lasting_ns = copies["end_ns"] - copies["start_ns"]
    kinds = copies["kind"].astype(str).str.partition(" ")[0]
    kind = str(lasting_ns.groupby(kinds).sum().idxmax())
    if kind != "HtoD":
        return _ON_COPY.get(kind, _ON_COPY["HtoD"])
    sources = lasting_ns[kinds == kind].groupby(copies["src_kind"].astype(str)).sum()
    source = str(sources.idxmax())
    large = (kinds == kind) & (copies["bytes"] >= _LARGE_COPY)
    gb_per_s = copies.loc[large, "bytes"].sum() / max(lasting_ns[large].sum(), 1)
    if source == "pageable" or (source != "pinned" and 0 < gb_per_s < _PAGEABLE_GB_PER_S):
        return _PINNED
    return _ON_COPY["HtoD"]


def _on_cpu_work(finding: Finding) -> str:
    if finding.named.empty:
        return CAUSES["cpu-work"].advice
    is_torch = _is_torch(finding.account.trace)
    kind, name = finding.named.loc[0, ["kind", "name"]]
    if finding.is_step(name):
        how = "NVTX ranges around the parts of a step"
        if is_torch:
            how = "NVTX or record_function ranges around the parts of a step, or profile(with_stack=True)"
        return f"find out what this is: {how}; then move it off the thread that launches"
    if kind == "call" and _ALLOCATES.search(str(name)):
        if is_torch:
            how = "no empty_cache() in the loop, and no sizes that outgrow the last ones"
            return f"let PyTorch's caching allocator keep the memory: {how}"
        return "allocate once and use the memory again, or take it from a pool (cudaMallocAsync)"
    return CAUSES["cpu-work"].advice


# ---------------------------------------------------------------- kernels that fill the time


def _record_more(finding: Finding) -> str:
    trace = finding.account.trace
    graphs_ns = trace.table("graphs", ["duration_ns"])["duration_ns"].sum()
    if 2 * graphs_ns >= finding.time_ns:
        return f"record the kernels inside the graphs: {CAPTURE['nodes']}"
    return f"{CAUSES['not-enough-data'].advice}: {CAPTURE['ncu']}"


def _faster_kernels(finding: Finding) -> Iterator[str]:
    trace = finding.account.trace
    yield from _precision(finding)
    products = _products(trace)
    if _has_odd_sizes(finding, products):
        yield "most of the time in these matmuls has sizes that are not multiples of 8: pad them"
    kernels_ns = _time_ns(finding)
    layout_ns = _time_ns(finding, pattern=_LAYOUT)
    if layout_ns > _WORTH * kernels_ns:
        share = share_text(layout_ns / kernels_ns)
        yield f"{share} of the kernel time converts layouts: keep tensors in channels_last (PyTorch: memory_format)"
    if _time_ns(finding, "softmax") > _WORTH * kernels_ns:
        fused = "use a fused attention that never writes its scores (PyTorch: scaled_dot_product_attention)"
        yield f"if these softmaxes belong to attention, {fused}"
    reached = rate(finding.operators)
    if reached is not None and reached >= _GOOD:
        yield (
            f"nothing cheap is left: these operators reach {share_text(reached)} of the datasheet's rate, and the "
            "largest matmuls reach about 80 %"
        )
    else:
        yield _on_kernels(finding)
    if reached is None and not _is_torch(trace):
        yield _record_more(finding)
    elif reached is None and products and _card(finding) is None:
        yield "the card is not listed: name the nearest one (nsightkit peaks) with --gpu NAME"
    elif reached is None and not products and not (finding.name == "memory-bound" and finding.account.decodes):
        yield f"record shapes, to learn how far the operators are from their bound: {CAPTURE['shapes']}"
    elif by_shape(finding.account, finding.name) < 0.5:
        yield "most of these kernels have no recorded shape, so their limit is unknown"


def _on_kernels(finding: Finding) -> str:
    if finding.name == "memory-bound" and finding.account.decodes:
        return "decode more sequences at once, which share each reading of the weights; or use narrower weights"
    if finding.name == "memory-bound" and _is_compiled(finding):
        return "the program is compiled already: use narrower types, or larger batches"
    return CAUSES[finding.name].advice


def _time_ns(finding: Finding, *categories: str, pattern: re.Pattern[str] | None = None) -> int:
    """Time of the kernels of some categories, and whose names a pattern finds."""
    kernels = finding.account.kernels
    chosen = np.ones(len(kernels), bool)
    if categories:
        chosen &= kernels["category"].isin(categories).to_numpy()
    if pattern is not None:
        chosen &= matching(kernels["name"], pattern)
    lasting_ns = (kernels["end_ns"] - kernels["start_ns"]).to_numpy()
    return int(lasting_ns[chosen].sum())


def _precision(finding: Finding) -> Iterator[str]:
    """Narrower types that the card multiplies in, where most of the time says that they would help."""
    supported = _supported(finding)
    is_torch = _is_torch(finding.account.trace)
    kernels_ns = _time_ns(finding)
    products_ns = _time_ns(finding, "GEMM", "convolution")
    on_cores_ns = _time_ns(finding, "GEMM", "convolution", pattern=_FP32_CORES)
    fp32_ns = _time_ns(finding, "GEMM", "convolution", "attention", pattern=_FP32_TENSORS)
    ways = []
    if 2 * on_cores_ns > products_ns and on_cores_ns > _WORTH * kernels_ns and "tf32" in supported:
        ways.append("allow TF32" if is_torch else "multiply in TF32")
    half = next((precision for precision in _HALF if precision in supported), None)
    if 2 * fp32_ns > kernels_ns and half is not None:
        ways.append(_HALF[half] if is_torch else f"multiply in {half.upper()}")
    if ways:
        where = "in FP32 without tensor cores" if 2 * on_cores_ns > products_ns else "on FP32 tensors"
        yield f"matmuls and attention run {where}: {', or '.join(ways)}"


def _products(trace: Trace) -> dict[str, int]:
    """Time of each operator with recorded shapes, by its name and shapes."""
    times: dict[str, int] = {}
    for group in sol.groups(trace):
        times[group.operation.name] = times.get(group.operation.name, 0) + group.time_ns
    return times


def _has_odd_sizes(finding: Finding, products: dict[str, int]) -> bool:
    """Whether most GEMM time has sizes that are not multiples of 8."""
    if not products:
        products_ns = _time_ns(finding, "GEMM")
        return 2 * _time_ns(finding, "GEMM", pattern=_UNALIGNED) > products_ns > 0
    odd_ns = whole_ns = 0
    for name, time_ns in products.items():
        operator, *shapes, precision = name.split()
        if operator in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm") and precision in ("fp16", "bf16"):
            left, right = shapes[-2:]
            widths = [int(left.rpartition("x")[2]), int(right.rpartition("x")[2])]
            whole_ns += time_ns
            odd_ns += time_ns * any(width % 8 for width in widths)
    return 2 * odd_ns > whole_ns > 0


def _card(finding: Finding) -> hardware.Gpu | None:
    """The card, where it is listed."""
    names = [finding.account.gpu, *(gpu.name for gpu in finding.account.trace.meta.gpus)]
    for name in names:
        if name:
            try:
                return hardware.find(name)
            except UsageError:
                return None
    return None


def _supported(finding: Finding) -> list[str]:
    """The precisions of this card's tensor cores; none for an unknown card."""
    card = _card(finding)
    if card is not None:
        return [precision for precision in _SINCE if card.supports(precision)]
    for gpu in finding.account.trace.meta.gpus:
        name = gpu.name or ""
        if gpu.compute_capability and not finding.account.gpu and not _WITHOUT_TENSOR_CORES.search(name):
            known = [precision for precision, since in _SINCE.items() if float(gpu.compute_capability) >= since]
            return [precision for precision in known if precision != "tf32" or not _WITHOUT_TF32.search(name)]
    return []


# ---------------------------------------------------------------- what the program is


def _has(trace: Trace, table: str, pattern: re.Pattern[str]) -> bool:
    return bool(matching(trace.table(table, ["name"])["name"], pattern).any())


def _is_torch(trace: Trace) -> bool:
    """Whether PyTorch launched the GPU's work."""
    return bool(trace.whole.size("ops")) or _has(trace.whole, "kernels", _OF_TORCH)


def _trains(trace: Trace) -> bool:
    """Whether a backward pass was recorded."""
    return any(_has(trace.whole, table, _BACKWARD) for table in ("ranges", "ops", "kernels"))


def _has_graphs(trace: Trace) -> bool:
    """Whether the program replays CUDA graphs."""
    return bool(trace.size("graphs")) or _has(trace.whole, "calls", _GRAPH_LAUNCH)


def _is_compiled(finding: Finding) -> bool:
    """Whether a compiler made a part of the program that counts."""
    account = finding.account
    if _time_ns(finding, pattern=_COMPILED) > _COMPILES * _time_ns(finding):
        return True
    compiled_ns = 0.0
    for table in ("ranges", "ops"):
        events = account.trace.table(table, ["name", "duration_ns"])
        compiled_ns = max(compiled_ns, events.loc[matching(events["name"], _COMPILED), "duration_ns"].sum())
    return bool(compiled_ns > _COMPILES * (account.end - account.begin))
