"""What to do about a bottleneck: one sentence for each cause, and what the card, the program and the shapes add."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nsightkit import hardware
from nsightkit.analysis.core.causes import CAUSES
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.core.text import share_text
from nsightkit.analysis.replay.schedule import ALLOCATES
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
_GRAPH_LAUNCH = re.compile("GraphLaunch")

#: Advice by what most of the exposed copies are.
_ON_COPY = {
    "HtoD from pageable": (
        "copy from pinned memory without waiting (PyTorch: non_blocking=True), so that kernels can run beside it"
    ),
    "HtoD": CAUSES["memory-transfer"].advice,
    "DtoH": "read back less, or into pinned memory on a stream of its own",
    "DtoD": "avoid clones and changes of layout between tensors of one device",
    "PtoP": "overlap copies between devices with kernels, or send less",
    "unified": "prefetch managed memory before it is needed (cudaMemPrefetchAsync), or copy it as a whole",
}
#: Where copies or collectives fill the time, and running them beside other work would gain next to nothing.
_LESS = {
    "memory-transfer": "copy less: keep on the device what fits there, or send narrower types",
    "communication": "send less: narrower types, rarer reductions",
}
#: Products in FP32 on ordinary cores; those whose sizes fit no tensor core; softmaxes that stand alone.
_FP32 = re.compile(r"(?<!tf32_)(?<!tf32)sgemm|simt|f32f32_f32f32", re.IGNORECASE)
_ODD_SIZES = re.compile(r"align[12](?!\d)", re.IGNORECASE)
_SOFTMAX = re.compile(r"soft_?max", re.IGNORECASE)
_NARROWER = {"tf32": "allow TF32", "bf16": "autocast to BF16", "fp16": "autocast to FP16 with a gradient scaler"}
#: The compute capability from which tensor cores multiply in them.
_SINCE = {"tf32": 8.0, "bf16": 8.0, "fp16": 7.0}


def next_steps(finding: Finding) -> Iterator[str]:
    """What to change first, and what that would gain.

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
    if decision.change is None and finding.played.refused is None and finding.name in _LESS:
        yield _LESS[finding.name]
        return
    first = _advice(finding, finding.name)
    if finding.name == "unknown":
        first = f"{first} ({CAPTURE['nsys']})"
    yield first + _gain(finding, decision.change)
    causes = {change: slug for slug, change in CHANGE_OF.items()}
    for row in finding.other_changes():
        if row["change"] in causes:
            second = causes[row["change"]]
            yield f"then {second}: {_advice(finding, second)}{_gain(finding, row['change'])}"
            return


def _gain(finding: Finding, change: str | None) -> str:
    if change is None or finding.played.refused is not None:
        return ""
    speedup = finding.played.row(change)["speedup"]
    return f": predicted {speedup:.2f}x" if speedup else ""


def _advice(finding: Finding, slug: str) -> str:
    """One sentence that fits a cause, this program and this card."""
    trace = finding.account.trace
    if slug == "memory-transfer":
        return _on_copies(finding)
    if slug == "launch-overhead":
        if _has_graphs(trace):
            return "the program replays graphs already: put what is still launched one by one into them"
        if _is_compiled(finding):
            return "the program is compiled already: capture it into graphs (mode='reduce-overhead')"
        if not _is_torch(trace):
            return "launch less: fuse kernels, or capture them into CUDA graphs"
    if slug == "unknown":
        if not trace.recorded("calls"):
            return "record the calls that launch the GPU's work"
        if trace.whole.size("os_calls"):
            sample = "sample the CPU (nsys profile --sample=process-tree)"
            return f"{sample}, or name what the launching thread does with NVTX ranges"
    if slug == "cpu-work":
        return _on_cpu_work(finding)
    if slug == "input-pipeline" and not _is_torch(trace):
        return "have the next data ready in time: read ahead on another thread while the GPU works"
    if slug == "communication" and not _trains(trace):
        return "overlap collectives with other kernels, or send less: narrower types, fewer of them"
    return CAUSES[slug].advice


def _on_copies(finding: Finding) -> str:
    copies = finding.account.exposed_copies
    if copies.empty:
        return _ON_COPY["HtoD from pageable"]
    kinds = copies["kind"].astype(object) + " from " + copies["src_kind"].astype(object)
    lasting = (copies["end_ns"] - copies["start_ns"]).groupby(kinds).sum()
    kind = str(lasting.idxmax())
    if kind in _ON_COPY:
        return _ON_COPY[kind]
    return _ON_COPY.get(kind.partition(" ")[0], _ON_COPY["HtoD"])


def _on_cpu_work(finding: Finding) -> str:
    is_torch = _is_torch(finding.account.trace)
    for kind, name in finding.named[["kind", "name"]].head(1).to_numpy():
        if finding.is_step(name):
            how = "NVTX ranges around the parts of a step"
            if is_torch:
                how = "NVTX or record_function ranges around the parts of a step, or profile(with_stack=True)"
            return f"find out what this is: {how}; then move it off the thread that launches"
        if kind == "call" and ALLOCATES.search(name):
            if is_torch:
                how = "no empty_cache() in the loop, and no sizes that outgrow the last ones"
                return f"let PyTorch's caching allocator keep the memory: {how}"
            return "allocate once and use the memory again, or take it from a pool (cudaMallocAsync)"
    return CAUSES["cpu-work"].advice


# ---------------------------------------------------------------- kernels that fill the time


def _record_more(finding: Finding) -> str:
    lasting = finding.events["duration_ns"]
    replayed = lasting[finding.events["kind"] == "graph"].sum()
    if 2 * replayed >= lasting.sum() > 0:
        return f"record the kernels inside the graphs: {CAPTURE['nodes']}"
    return f"{CAUSES['not-enough-data'].advice}: {CAPTURE['ncu']}"


def _faster_kernels(finding: Finding) -> Iterator[str]:
    is_torch = _is_torch(finding.account.trace)
    narrower = None
    if _is_named(finding, _FP32):
        narrower = _precision(finding, ("tf32", "bf16", "fp16"))
    if narrower is not None:
        how = _NARROWER[narrower] if is_torch else f"multiply in {narrower.upper()}"
        yield f"these products run in FP32 without tensor cores: {how}"
    if _is_named(finding, _ODD_SIZES):
        yield "these products have sizes that are not multiples of 8: pad them"
    if _is_named(finding, _SOFTMAX):
        fused = "a fused attention (PyTorch: scaled_dot_product_attention) need not write them to memory"
        yield f"if these softmaxes are those of attention, {fused}"
    reached = rate(finding.operators)
    if reached is not None and reached >= _GOOD:
        yield (
            f"nothing cheap is left: these operators reach {share_text(reached)} of the datasheet's rate, and the "
            "largest products reach about 80 %"
        )
    else:
        yield _on_kernels(finding)
    if reached is None and not is_torch:
        yield _record_more(finding)
    elif reached is None and not (finding.name == "memory-bound" and finding.account.decodes):
        yield f"record shapes, to learn how far the operators are from their bound: {CAPTURE['shapes']}"
    elif by_shape(finding.account, finding.name) < 0.5:
        yield "most of these kernels have no known shape: what they could reach is not known"


def _on_kernels(finding: Finding) -> str:
    if finding.name == "memory-bound" and finding.account.decodes:
        return "decode more sequences at once, which share each reading of the weights; or use narrower weights"
    if finding.name == "memory-bound" and _is_compiled(finding):
        return "the program is compiled already: narrower types, or larger batches, are what is left"
    return CAUSES[finding.name].advice


def _is_named(finding: Finding, pattern: re.Pattern[str]) -> bool:
    """Whether the pattern is in one of the names that hold most of the time."""
    return any(pattern.search(str(name)) for name in finding.named["name"])


def _precision(finding: Finding, wanted: tuple[str, ...]) -> str | None:
    """The first of some precisions that this card multiplies in; of a card that is not known, the first."""
    name, since = finding.account.gpu, None
    for gpu in finding.account.trace.meta.gpus:
        if gpu.name:
            name, since = name or gpu.name, gpu.compute_capability
            break
    card = None
    if name:
        try:
            card = hardware.find(name)
        except UsageError:
            card = None
    for precision in wanted:
        if card is not None:
            supported = card.supports(precision)
        else:  # of a card that is not listed its generation tells
            supported = since is None or float(since) >= _SINCE[precision]
        if supported:
            return precision
    return None


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
    trace = finding.account.trace
    compiled_ns = {}
    for table in ("kernels", "ranges", "ops"):
        events = trace.table(table, ["name", "duration_ns"])
        compiled_ns[table] = events.loc[matching(events["name"], _COMPILED), "duration_ns"].sum()
    kernels_ns = trace.table("kernels", ["duration_ns"])["duration_ns"].sum()
    if compiled_ns["kernels"] > _COMPILES * kernels_ns:
        return True
    return bool(max(compiled_ns["ranges"], compiled_ns["ops"]) > _COMPILES * finding.account.wall_ns)
