r"""Where the memory of a step goes: predicted item by item, moment by moment, and held against what was measured.

A step is run through on paper. Every operator of :mod:`nsightkit.workloads.lm` allocates what it gives and holds
what autograd keeps for its derivative; each is freed where PyTorch drops it. What is alive, by item, at each moment of
the step, and at the highest of them, is the ledger: a maximum over moments, never the sum of everything there ever is.
The sequence was read off the operators that PyTorch 2.13 dispatches, and is tested against them.

With M tokens, width d, MLP width F, h heads, context S, batch B, vocabulary V, L layers, P parameters and G of them
in GEMMs; ``a`` is 4 bytes in fp32 and 2 under 16-bit autocast. Kept for the backward pass, by a layer:

=====================  ==================  ======================================================================
two norms              16Md + 8M           the residual stream they read (fp32), what they normed, 1/rms
input of q, k, v       4Md, or 3 · 2Md     fp32 is shared; autocast casts the same tensor for each of the three
input of gate, up      4Md, or 2 · 2Md     likewise for two
attention, fused       4aMd + 4Mh          q, k, v, its result; log-sum-exp of each row
   its result, copied  aMd                 where it comes in another layout than the output projection reads
attention, naive       4aMd + 4BhS²        q, k, v, its result; softmax's result. Under autocast 6BhS² on a GPU,
                                           where softmax is fp32 and cast after, and 2BhS² on a CPU
MLP                    4aMF                gate, silu(gate), up, their product
=====================  ==================  ======================================================================

The last norm keeps 8Md + 4M and the input of the head. At the loss another ``aMV`` for the logits and up to 12MV for
copies in fp32: log-softmax and two gradients.

Parameters are fp32: 4P for weights, 4P for gradients (from the backward pass to ``zero_grad``), 8P for AdamW's two
moments. 16-bit autocast adds its cast cache, 2G: copies of weights, each kept by the GEMM that read it until its
derivative is done. ``foreach`` AdamW takes another 4P while it steps: the root of all second moments at once.

Sources:

- what each stage of ZeRO divides by the number of ranks: S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, *ZeRO: Memory
  Optimizations Toward Training Trillion Parameter Models*, SC 2020;
- the size of a KV cache, and serving from 0.9 of a GPU's memory: W. Kwon et al., *Efficient Memory Management for Large
  Language Model Serving with PagedAttention*, SOSP 2023, and the default of its implementation, vLLM;
- blocks of multiples of 512 bytes: PyTorch, ``c10/cuda/CUDACachingAllocator.cpp``. One above 1 MiB may be up to 1 MiB
  longer than that, where the rest is not worth splitting off; this is not predicted;
- 32 MiB for a handle of cuBLAS on compute capability 9.0, 8.125 MiB on others: PyTorch,
  ``aten/src/ATen/cuda/CublasHandlePool.cpp``. The forward and the backward thread have a handle each.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd

from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import Configuration
from nsightkit.errors import UsageError
from nsightkit.hardware import Gpu

__all__ = [
    "ITEMS",
    "MOMENTS",
    "OPTIMIZERS",
    "kv_bytes_per_token",
    "largest_context",
    "largest_contexts",
    "measured",
    "moments",
    "predict",
    "reconcile",
    "serving",
]

_WEIGHTS, _GRADIENTS, _STATES = "weights", "gradients", "optimizer states"
_ACTIVATIONS, _LOGITS, _TEMPORARY, _CACHE = "activations", "logits", "temporary buffers", "autocast cache"
_BUCKETS, _KV, _INPUTS, _WORKSPACE = "communication buckets", "KV cache", "inputs and tables", "library workspaces"

#: What the allocator gives out, by item.
ITEMS = (
    _WEIGHTS, _GRADIENTS, _STATES, _ACTIVATIONS, _LOGITS, _TEMPORARY, _CACHE, _BUCKETS, _KV, _INPUTS, _WORKSPACE,
)  # fmt: skip
#: What is taken from the device on top of it. None of it follows from the model.
_ON_TOP = ("allocator slack", "fragmentation", "CUDA context")

#: Moments of a step: those that end in "peak" are the highest of a phase, the others its end.
MOMENTS = ("before the step", "forward peak", "forward end", "backward peak", "backward end", "optimizer peak")

#: Bytes an optimizer keeps for a parameter, and bytes it allocates for a parameter while it steps on a GPU.
OPTIMIZERS: Mapping[str, tuple[int, int]] = {
    "adamw": (8, 4),
    "adamw-fused": (8, 0),
    "sgd-momentum": (4, 0),
    "sgd": (0, 0),
}

_ALIVE = {
    _WEIGHTS: "always",
    _GRADIENTS: "from the backward pass to zero_grad",
    _STATES: "always, after the first step",
    _ACTIVATIONS: "from the forward pass until their derivative is done",
    _LOGITS: "from the output head through the backward pass",
    _TEMPORARY: "within an operator or a few",
    _CACHE: "from the forward pass until their derivative is done",
    _BUCKETS: "always, with more than one rank",
    _KV: "while a request is served",
    _INPUTS: "always",
    _WORKSPACE: "always, after the first GEMM",
    "allocator slack": "held back by the allocator, for the next step",
    "fragmentation": "free, in segments of which another part is in use",
    "CUDA context": "as long as the process",
}

#: The largest head that flash attention takes; above it attention is computed with its scores written out.
_FLASH_HEAD = 256
_BLOCK = 512  # the allocator's granularity


#: Items that the ranks share, and the stage of ZeRO from which they do.
_SHARED = {_WEIGHTS: 3, _GRADIENTS: 2, _STATES: 1}

#: An operator: its result, the result's item and bytes, and the names of what nothing reads any more after it, whether
#: or not this step has them. A name alone is a tensor that is freed.
_Operator = tuple[Any, ...] | str
_Operators = tuple[_Operator, ...]


def _if(condition: object, *operators: _Operator) -> _Operators:
    return operators if condition else ()


class _Tape:
    """What is alive, tensor by tensor, while a step is run through."""

    def __init__(self, block: int, parts: Mapping[str, int], *, graph: bool) -> None:
        self._block, self._parts, self._graph = block, parts, graph
        self._alive: dict[str, tuple[str, int]] = {}
        self.by_item = dict.fromkeys(ITEMS, 0)
        self._total = 0
        self.peak: tuple[int, dict[str, int]] = (0, {})

    def run(self, operators: Iterable[_Operator], *, keeping: bool = False) -> None:
        """Run operators in turn: each allocates its result, whose name may be that of a tensor it replaces.

        A gradient that is there already is added to. `keeping`: autograd keeps activations that nothing else reads.
        """
        for operator in operators:
            if isinstance(operator, str):
                self._free(operator)
                continue
            name, item, size, *unread = operator
            if added := name in self._alive and name not in unread:
                name, item = "added", _TEMPORARY
            # Without a graph nothing is kept: what the layers need is all alike.
            counted = _ACTIVATIONS if item == _TEMPORARY and not self._graph else item
            rounded = math.ceil(size / self._parts.get(item, 1) / self._block) * self._block
            self.by_item[counted] += rounded
            self._total += rounded
            if self._total > self.peak[0]:
                self.peak = self._total, dict(self.by_item)
            for each in unread:
                self._free(each, keeping=keeping)
            self._alive[name] = counted, rounded
            if added:
                self._free(name)

    def _free(self, name: str, *, keeping: bool = False) -> None:
        item, size = self._alive.get(name, (_TEMPORARY, 0))
        if not (keeping and item == _ACTIVATIONS):
            self.by_item[item] -= size
            self._total -= size
            self._alive.pop(name, None)

    def end(self) -> tuple[int, dict[str, int]]:
        """Give what is alive now, and begin to look for the next peak from here."""
        self.peak = self._total, dict(self.by_item)
        return self.peak


class _Step:
    """One step of the language model, on paper: each method gives the operators of a part of it."""

    def __init__(
        self,
        c: Configuration,
        precision: str = "bf16",
        attention: str = "sdpa",
        mode: str = "train",
        optimizer: str = "adamw",
        device: str = "cuda",
        accumulate: int = 1,
        stage: int = 0,
        ranks: int = 1,
        capability: str = "9.0",
    ) -> None:
        """The arguments of :func:`predict`."""
        choices: dict[str, tuple[object, Iterable[object]]] = {
            "precision": (precision, ("fp32", "tf32", "bf16", "fp16")),
            "attention": (attention, ("sdpa", "naive")),
            "mode": (mode, ("fwd", "fwd_bwd", "train")),
            "optimizer": (optimizer, OPTIMIZERS),
            "device": (device, ("cuda", "cpu")),
            "stage": (stage, (0, 1, 2, 3)),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                raise UsageError(f"{name} is {value!r}; it can be {', '.join(map(str, allowed))}")
        for name, count in {"accumulate": accumulate, "ranks": ranks}.items():
            if count < 1:
                raise UsageError(f"{name} must be at least 1, not {count}")
        self.c, self.accumulate, self.stage, self.ranks = c, accumulate, stage, ranks
        self.parts = {item: ranks for item, shared_from in _SHARED.items() if stage >= shared_from}
        self.graph, self.trains, self.cuda = mode != "fwd", mode == "train", device == "cuda"
        # In buckets: one is reduced while the next fills; or weights of this and the next, whole, and a gradient.
        self.blocks = 3 if stage == 3 else 2
        # Bytes a parameter that the optimizer keeps, and that it allocates while it steps.
        self.kept, self.transient = OPTIMIZERS[optimizer] if self.trains else (0, 0)
        self.workspace = (32 if capability == "9.0" else 8.125) * 2**20
        self.cast = precision in ("bf16", "fp16")
        self.low = 2 if self.cast else 4
        self.M, self.d, self.F, self.V = c.tokens, c.d_model, c.d_ff, c.vocabulary
        self.Md, self.MF, self.MV = self.M * self.d, self.M * self.F, self.M * self.V
        self.S, self.params = c.batch * c.heads * c.context**2, envelope(c).params
        # On a GPU fused attention has no kernel for wide heads, and computes the scores in fp32.
        self.naive = attention == "naive"
        self.math = self.cuda and not self.naive and c.d_head > _FLASH_HEAD
        self.fused = not (self.naive or self.math)
        # fp32 takes PyTorch's memory-efficient kernel on a GPU: its log-sum-exps of the rows are in 32s, and its result
        # is as the projection reads it.
        efficient = self.fused and self.cuda and not self.cast
        self.lse = 4 * c.batch * c.heads * (math.ceil(c.context / 32) * 32 if efficient else c.context)
        self.copied = not efficient

    # ------------------------------------------------------------ what is there before and after

    def _resident(self) -> _Operators:
        c, d, tensors = self.c, self.d, self._tensors()
        tables = 2 * c.context * (c.d_head // 2) * 4 + (c.context**2 if self.naive else 0)
        block = max(4 * d * d + 3 * d * self.F + 2 * d, self.V * d)
        # Without stages DistributedDataParallel copies every gradient into its buckets.
        in_buckets = self.blocks * block if self.stage else self.params
        return (
            *((f"weight {name}", _WEIGHTS, 4 * numel) for name, numel in tensors),
            ("inputs", _INPUTS, 4 * c.batch * (c.context + 1) * 8 + tables),
            *_if(self.ranks > 1, ("buckets", _BUCKETS, 4 * in_buckets)),
            *_if(self.cuda, ("workspace", _WORKSPACE, (2 if self.graph else 1) * self.workspace)),
            *((f"state {name}", _STATES, self.kept * numel) for name, numel in tensors if self.trains),
        )

    def _tensors(self) -> list[tuple[str, int]]:
        d, wide, table = self.d, self.d * self.F, self.V * self.d
        layer = {"norm1": d, **dict.fromkeys(("q", "k", "v", "out"), d * d), "norm2": d}
        layer |= dict.fromkeys(("gate", "up", "down"), wide)
        layers = [(f"{i}.{name}", numel) for i in range(self.c.layers) for name, numel in layer.items()]
        return [("embedding", table), *layers, ("norm", d), ("head", table)]

    # ------------------------------------------------------------ operators, forward and backward

    def _norm(self, p: str, *unread: str) -> _Operators:
        M, Md = 4 * self.M, 4 * self.Md
        return (
            ("square", _TEMPORARY, Md),
            ("mean", _TEMPORARY, M, "square"),
            ("mean+eps", _TEMPORARY, M, "mean"),
            (f"{p}.r", _ACTIVATIONS, M, "mean+eps"),
            (f"{p}.xr", _ACTIVATIONS, Md, f"{p}.r"),
            # In fp32 the GEMMs keep it; autocast's GEMMs keep casts of it.
            (f"{p}.n", _TEMPORARY if self.cast else _ACTIVATIONS, Md, f"{p}.xr", *unread),
        )

    def _norm_backward(self, p: str, x: str) -> _Operators:
        """Derivative of x · rsqrt(mean(x²) + ε) · w, from ``gnorm``; added to ``gx``, which the last norm begins."""
        M, Md = 4 * self.M, 4 * self.Md
        return (
            ("gxr", _TEMPORARY, Md),
            ("product", _TEMPORARY, Md),
            (f"gradient {p}", _GRADIENTS, 4 * self.d, "product", "gnorm", f"{p}.xr"),
            ("gx1", _TEMPORARY, Md),
            ("product", _TEMPORARY, Md),
            ("gr", _TEMPORARY, M, "product", "gxr"),
            *_if(p != "norm", ("gx1", _TEMPORARY, Md, "gx1", "gx")),
            ("r cubed", _TEMPORARY, 3 * M, "gr", f"{p}.r"),
            ("gmean", _TEMPORARY, Md, "r cubed"),
            ("x copied", _TEMPORARY, Md),
            ("2x", _TEMPORARY, Md),
            ("gsquare", _TEMPORARY, Md, "x copied", "2x", "gmean", x),
            ("gx", _TEMPORARY, Md, "gx1", "gsquare"),
        )

    def _linear(self, p: str, numel: int, source: int, out: str, item: str, size: float, *unread: str) -> _Operators:
        """A GEMM; `source` is the number of elements of an input that autocast has to cast."""
        return (
            *_if(self.cast, (f"{p}.w", _CACHE, 2 * numel)),
            *_if(self.cast and source, (f"{p}.in", _ACTIVATIONS, 2 * source)),
            (out, item, size, f"{p}.in", *unread),
        )

    def _linear_backward(self, p: str, numel: int, elements: int, g: str, out: str, *unread: str) -> _Operators:
        """Both GEMMs of the derivative; `unread` is the input, where nothing else needs it any more.

        Gives ``gin`` as the GEMM does; or in fp32 ``gnorm``, or ``gmore``, which is added to it.
        """
        gradient = f"gradient {p}", _GRADIENTS, 4 * numel
        return (
            ("gw", _TEMPORARY, 2 * numel) if self.cast else gradient,
            (out, _TEMPORARY, self.low * elements, g, f"{p}.w", f"{p}.in", *unread),
            *_if(self.cast and out != "gin", (out, _TEMPORARY, 4 * elements, out)),
            *_if(out == "gmore", ("gnorm", _TEMPORARY, 4 * self.Md, "gnorm", "gmore")),
            *_if(self.cast, (*gradient, "gw")),
        )

    def _rotate(self, p: str, name: str) -> _Operators:
        half = 2 * self.Md  # fp32, as the tables are
        products = ("product 1", _TEMPORARY, half), ("product 2", _TEMPORARY, half)
        return (
            *products,
            ("first", _TEMPORARY, half, "product 1", "product 2"),
            *products,
            ("second", _TEMPORARY, half, "product 1", "product 2"),
            *_if(self.cast, ("turned", _TEMPORARY, 4 * self.Md)),
            (f"{p}.{name}", _ACTIVATIONS, self.low * self.Md, "first", "second", "turned"),
        )

    def _rotate_backward(self, g: str) -> _Operators:
        half, low = 2 * self.Md, self.low * self.Md / 2

        def product(name: str) -> _Operators:
            return (name, _TEMPORARY, half), *_if(self.cast, (name, _TEMPORARY, low, name))

        return (
            *_if(self.cast, (g, _TEMPORARY, 4 * self.Md, g)),
            *product("p1"),
            *product("p2"),
            ("minus", _TEMPORARY, half),
            *product("p3"),
            "minus",
            ("sum 1", _TEMPORARY, low, "p1", "p3"),
            *product("p4"),
            g,
            ("sum 2", _TEMPORARY, low, "p2", "p4"),
            (g, _TEMPORARY, 2 * low, "sum 1", "sum 2"),
        )

    # ------------------------------------------------------------ attention

    def _attention(self, p: str, *unread: str) -> _Operators:
        d2, low = self.d * self.d, self.low * self.Md
        attend = self._written_out if self.naive else self._math if self.math else self._fused
        # Rotation leaves q and k as they came behind; v is kept as it comes, unless it has to be copied.
        kept = {"q": _TEMPORARY, "k": _TEMPORARY, "v": _ACTIVATIONS if self.fused else _TEMPORARY}
        inputs = [self._linear(f"{p}.{name}", d2, self.Md, f"{p}.{name}0", item, low) for name, item in kept.items()]
        held = [f"{p}.{name}" for name in ("attended", "v0", "copy", "q", "k")]
        return (
            *itertools.chain(*inputs),
            *self._rotate(p, "q"),
            *self._rotate(p, "k"),
            f"{p}.q0",
            f"{p}.k0",
            *attend(p),
            *_if(self.copied, (f"{p}.copy", _ACTIVATIONS, low)),
            *self._linear(f"{p}.out", d2, 0, f"{p}.projected", _TEMPORARY, low, *held, *unread),
        )

    def _fused(self, p: str) -> _Operators:
        return (
            (f"{p}.lse", _ACTIVATIONS, self.lse),
            (f"{p}.attended", _ACTIVATIONS, self.low * self.Md, f"{p}.lse"),
        )

    def _written_out(self, p: str) -> _Operators:
        low, scores = self.low * self.Md, self.low * self.S
        wide = self.cuda and self.cast  # autocast has softmax in fp32 on a GPU, and in 16 bits on a CPU
        return (
            ("product", _TEMPORARY, scores),
            ("scaled", _TEMPORARY, scores, "product"),
            ("masked", _TEMPORARY, scores, "scaled"),
            *_if(wide, ("masked32", _TEMPORARY, 4 * self.S), (f"{p}.weights", _ACTIVATIONS, 4 * self.S, "masked32")),
            (f"{p}.weights16" if wide else f"{p}.weights", _ACTIVATIONS, scores),
            (f"{p}.v", _ACTIVATIONS, low),  # its heads made contiguous, for a batched GEMM
            (f"{p}.attended", _TEMPORARY, low, f"{p}.v", f"{p}.weights", f"{p}.weights16", "masked"),
        )

    def _math(self, p: str) -> _Operators:
        """The fallback of fused attention: in fp32, its scores written out (``_scaled_dot_product_attention_math``)."""
        S, wide = 4 * self.S, [f"{p}.{name}32" for name in ("q", "k", "v")]
        return (
            *((name, _ACTIVATIONS, 4 * self.Md) for name in wide),
            f"{p}.q",
            f"{p}.k",
            ("product", _TEMPORARY, S),
            ("masked", _TEMPORARY, S, "product"),
            (f"{p}.weights", _ACTIVATIONS, S, "masked"),
            (f"{p}.attended", _TEMPORARY, self.low * self.Md, f"{p}.weights", *wide),
        )

    def _attention_backward(self, p: str) -> _Operators:
        """From the gradient of the projection to ``gnorm``, that of the norm before attention."""
        d2, low = self.d * self.d, self.low * self.Md
        contiguous = {name: (f"g{name}", _TEMPORARY, low, f"g{name}") for name in ("v", "k", "q")}
        return (
            *self._linear_backward(f"{p}.out", d2, self.Md, "gbranch", "gin", f"{p}.copy"),
            *(self._fused_backward(p) if self.fused else self._scores_backward(p)),
            *self._rotate_backward("gk"),
            *self._rotate_backward("gq"),
            *_if(not self.fused, contiguous["v"]),
            *self._linear_backward(f"{p}.v", d2, self.Md, "gv", "gnorm"),
            contiguous["k"],
            *self._linear_backward(f"{p}.k", d2, self.Md, "gk", "gmore"),
            contiguous["q"],
            *self._linear_backward(f"{p}.q", d2, self.Md, "gq", "gmore", f"{p}.norm1.n"),
        )

    def _fused_backward(self, p: str) -> _Operators:
        # Sums of flash attention for the gradient of q, or of the memory-efficient kernel's rows.
        return (
            ("sums", _TEMPORARY, (self.lse + (4 * self.Md if self.cast else 0) if self.cuda else 0)),
            *((f"g{name}", _TEMPORARY, self.low * self.Md) for name in ("q", "k", "v")),
            *("gin", "sums", *(f"{p}.{name}" for name in ("q", "k", "v0", "lse", "attended"))),
        )

    def _scores_backward(self, p: str) -> _Operators:
        low, end = self.low * self.Md, "32" if self.math else ""
        size = (4 if self.math else self.low) * self.S
        narrow, wide = ("gscores", _TEMPORARY, size, "gscores"), ("gscores", _TEMPORARY, 4 * self.S, "gscores")
        through: _Operators = ((*narrow, f"{p}.weights"),)
        if self.cuda and self.cast and not self.math:  # softmax is in fp32
            through = (f"{p}.weights16", wide, (*wide, f"{p}.weights"), narrow)
        return (
            ("contiguous", _TEMPORARY, low, "gin"),
            ("gv", _TEMPORARY, low),
            ("gscores", _TEMPORARY, size),
            "contiguous",
            f"{p}.v{end}",
            *through,
            narrow,  # through the mask
            narrow,  # and the scale
            ("gq", _TEMPORARY, low),
            ("gk", _TEMPORARY, low, "gscores", f"{p}.q{end}", f"{p}.k{end}"),
        )

    # ------------------------------------------------------------ a block, and a whole pass

    def _block(self, i: int) -> _Operators:
        p, wide, low = str(i), self.d * self.F, self.low * self.MF
        return (
            *self._norm(f"{p}.norm1"),
            *self._attention(p, f"{p}.norm1.n"),
            (f"{p}.middle", _ACTIVATIONS, 4 * self.Md, f"{p}.projected"),
            *self._norm(f"{p}.norm2"),
            *self._linear(f"{p}.gate", wide, self.Md, f"{p}.gated", _ACTIVATIONS, low),
            (f"{p}.silu", _ACTIVATIONS, low, f"{p}.gated"),
            *self._linear(f"{p}.up", wide, self.Md, f"{p}.upped", _ACTIVATIONS, low),
            (f"{p}.product", _ACTIVATIONS, low, f"{p}.silu", f"{p}.upped"),
            *self._linear(f"{p}.down", wide, 0, f"{p}.fed", _TEMPORARY, self.low * self.Md, f"{p}.product"),
            (f"x{i + 1}", _ACTIVATIONS, 4 * self.Md, f"{p}.norm2.n", f"{p}.fed", f"{p}.middle", f"x{i}"),
        )

    def _block_backward(self, i: int) -> _Operators:
        """From ``gx``, the gradient of the block's result, to that of its input."""
        p, wide, low = str(i), self.d * self.F, self.low * self.MF
        # A branch gets the residual's gradient: cast for one in 16 bits, else the same tensor.
        branch = "gbranch", _TEMPORARY, 2 * self.Md if self.cast else 0
        return (
            branch,
            *self._linear_backward(f"{p}.down", wide, self.MF, "gbranch", "gin", f"{p}.product"),
            ("gsilu", _TEMPORARY, low),
            ("gup", _TEMPORARY, low, "gin", f"{p}.silu", f"{p}.upped"),
            *self._linear_backward(f"{p}.up", wide, self.Md, "gup", "gnorm"),
            ("ggate", _TEMPORARY, low, "gsilu", f"{p}.gated"),
            *self._linear_backward(f"{p}.gate", wide, self.Md, "ggate", "gmore", f"{p}.norm2.n"),
            *self._norm_backward(f"{p}.norm2", f"{p}.middle"),
            branch,
            *self._attention_backward(p),
            *self._norm_backward(f"{p}.norm1", f"x{i}"),
        )

    def _forward(self) -> _Operators:
        head, MV = self.V * self.d, 4 * self.MV
        return (
            ("x0", _ACTIVATIONS, 4 * self.Md),
            *itertools.chain.from_iterable(map(self._block, range(self.c.layers))),
            *self._norm("norm", f"x{self.c.layers}"),
            *self._linear("head", head, self.Md, "logits", _LOGITS, self.low * self.MV, "norm.n"),
            # The region ends; with a graph the GEMMs keep the copies.
            *_if(not self.graph, *(f"{name}.w" for name, _ in self._tensors())),
            *_if(self.cast, ("logits32", _LOGITS, MV)),
            ("targets", _TEMPORARY, 8 * self.M if self.c.batch > 1 else 0),  # of one sequence they are a view
            ("log-softmax", _LOGITS, MV, "logits32"),
            *_if(not self.graph, "log-softmax", "targets"),
        )

    def _backward(self) -> _Operators:
        head, MV = self.V * self.d, 4 * self.MV
        return (
            ("gloss", _LOGITS, MV, "targets"),
            ("glogits", _LOGITS, MV, "gloss", "log-softmax"),
            *_if(self.cast, ("glogits", _LOGITS, 2 * self.MV, "glogits")),
            *self._linear_backward("head", head, self.Md, "glogits", "gnorm", "norm.n"),
            *self._norm_backward("norm", f"x{self.c.layers}"),
            *itertools.chain.from_iterable(map(self._block_backward, reversed(range(self.c.layers)))),
            ("gradient embedding", _GRADIENTS, 4 * head, "gx"),
        )

    def _optimizer(self) -> _Operators:
        """What AdamW allocates while it steps: roots of second moments, all at once or tensor by tensor."""
        roots = self.params / self.parts.get(_STATES, 1)
        if not self.cuda:
            # The root, its quotient, and the quotient of the tensor before, which its name holds until it is reused.
            sizes = [numel for _, numel in self._tensors()]
            roots = max(before + 2 * size for before, size in zip([0, *sizes], sizes, strict=False))
        return ("roots", _TEMPORARY, self.transient * roots), "roots"

    def run(self) -> pd.DataFrame:
        """Run the step through, for :func:`moments`."""
        tape = _Tape(_BLOCK if self.cuda else 1, self.parts, graph=self.graph)
        tape.run(self._resident())
        found = {"before the step": tape.end()}
        passes = {"forward": self._forward()} | ({"backward": self._backward()} if self.graph else {})
        for _ in range(self.accumulate):
            for name, operators in passes.items():
                tape.end()
                tape.run(operators, keeping=self.graph and name == "forward")
                found[f"{name} peak"] = max(found.get(f"{name} peak", tape.peak), tape.peak, key=lambda one: one[0])
                found[f"{name} end"] = tape.end()
            tape.run(["logits"])  # a local variable until here
        tape.end()
        if self.trains:
            tape.run(self._optimizer())
            found["optimizer peak"] = tape.peak
        rows = [(moment, found[moment][0], *found[moment][1].values()) for moment in MOMENTS if moment in found]
        return pd.DataFrame(rows, columns=["moment", "total_bytes", *ITEMS])


def moments(configuration: Configuration, **how: object) -> pd.DataFrame:
    """Predict what is alive at each moment of a step.

    Parameters
    ----------
    configuration : Configuration
    **how
        As for :func:`predict`.

    Returns
    -------
    DataFrame
        A row for each of :data:`MOMENTS` that the mode has: ``moment``, ``total_bytes`` and a column for each of
        :data:`ITEMS`.

    Raises
    ------
    UsageError
        An argument has a value it cannot have.
    """
    return _Step(configuration, **how).run()  # type: ignore[arg-type]


def predict(
    configuration: Configuration,
    *,
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "bf16",
    attention: Literal["sdpa", "naive"] = "sdpa",
    mode: Literal["fwd", "fwd_bwd", "train"] = "train",
    optimizer: str = "adamw",
    device: Literal["cuda", "cpu"] = "cuda",
    accumulate: int = 1,
    stage: int = 0,
    ranks: int = 1,
    capability: str = "9.0",
) -> pd.DataFrame:
    """Predict the ledger of a step: every item at the moment when all together are highest.

    Parameters
    ----------
    configuration : Configuration
    precision : {"fp32", "tf32", "bf16", "fp16"}
        ``bf16`` and ``fp16`` are autocast over fp32 weights, as in :mod:`nsightkit.workloads.lm`.
    attention : {"sdpa", "naive"}
    mode : {"fwd", "fwd_bwd", "train"}
        Forward without a graph; with backward; with an optimizer's step.
    optimizer : {"adamw", "adamw-fused", "sgd-momentum", "sgd"}
        The first and the last two as PyTorch runs them by default on a GPU, with ``foreach``.
    device : {"cuda", "cpu"}
        They differ: a GPU's allocator gives out blocks of 512 bytes, cuBLAS has workspaces, ``foreach`` is the default,
        softmax is fp32 under autocast, and attention has other kernels. A CPU's steps are what TensorMemory counts.
    accumulate : int
        Forward and backward passes a step.
    stage : {0, 1, 2, 3}
        What is divided among the ranks (ZeRO): nothing (DistributedDataParallel); optimizer states; gradients too;
        weights too. Arithmetic: no such run is measured here.
    ranks : int
    capability : str
        Compute capability, for the size of cuBLAS's workspace.

    Returns
    -------
    DataFrame
        ``item, predicted_bytes, largest_bytes, moment, alive, formula``: bytes at the peak, bytes at the item's own
        highest moment, the peak's moment, when it is alive, and its size in words. The items sum to the peak. Then
        those the model does not decide (slack, fragmentation, context), whose bytes are missing.

    Raises
    ------
    UsageError
        An argument has a value it cannot have.
    """
    step = _Step(configuration, precision, attention, mode, optimizer, device, accumulate, stage, ranks, capability)
    table = step.run().set_index("moment")
    moment = str(table["total_bytes"].idxmax())
    columns = {
        "predicted_bytes": table.loc[moment].reindex(list(_ALIVE)).astype("Int64"),
        "largest_bytes": table.max().reindex(list(_ALIVE)).astype("Int64"),
        "moment": moment,
        "alive": _ALIVE,
        "formula": _words(step),
    }
    return pd.DataFrame(columns, index=pd.Index(_ALIVE, name="item")).reset_index()


def _words(step: _Step) -> dict[str, str]:
    cast, low = step.cast, step.low
    divided = {item: f" / {ranks} ranks" if (ranks := step.parts.get(item, 1)) > 1 else "" for item in _SHARED}
    attended, rest, scores = 4 * low + (low if step.copied else 0), " + 4 x heads", ""
    if step.naive:
        attended, rest, scores = 4 * low, "", f" + {(6 if cast and step.cuda else low)} x batch x heads x context^2"
    elif step.math:
        attended, rest = 12 + low, ""
        scores = " + 4 x batch x heads x context^2 (no fused kernel for such heads)"
    norms, last = (26, 10) if cast else (24, 12)
    layer = (
        f"layers x (tokens x (({norms} + {attended}) x d_model + {4 * low} x d_ff{rest} + 8){scores}) "
        f"+ tokens x ({last} x d_model + 4) B"
    )
    moving = f"; {step.transient} B a parameter while the optimizer steps" if step.transient else ""
    of_blocks = f"{step.blocks} x 4 B x parameters of the largest block"
    buckets = of_blocks if step.stage else "4 B a parameter: a copy of every gradient"
    return {
        _WEIGHTS: f"4 B a parameter{divided[_WEIGHTS]}",
        _GRADIENTS: f"4 B a parameter{divided[_GRADIENTS]}" if step.graph else "none: no backward pass",
        _STATES: f"{step.kept} B a parameter{divided[_STATES]}" if step.kept else "none",
        _ACTIVATIONS: layer if step.graph else "what one layer needs at a time: nothing is kept",
        _LOGITS: f"{low} B x tokens x vocabulary, and up to 12 for the loss in fp32",
        _TEMPORARY: f"the widest operators{moving}",
        _CACHE: "2 B a weight of a GEMM" if cast else "none: no autocast",
        _BUCKETS: buckets if step.ranks > 1 else "none: one rank",
        _KV: "none: no tokens are generated",
        _INPUTS: "tokens of 4 batches; tables of rotary positions and of the causal mask",
        _WORKSPACE: f"{2 if step.graph else 1} x cuBLAS's workspace" if step.cuda else "none on a CPU",
        "allocator slack": "reserved - allocated - fragmentation; measured only",
        "fragmentation": "free parts of segments in use; measured only",
        "CUDA context": "used on the device - reserved; measured only",
    }


def reconcile(predicted: pd.DataFrame, measured: Mapping[str, float]) -> pd.DataFrame:
    """Put prediction and measurement side by side, and close against the measured peak.

    Parameters
    ----------
    predicted : DataFrame
        From :func:`predict`.
    measured : mapping of str to float
        Bytes by item, as many as were measured, and ``peak``: the most that was allocated. Slack, fragmentation and
        context lie outside of it, and may be given too.

    Returns
    -------
    DataFrame
        ``item, predicted_bytes, measured_bytes, difference_bytes, share_of_peak``. First the items of the peak, then
        ``unexplained``: what the peak has beyond the items, each taken as measured where it was and else as predicted.
        With it the column closes exactly. Then ``peak``, its difference the error of the whole prediction; then what
        is taken on top of it. An item is left out that is nothing in both.

    Raises
    ------
    UsageError
        There is no ``peak``, or an item that the ledger does not have.
    """
    if "peak" not in measured:
        raise UsageError("a ledger closes against the measured peak: give it as 'peak'")
    unknown = [item for item in measured if item not in {*ITEMS, *_ON_TOP, "peak"}]
    if unknown:
        raise UsageError(f"the ledger has no item {', '.join(unknown)}; there are {', '.join((*ITEMS, *_ON_TOP))}")
    table = predicted.set_index("item")["predicted_bytes"].astype("Float64")
    seen = pd.Series(dict(measured), dtype="Float64").reindex(table.index)
    items = pd.DataFrame({"predicted_bytes": table, "measured_bytes": seen}).loc[list(ITEMS)]
    peak = float(measured["peak"])
    taken = items["measured_bytes"].fillna(items["predicted_bytes"])
    closing = pd.DataFrame(
        {
            "predicted_bytes": [0.0, float(items["predicted_bytes"].sum())],
            "measured_bytes": [peak - float(taken.sum()), peak],
        },
        index=["unexplained", "peak"],
        dtype="Float64",
    )
    on_top = pd.DataFrame({"predicted_bytes": pd.NA, "measured_bytes": seen[list(_ON_TOP)].dropna()}, dtype="Float64")
    found = pd.concat([items[items.fillna(0).ne(0).any(axis=1)], closing, on_top]).rename_axis("item").reset_index()
    return found.assign(
        difference_bytes=found["measured_bytes"] - found["predicted_bytes"],
        share_of_peak=found["measured_bytes"].fillna(found["predicted_bytes"]) / peak,
    )


def measured(values: Mapping[str, float]) -> dict[str, float]:
    """Name what a watched step gave as :func:`reconcile` has it.

    Parameters
    ----------
    values : mapping of str to float
        Bytes by metric, one value each: ``peak_bytes``, ``at_peak_ITEM_bytes``, and what the allocator holds beyond.

    Returns
    -------
    dict of str to float
        Bytes by item, and ``peak``. Slack is what was reserved and not allocated at the peak, without fragmentation.
    """
    found = {item: values.get(f"at_peak_{item.replace(' ', '_')}_bytes", 0) for item in ITEMS}
    found |= {_WORKSPACE: values.get("workspace_bytes", 0), "peak": values["peak_bytes"]}
    if "reserved_bytes" in values:
        unused = values["reserved_bytes"] - values["peak_bytes"]
        free = min(values.get("fragmentation_bytes", 0), unused)
        found |= {"fragmentation": free, "allocator slack": unused - free, "CUDA context": values["context_bytes"]}
    return {item: float(size) for item, size in found.items()}


def largest_context(configuration: Configuration, limit_bytes: float, *, multiple: int = 64, **how: object) -> int:
    """Forecast the longest context whose step fits.

    Parameters
    ----------
    configuration : Configuration
        Its context is replaced.
    limit_bytes : float
        What the allocator may give out.
    multiple : int
        Contexts are multiples of it.
    **how
        As for :func:`predict`.

    Returns
    -------
    int
        Tokens; 0 when not even `multiple` fits.
    """
    return largest_contexts(configuration, [limit_bytes], multiple=multiple, **how)[0]


def largest_contexts(
    configuration: Configuration, limits_bytes: Iterable[float], *, multiple: int = 64, **how: object
) -> list[int]:
    """Forecast the longest context whose step fits, for each of several limits: each context is worked out once.

    Parameters
    ----------
    configuration, multiple, **how
        As for :func:`largest_context`.
    limits_bytes : iterable of float

    Returns
    -------
    list of int
        Tokens.
    """

    @functools.cache
    def peak(count: int) -> float:
        return float(moments(dataclasses.replace(configuration, context=count * multiple), **how)["total_bytes"].max())

    def longest(limit: float) -> int:
        above = 1
        while peak(above) <= limit:
            above *= 2
        # All that fit come first: as many as there are before the first that does not.
        return multiple * bisect_left(range(1, above), True, key=lambda count: peak(count) > limit)

    return [longest(limit) for limit in limits_bytes]


def kv_bytes_per_token(layers: int, kv_heads: int, d_head: int, *, element_bytes: float = 2) -> float:
    """Size of the keys and values that serving keeps for each token of each sequence.

    Parameters
    ----------
    layers, kv_heads, d_head : int
        With grouped-query attention there are fewer heads of keys and values than of queries.
    element_bytes : float
        2 for fp16 and bf16, 1 for an 8-bit cache.

    Returns
    -------
    float
        ``2 · layers · kv_heads · d_head · element_bytes``.
    """
    return 2 * layers * kv_heads * d_head * element_bytes


def serving(
    configuration: Configuration,
    gpu: Gpu,
    contexts: Iterable[int],
    *,
    kv_heads: int | None = None,
    weight_bytes: float = 2,
    kv_bytes: float = 2,
    usable: float = 0.9,
) -> pd.DataFrame:
    """Say how many sequences of a length a GPU can serve at once.

    Parameters
    ----------
    configuration : Configuration
        Its batch and context are not used.
    gpu : Gpu
        The largest memory it is sold with counts.
    contexts : iterable of int
        Tokens a sequence, prompt and answer.
    kv_heads : int, optional
        Heads of keys and values; as many as of queries when omitted.
    weight_bytes, kv_bytes : float
        Bytes a weight and an element of the cache.
    usable : float
        Share of the memory; the rest is for context, libraries and fragmentation.

    Returns
    -------
    DataFrame
        ``gpu, context, weights_bytes, kv_bytes_per_sequence, prefill_bytes, decode_bytes, largest_batch``. One prompt
        at a time is prefilled; what one layer needs for it (16-bit: three of the width and three of the MLP's, or in
        attention eight of the width) lasts a moment. Decoding needs as much for one token of each sequence, and its
        logits in 16 bits and in fp32. Missing when not even the weights fit.
    """
    c = configuration
    weights = weight_bytes * envelope(c).params
    room = usable * max(gpu.memory_gb) * 1e9 - weights
    a_token = kv_bytes_per_token(c.layers, kv_heads or c.heads, c.d_head, element_bytes=kv_bytes)
    a_layer = max(16 * c.d_model, 6 * c.d_model + 6 * c.d_ff)  # bytes a token that is being computed
    found = pd.DataFrame({"gpu": gpu.name, "context": list(contexts), "weights_bytes": weights})
    cache, prefill = a_token * found["context"], a_layer * found["context"] + 6 * c.vocabulary
    decoding = a_layer + 6 * c.vocabulary
    # The cache of a whole batch, and on top the larger of a prompt's prefill and a step of decoding.
    most = np.minimum((room - prefill) // cache, room // (cache + decoding)).clip(0).astype("Int64")
    return found.assign(
        kv_bytes_per_sequence=cache,
        prefill_bytes=prefill,
        decode_bytes=decoding,
        largest_batch=most if room > 0 else pd.array([pd.NA] * len(found), "Int64"),
    )
