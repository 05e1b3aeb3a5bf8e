"""One step of the language model on paper: what each operator allocates, and what is alive after it.

Every operator of :mod:`nsightkit.workloads.lm` allocates what it gives and holds what autograd keeps for its
derivative; each is freed where PyTorch drops it. The sequence was read off the operators that PyTorch 2.13 dispatches,
and is tested against them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import Configuration
from nsightkit.errors import UsageError

__all__ = ["ITEMS", "MOMENTS", "OPTIMIZERS", "Options", "Step"]

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"
ACTIVATIONS, LOGITS, TEMPORARY, CACHE = "activations", "logits", "temporary buffers", "autocast cache"
BUCKETS, KV, INPUTS, WORKSPACE = "communication buckets", "KV cache", "inputs and tables", "library workspaces"

#: What the allocator gives out, by item.
ITEMS = (
    WEIGHTS,
    GRADIENTS,
    STATES,
    ACTIVATIONS,
    LOGITS,
    TEMPORARY,
    CACHE,
    BUCKETS,
    KV,
    INPUTS,
    WORKSPACE,
)
#: Moments of a step: those that end in "peak" are the highest of a phase, the others its end.
MOMENTS = ("before the step", "forward peak", "forward end", "backward peak", "backward end", "optimizer peak")
#: Bytes an optimizer keeps for a parameter, and bytes it allocates for a parameter while it steps on a GPU.
OPTIMIZERS: Mapping[str, tuple[int, int]] = {
    "adamw": (8, 4),
    "adamw-fused": (8, 0),
    "sgd-momentum": (4, 0),
    "sgd": (0, 0),
}
#: Items that the ranks share, and the stage of ZeRO from which they do.
SHARED_FROM_STAGE = {WEIGHTS: 3, GRADIENTS: 2, STATES: 1}
#: The largest head that flash attention takes; above it attention is computed with its scores written out.
_FLASH_HEAD = 256
_BLOCK_BYTES = 512  # the allocator's granularity
_MIB = 1 << 20

_CHOICES: Mapping[str, tuple[object, ...]] = {
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "attention": ("sdpa", "naive"),
    "mode": ("fwd", "fwd_bwd", "train"),
    "optimizer": tuple(OPTIMIZERS),
    "device": ("cuda", "cpu"),
    "stage": (0, 1, 2, 3),
}


@dataclass(frozen=True)
class Options:
    """How a step is run; :func:`nsightkit.analysis.memory.ledger.predict` describes each."""

    precision: str = "bf16"
    attention: str = "sdpa"
    mode: str = "train"
    optimizer: str = "adamw"
    device: str = "cuda"
    accumulate: int = 1
    stage: int = 0
    ranks: int = 1
    capability: str = "9.0"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"{name} is {value!r}; it can be {', '.join(map(str, allowed))}")
        for name in ("accumulate", "ranks"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")


class _Memory:
    """What is alive, tensor by tensor."""

    def __init__(self, block_bytes: int, ranks_of: Mapping[str, int], *, has_graph: bool) -> None:
        self._block_bytes = block_bytes
        self._ranks_of = ranks_of
        self._has_graph = has_graph
        self._alive: dict[str, tuple[str, int]] = {}
        self._by_item = dict.fromkeys(ITEMS, 0)
        self._total = 0
        self.keeps_activations = False
        #: Names that begin with a dot are of this layer.
        self.layer = 0
        self.peak: tuple[int, dict[str, int]] = (0, {})

    def make(self, name: str, item: str, size: float, *unread: str) -> None:
        """Run an operator: allocate its result, and free what nothing reads after it.

        The result's name may be that of a tensor it replaces. A gradient that is there already is added to. Tensors of
        `unread` that a step does not have do not matter.
        """
        name = self._full(name)
        unread = tuple(self._full(tensor) for tensor in unread)
        is_added = name in self._alive and name not in unread
        if is_added:
            item = TEMPORARY
        rounded = math.ceil(size / self._ranks_of.get(item, 1) / self._block_bytes) * self._block_bytes
        if item == TEMPORARY and not self._has_graph:
            item = ACTIVATIONS  # nothing is kept: what the layers need is all alike
        self._by_item[item] += rounded
        self._total += rounded
        if self._total > self.peak[0]:
            self.peak = self._total, dict(self._by_item)
        for tensor in unread:
            if not (self.keeps_activations and self._alive.get(tensor, ("", 0))[0] == ACTIVATIONS):
                self.free(tensor)
        if is_added:
            self._by_item[item] -= rounded
            self._total -= rounded
        else:
            self._alive[name] = item, rounded

    def _full(self, name: str) -> str:
        return f"{self.layer}{name}" if name.startswith(".") else name

    def free(self, name: str) -> None:
        name = self._full(name)
        if name in self._alive:
            item, size = self._alive.pop(name)
            self._by_item[item] -= size
            self._total -= size

    def restart(self) -> tuple[int, dict[str, int]]:
        """Give what is alive now, and begin to look for the next peak from here."""
        self.peak = self._total, dict(self._by_item)
        return self.peak


class Step:
    """One step, run through on paper.

    Parameters
    ----------
    configuration : Configuration
    options : Options
    """

    def __init__(self, configuration: Configuration, options: Options) -> None:
        c = self.c = configuration
        self.options = options
        self.has_graph = options.mode != "fwd"
        self.trains = options.mode == "train"
        self.on_gpu = options.device == "cuda"
        self.casts = options.precision in ("bf16", "fp16")
        self.element = 2 if self.casts else 4  # bytes of an activation
        self.parameters = envelope(c).params
        self.kept_bytes, self.transient_bytes = OPTIMIZERS[options.optimizer] if self.trains else (0, 0)
        self.ranks_of = {item: options.ranks for item, stage in SHARED_FROM_STAGE.items() if options.stage >= stage}
        #: Of buckets: one is reduced while the next fills; or weights of this and the next, whole, and a gradient.
        self.blocks_in_buckets = 3 if options.stage == 3 else 2
        self.width = c.tokens * c.d_model  # elements of the residual stream
        self.hidden = c.tokens * c.d_ff
        self.scores = c.batch * c.heads * c.context**2
        self.is_naive = options.attention == "naive"
        # On a GPU fused attention has no kernel for wide heads, and computes the scores in fp32.
        self.is_math = self.on_gpu and not self.is_naive and c.d_head > _FLASH_HEAD
        self.is_fused = not self.is_naive and not self.is_math
        # fp32 takes PyTorch's memory-efficient kernel on a GPU: its log-sum-exps of the rows are in 32s, and its result
        # is as the projection reads it.
        is_efficient = self.is_fused and self.on_gpu and not self.casts
        rows = math.ceil(c.context / 32) * 32 if is_efficient else c.context
        self.log_sum_exp = 4 * c.batch * c.heads * rows
        self.copies_attended = not is_efficient
        self._memory = _Memory(_BLOCK_BYTES if self.on_gpu else 1, self.ranks_of, has_graph=self.has_graph)
        self._make = self._memory.make
        self._free = self._memory.free

    def run(self) -> pd.DataFrame:
        """Run the step through.

        Returns
        -------
        DataFrame
            As :func:`nsightkit.analysis.memory.ledger.moments` gives it.
        """
        memory = self._memory
        self._resident()
        amounts = {"before the step": memory.restart()}
        for _ in range(self.options.accumulate):
            memory.restart()
            memory.keeps_activations = self.has_graph
            self._forward()
            memory.keeps_activations = False
            self._note_phase(amounts, "forward")
            if self.has_graph:
                self._backward()
                self._note_phase(amounts, "backward")
            self._free("logits")  # a local variable until here
        memory.restart()
        if self.trains:
            self._optimizer()
            amounts["optimizer peak"] = memory.peak
        rows = []
        for moment in MOMENTS:
            if moment in amounts:
                total, by_item = amounts[moment]
                rows.append({"moment": moment, "total_bytes": total, **by_item})
        return pd.DataFrame(rows, columns=["moment", "total_bytes", *ITEMS])

    def _note_phase(self, amounts: dict[str, tuple[int, dict[str, int]]], phase: str) -> None:
        """Take down the peak of a phase, of all passes, and its end."""
        peak = self._memory.peak
        before = amounts.get(f"{phase} peak", peak)
        amounts[f"{phase} peak"] = peak if peak[0] > before[0] else before
        amounts[f"{phase} end"] = self._memory.restart()

    # ------------------------------------------------------------ what is there before and after

    def _resident(self) -> None:
        c = self.c
        tensors = self._tensors()
        for name, elements in tensors.items():
            self._make(f"weight {name}", WEIGHTS, 4 * elements)
        tables = 2 * c.context * (c.d_head // 2) * 4
        if self.is_naive:
            tables += c.context**2
        self._make("inputs", INPUTS, 4 * c.batch * (c.context + 1) * 8 + tables)
        if self.options.ranks > 1:
            self._make("buckets", BUCKETS, 4 * self._elements_in_buckets())
        if self.on_gpu:
            handles = 2 if self.has_graph else 1
            workspace = 32 if self.options.capability == "9.0" else 8.125
            self._make("workspace", WORKSPACE, handles * workspace * _MIB)
        if self.trains:
            for name, elements in tensors.items():
                self._make(f"state {name}", STATES, self.kept_bytes * elements)

    def _elements_in_buckets(self) -> int:
        """Without stages DistributedDataParallel copies every gradient into its buckets."""
        if not self.options.stage:
            return self.parameters
        c = self.c
        layer = 4 * c.d_model * c.d_model + 3 * c.d_model * c.d_ff + 2 * c.d_model
        return self.blocks_in_buckets * max(layer, c.vocabulary * c.d_model)

    def _tensors(self) -> dict[str, int]:
        """Elements of each weight."""
        c = self.c
        square, wide, table = c.d_model * c.d_model, c.d_model * c.d_ff, c.vocabulary * c.d_model
        layer = {"norm1": c.d_model, "q": square, "k": square, "v": square, "out": square, "norm2": c.d_model}
        layer |= {"gate": wide, "up": wide, "down": wide}
        tensors = {"embedding": table}
        for number in range(c.layers):
            for name, elements in layer.items():
                tensors[f"{number}.{name}"] = elements
        return tensors | {"norm": c.d_model, "head": table}

    def _optimizer(self) -> None:
        """Allocate what AdamW needs while it steps: roots of second moments, all at once or tensor by tensor."""
        roots = self.parameters / self.ranks_of.get(STATES, 1)
        if not self.on_gpu:
            # The root, its quotient, and the quotient of the tensor before, which its name holds until it is reused.
            roots = 0
            before = 0
            for elements in self._tensors().values():
                roots = max(roots, before + 2 * elements)
                before = elements
        self._make("roots", TEMPORARY, self.transient_bytes * roots)
        self._free("roots")

    # ------------------------------------------------------------ a whole pass

    def _forward(self) -> None:
        c = self.c
        logits = c.tokens * c.vocabulary
        self._make("x0", ACTIVATIONS, 4 * self.width)
        for number in range(c.layers):
            self._block(number)
        self._norm("norm", f"x{c.layers}")
        self._linear("head", self.width, "logits", LOGITS, self.element * logits, "norm.n")
        if not self.has_graph:
            for name in self._tensors():
                self._free(f"{name}.w")  # the region ends; with a graph the GEMMs keep the copies
        if self.casts:
            self._make("logits32", LOGITS, 4 * logits)
        self._make("targets", TEMPORARY, 8 * c.tokens if c.batch > 1 else 0)  # of one sequence they are a view
        self._make("log-softmax", LOGITS, 4 * logits, "logits32")
        if not self.has_graph:
            self._free("log-softmax")
            self._free("targets")

    def _backward(self) -> None:
        c = self.c
        logits = c.tokens * c.vocabulary
        self._make("gloss", LOGITS, 4 * logits, "targets")
        self._make("glogits", LOGITS, 4 * logits, "gloss", "log-softmax")
        if self.casts:
            self._make("glogits", LOGITS, 2 * logits, "glogits")
        self._linear_backward("head", self.width, "glogits", "gnorm", "norm.n")
        self._norm_backward("norm", f"x{c.layers}")
        for number in reversed(range(c.layers)):
            self._block_backward(number)
        self._make("gradient embedding", GRADIENTS, 4 * c.vocabulary * c.d_model, "gx")

    def _block(self, number: int) -> None:
        self._memory.layer = number
        hidden = self.element * self.hidden
        self._norm(".norm1")
        self._attention()
        self._make(".middle", ACTIVATIONS, 4 * self.width, ".projected")
        self._norm(".norm2")
        self._linear(".gate", self.width, ".gated", ACTIVATIONS, hidden)
        self._make(".silu", ACTIVATIONS, hidden, ".gated")
        self._linear(".up", self.width, ".upped", ACTIVATIONS, hidden)
        self._make(".product", ACTIVATIONS, hidden, ".silu", ".upped")
        self._linear(".down", 0, ".fed", TEMPORARY, self.element * self.width, ".product")
        unread = (".norm2.n", ".fed", ".middle", f"x{number}")
        self._make(f"x{number + 1}", ACTIVATIONS, 4 * self.width, *unread)

    def _block_backward(self, number: int) -> None:
        """From ``gx``, the gradient of the block's result, to that of its input."""
        self._memory.layer = number
        hidden = self.element * self.hidden
        self._branch()
        self._linear_backward(".down", self.hidden, "gbranch", "gin", ".product")
        self._make("gsilu", TEMPORARY, hidden)
        self._make("gup", TEMPORARY, hidden, "gin", ".silu", ".upped")
        self._linear_backward(".up", self.width, "gup", "gnorm")
        self._make("ggate", TEMPORARY, hidden, "gsilu", ".gated")
        self._linear_backward(".gate", self.width, "ggate", "gmore", ".norm2.n")
        self._norm_backward(".norm2", ".middle")
        self._branch()
        self._attention_backward()
        self._norm_backward(".norm1", f"x{number}")

    def _branch(self) -> None:
        """A branch gets the residual's gradient: cast for one in 16 bits, else the same tensor."""
        self._make("gbranch", TEMPORARY, 2 * self.width if self.casts else 0)

    # ------------------------------------------------------------ norms and GEMMs

    def _norm(self, p: str, *unread: str) -> None:
        rows, full = 4 * self.c.tokens, 4 * self.width
        self._make("square", TEMPORARY, full)
        self._make("mean", TEMPORARY, rows, "square")
        self._make("mean+eps", TEMPORARY, rows, "mean")
        self._make(f"{p}.r", ACTIVATIONS, rows, "mean+eps")
        self._make(f"{p}.xr", ACTIVATIONS, full, f"{p}.r")
        # In fp32 the GEMMs keep it; autocast's GEMMs keep casts of it.
        self._make(f"{p}.n", TEMPORARY if self.casts else ACTIVATIONS, full, f"{p}.xr", *unread)

    def _norm_backward(self, p: str, x: str) -> None:
        """Derivative of x · rsqrt(mean(x²) + ε) · w, from ``gnorm``; added to ``gx``, which the last norm begins."""
        rows, full = 4 * self.c.tokens, 4 * self.width
        self._make("gxr", TEMPORARY, full)
        self._make("product", TEMPORARY, full)
        self._make(f"{p}.gradient", GRADIENTS, 4 * self.c.d_model, "product", "gnorm", f"{p}.xr")
        self._make("gx1", TEMPORARY, full)
        self._make("product", TEMPORARY, full)
        self._make("gr", TEMPORARY, rows, "product", "gxr")
        if p != "norm":
            self._make("gx1", TEMPORARY, full, "gx1", "gx")
        self._make("r cubed", TEMPORARY, 3 * rows, "gr", f"{p}.r")
        self._make("gmean", TEMPORARY, full, "r cubed")
        self._make("x copied", TEMPORARY, full)
        self._make("2x", TEMPORARY, full)
        self._make("gsquare", TEMPORARY, full, "x copied", "2x", "gmean", x)
        self._make("gx", TEMPORARY, full, "gx1", "gsquare")

    def _elements(self, p: str) -> int:
        """Elements of a GEMM's weight."""
        name = p.rpartition(".")[2]
        if name == "head":
            return self.c.vocabulary * self.c.d_model
        return self.c.d_model * (self.c.d_ff if name in ("gate", "up", "down") else self.c.d_model)

    def _linear(self, p: str, source: int, out: str, item: str, size: float, *unread: str) -> None:
        """A GEMM; `source` is the number of elements of an input that autocast has to cast."""
        if self.casts:
            self._make(f"{p}.w", CACHE, 2 * self._elements(p))
            if source:
                self._make(f"{p}.in", ACTIVATIONS, 2 * source)
        self._make(out, item, size, f"{p}.in", *unread)

    def _linear_backward(self, p: str, elements: int, g: str, out: str, *unread: str) -> None:
        """Both GEMMs of the derivative; `unread` is the input, where nothing else needs it any more.

        Gives ``gin`` as the GEMM does; or in fp32 ``gnorm``, or ``gmore``, which is added to it.
        """
        weights = self._elements(p)
        if self.casts:
            self._make("gw", TEMPORARY, 2 * weights)
        else:
            self._make(f"{p}.gradient", GRADIENTS, 4 * weights)
        self._make(out, TEMPORARY, self.element * elements, g, f"{p}.w", f"{p}.in", *unread)
        if self.casts and out != "gin":
            self._make(out, TEMPORARY, 4 * elements, out)
        if out == "gmore":
            self._make("gnorm", TEMPORARY, 4 * self.width, "gnorm", "gmore")
        if self.casts:
            self._make(f"{p}.gradient", GRADIENTS, 4 * weights, "gw")

    # ------------------------------------------------------------ attention

    def _attention(self) -> None:
        width = self.element * self.width
        # Rotation leaves q and k as they came behind; v is kept as it comes, unless it has to be copied.
        self._linear(".q", self.width, ".q0", TEMPORARY, width)
        self._linear(".k", self.width, ".k0", TEMPORARY, width)
        self._linear(".v", self.width, ".v0", ACTIVATIONS if self.is_fused else TEMPORARY, width)
        self._rotate(".q")
        self._rotate(".k")
        self._free(".q0")
        self._free(".k0")
        if self.is_naive:
            self._attend_naive()
        elif self.is_math:
            self._attend_math()
        else:
            self._make(".lse", ACTIVATIONS, self.log_sum_exp)
            self._make(".attended", ACTIVATIONS, width, ".lse")
        if self.copies_attended:
            self._make(".copy", ACTIVATIONS, width)
        unread = (".attended", ".v0", ".copy", ".q", ".k", ".norm1.n")
        self._linear(".out", 0, ".projected", TEMPORARY, width, *unread)

    def _rotate(self, tensor: str) -> None:
        half = 2 * self.width  # fp32, as the tables are
        for part in ("first", "second"):
            self._make("product 1", TEMPORARY, half)
            self._make("product 2", TEMPORARY, half)
            self._make(part, TEMPORARY, half, "product 1", "product 2")
        if self.casts:
            self._make("turned", TEMPORARY, 4 * self.width)
        self._make(tensor, ACTIVATIONS, self.element * self.width, "first", "second", "turned")

    def _attend_naive(self) -> None:
        width, scores = self.element * self.width, self.element * self.scores
        weights = ".weights"
        self._make("product", TEMPORARY, scores)
        self._make("scaled", TEMPORARY, scores, "product")
        self._make("masked", TEMPORARY, scores, "scaled")
        if self.on_gpu and self.casts:  # autocast has softmax in fp32 on a GPU, and in 16 bits on a CPU
            self._make("masked32", TEMPORARY, 4 * self.scores)
            self._make(weights, ACTIVATIONS, 4 * self.scores, "masked32")
            weights = ".weights16"
        self._make(weights, ACTIVATIONS, scores)
        self._make(".v", ACTIVATIONS, width)  # its heads made contiguous, for a batched GEMM
        self._make(".attended", TEMPORARY, width, ".v", ".weights", ".weights16", "masked")

    def _attend_math(self) -> None:
        """The fallback of fused attention: in fp32, its scores written out (``_scaled_dot_product_attention_math``)."""
        scores = 4 * self.scores
        wide = (".q32", ".k32", ".v32")
        for name in wide:
            self._make(name, ACTIVATIONS, 4 * self.width)
        self._free(".q")
        self._free(".k")
        self._make("product", TEMPORARY, scores)
        self._make("masked", TEMPORARY, scores, "product")
        self._make(".weights", ACTIVATIONS, scores, "masked")
        self._make(".attended", TEMPORARY, self.element * self.width, ".weights", *wide)

    def _attention_backward(self) -> None:
        """From the gradient of the projection to ``gnorm``, that of the norm before attention."""
        width = self.element * self.width
        self._linear_backward(".out", self.width, "gbranch", "gin", ".copy")
        if self.is_fused:
            self._fused_backward()
        else:
            self._scores_backward()
        self._rotate_backward("gk")
        self._rotate_backward("gq")
        if not self.is_fused:
            self._make("gv", TEMPORARY, width, "gv")
        self._linear_backward(".v", self.width, "gv", "gnorm")
        self._make("gk", TEMPORARY, width, "gk")
        self._linear_backward(".k", self.width, "gk", "gmore")
        self._make("gq", TEMPORARY, width, "gq")
        self._linear_backward(".q", self.width, "gq", "gmore", ".norm1.n")

    def _fused_backward(self) -> None:
        sums = 0
        if self.on_gpu:
            # Of flash attention for the gradient of q, or of the memory-efficient kernel's rows.
            sums = self.log_sum_exp + (4 * self.width if self.casts else 0)
        self._make("sums", TEMPORARY, sums)
        for name in ("gq", "gk", "gv"):
            self._make(name, TEMPORARY, self.element * self.width)
        for name in ("gin", "sums", ".q", ".k", ".v0", ".lse", ".attended"):
            self._free(name)

    def _scores_backward(self) -> None:
        width = self.element * self.width
        scores = (4 if self.is_math else self.element) * self.scores
        end = "32" if self.is_math else ""
        self._make("contiguous", TEMPORARY, width, "gin")
        self._make("gv", TEMPORARY, width)
        self._make("gscores", TEMPORARY, scores)
        self._free("contiguous")
        self._free(f".v{end}")
        if self.on_gpu and self.casts and self.is_naive:  # softmax is in fp32
            self._free(".weights16")
            self._make("gscores", TEMPORARY, 4 * self.scores, "gscores")
            self._make("gscores", TEMPORARY, 4 * self.scores, "gscores", ".weights")
            self._make("gscores", TEMPORARY, scores, "gscores")
        else:
            self._make("gscores", TEMPORARY, scores, "gscores", ".weights")
        self._make("gscores", TEMPORARY, scores, "gscores")  # through the mask
        self._make("gscores", TEMPORARY, scores, "gscores")  # and the scale
        self._make("gq", TEMPORARY, width)
        self._make("gk", TEMPORARY, width, "gscores", f".q{end}", f".k{end}")

    def _rotate_backward(self, g: str) -> None:
        half = self.element * self.width / 2
        if self.casts:
            self._make(g, TEMPORARY, 4 * self.width, g)
        self._rotated_product("product 1")
        self._rotated_product("product 2")
        self._make("minus", TEMPORARY, 2 * self.width)
        self._rotated_product("product 3")
        self._free("minus")
        self._make("sum 1", TEMPORARY, half, "product 1", "product 3")
        self._rotated_product("product 4")
        self._free(g)
        self._make("sum 2", TEMPORARY, half, "product 2", "product 4")
        self._make(g, TEMPORARY, self.element * self.width, "sum 1", "sum 2")

    def _rotated_product(self, name: str) -> None:
        self._make(name, TEMPORARY, 2 * self.width)
        if self.casts:
            self._make(name, TEMPORARY, self.width, name)
