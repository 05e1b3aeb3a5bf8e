"""One transformer layer, forward, in many implementations of the same arithmetic: the rungs of a ladder.

RMSNorm, rotary positions, causal attention, SwiGLU, two residuals, no biases, 16-bit weights. A step passes through
several layers, each with weights of its own, so that no weight is found in the level-2 cache because it was just used.
Prefill runs a whole context at once; decode runs one token against a cache of keys and values.

Shapes are written B (batch), T (tokens), S (positions in the cache), D (``hidden``), H (heads), K (head size: ``D /
H``), F (``d_ff``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsightkit.workloads.models import EPSILON, rotated, written_out
from nsightkit.workloads.phases import phase
from nsightkit.workloads.workload import DTYPES, Workload, product_fp8

__all__ = ["RUNGS", "LayerConfig", "LayerRun", "Rung", "Weights", "reference", "start", "written"]

_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_LARGEST_FP8 = 448.0  # of float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Rung:
    """An implementation of the layer.

    Parameters
    ----------
    change : str
        What is different from `base`.
    base : str or None
        The rung it changes; None for the first.
    attention : {"written", "fused", "flash", "cudnn"}
        Its scores written out, PyTorch's fused attention, or one backend of it and no other.
    joined : bool
        One GEMM for queries, keys and values, and one for gate and up.
    compiled : mapping or None
        Arguments of ``torch.compile``; None to run it eagerly.
    graphed : bool
        Replayed from a CUDA graph.
    streams : bool
        Gate and up on two streams.
    fp8 : bool
        GEMMs of 8-bit numbers, scaled by tensor.
    triton : bool
        Hand-written Triton kernels for all but prefill's GEMMs and attention.
    switches : tuple of str
        Of the Triton kernels. Prefill's: ``epilogue``, one for the GEMM of gate and up as well, with the activation in
        it. Decode's: ``streamed``, programs that stay and stream; ``overlapped``, kernels that begin before the ones
        before them end; ``whole_mlp``, an MLP in one kernel.
    """

    change: str
    base: str | None
    attention: Literal["written", "fused", "flash", "cudnn"] = "fused"
    joined: bool = True
    compiled: Mapping[str, Any] | None = None
    graphed: bool = False
    streams: bool = False
    fp8: bool = False
    triton: bool = False
    switches: tuple[str, ...] = ()


_DEFAULT: Mapping[str, Any] = MappingProxyType({})
_AUTOTUNED: Mapping[str, Any] = MappingProxyType({"mode": "max-autotune-no-cudagraphs"})
#: With it Inductor writes a product of one row as a sum, and searches tile sizes until that is fast.
_SUMS: Mapping[str, Any] = MappingProxyType({"options": {"coordinate_descent_tuning": True}})

#: {mode: {name: Rung}}, each in the order of the ladder; null results and what goes beyond come last.
RUNGS: Mapping[str, Mapping[str, Rung]] = MappingProxyType(
    {
        "prefill": {
            "naive": Rung("everything written out", None, "written", joined=False),
            "sdpa": Rung("fused attention", "naive", joined=False),
            "fused": Rung("one GEMM for q, k, v, one for gate and up", "sdpa"),
            "compiled": Rung("torch.compile", "fused", compiled=_DEFAULT),
            "autotuned": Rung("GEMMs chosen by trial", "compiled", compiled=_AUTOTUNED),
            "graphed": Rung("a CUDA graph", "compiled", compiled=_DEFAULT, graphed=True),
            "two-streams": Rung("gate and up side by side", "sdpa", joined=False, streams=True),
            "graphed-eager": Rung("a CUDA graph", "fused", graphed=True),
            "flash": Rung("flash attention forced", "compiled", "flash", compiled=_DEFAULT),
            "cudnn": Rung("cuDNN attention forced", "compiled", "cudnn", compiled=_DEFAULT),
            "triton": Rung("own kernels between the GEMMs", "compiled", triton=True),
            "epilogue": Rung("SwiGLU inside an own GEMM", "triton", triton=True, switches=("epilogue",)),
            "fp8": Rung("GEMMs in 8 bits", "compiled", compiled=_DEFAULT, fp8=True),
        },
        "decode": {
            "eager": Rung("everything but attention written out", None, joined=False),
            "fused": Rung("one GEMM for q, k, v, one for gate and up", "eager"),
            "compiled": Rung("torch.compile", "fused", compiled=_DEFAULT),
            "graphed": Rung("a CUDA graph", "compiled", compiled=_DEFAULT, graphed=True),
            "graphed-eager": Rung("a CUDA graph", "fused", graphed=True),
            "sums": Rung("products written as sums", "graphed", compiled=_SUMS, graphed=True),
            "triton": Rung("own kernels throughout", "graphed", graphed=True, triton=True),
            "streamed": Rung(
                "weights streamed by programs that stay", "triton", graphed=True, triton=True, switches=("streamed",)
            ),
            "overlapped": Rung(
                "each kernel begins before the last has ended",
                "streamed",
                graphed=True,
                triton=True,
                switches=("streamed", "overlapped"),
            ),
            "one-mlp": Rung(
                "the MLP in one kernel",
                "overlapped",
                graphed=True,
                triton=True,
                switches=("streamed", "overlapped", "whole_mlp"),
            ),
        },
    }
)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """Sizes, and which implementation runs.

    Parameters
    ----------
    mode : {"prefill", "decode"}
    rung : str
        A name in :data:`RUNGS` of that mode.
    batch : int
    context : int
        Tokens of a prefill, or positions that a decoded token sees, itself included.
    hidden, heads, d_ff : int
    layers : int
        Layers a step passes through.
    precision : {"bf16", "fp16"}
    compiler : str
        Backend of ``torch.compile``; one other than Inductor needs no compiler, and fuses nothing.
    seed : int
    """

    mode: Literal["prefill", "decode"] = "prefill"
    rung: str = "naive"
    batch: int = 1
    context: int = 48
    hidden: int = 64
    heads: int = 4
    d_ff: int = 176
    layers: int = 3
    precision: Literal["bf16", "fp16"] = "bf16"
    compiler: str = "inductor"
    seed: int = 0


class Weights(NamedTuple):
    """Of one layer: ``qkv`` (3D, D), ``out`` (D, D), ``gate_up`` (2F, D), ``down`` (D, F), and parts of the joined.

    What is joined and its parts are the same memory.
    """

    norm_1: Tensor
    qkv: Any
    out: Any
    norm_2: Tensor
    gate_up: Any
    down: Any
    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    up: Tensor


class _Given(NamedTuple):
    """What all layers share: rotary tables (T, K / 2), the future's mask (T, T), the token's place in the cache."""

    cosine: Tensor
    sine: Tensor
    future: Tensor | None
    position: Tensor | None


class _Eight(NamedTuple):
    """A weight in 8 bits, what it is to be multiplied by, and the same of the input it was made for."""

    weight: Tensor
    scale: Tensor
    input_scale: Tensor


_Cache = tuple[Tensor, Tensor]
_Layer = Callable[[Tensor, Weights, _Given, _Cache | None], Tensor]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in elementary operations, in fp32, as model code writes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return wide.to(x.dtype) * weight


def _attended(q: Tensor, k: Tensor, v: Tensor, given: _Given) -> Tensor:
    # The softmax of scores that are written out is taken in fp32.
    return written_out(q, k, v, given.future, softmax_in=torch.float32)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, given: _Given) -> Tensor:
    """Attend by PyTorch's fused attention."""
    # is_causal, not a mask: a mask tensor would rule out flash attention. A decoded token sees the whole cache.
    return F.scaled_dot_product_attention(q, k, v, is_causal=given.position is None)


def _side_by_side(x: Tensor, w: Weights, side: Any) -> tuple[Tensor, Tensor]:
    """Gate and up on two streams of a GPU."""
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        up = F.linear(x, w.up)
    gate = F.linear(x, w.gate)
    main.wait_stream(side)
    return gate, up


def _in_eight(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)


def _linear_eight(x: Tensor, weight: _Eight) -> Tensor:
    flat = _in_eight(x, weight.input_scale).flatten(0, 1)
    return product_fp8(flat, weight.weight.t(), weight.input_scale, weight.scale, x.dtype).view(*x.shape[:2], -1)


def _forward(
    x: Tensor,
    w: Weights,
    given: _Given,
    cache: _Cache | None,
    *,
    heads: int,
    attend: Callable[[Tensor, Tensor, Tensor, _Given], Tensor],
    joined: bool,
    linear: Callable[[Tensor, Any], Tensor] = F.linear,
    side: Any = None,
) -> Tensor:
    """Pass x (B, T, D) through a layer of PyTorch's operations."""
    batch, tokens, hidden = x.shape
    normed = norm(x, w.norm_1)
    if joined:
        parts = linear(normed, w.qkv).chunk(3, dim=-1)
    else:
        parts = (F.linear(normed, w.q), F.linear(normed, w.k), F.linear(normed, w.v))
    q, k, v = (part.view(batch, tokens, heads, -1).transpose(1, 2) for part in parts)
    q, k = (rotated(part, given.cosine, given.sine) for part in (q, k))
    if cache is not None:
        keys, values = cache
        keys[:, :, given.position], values[:, :, given.position] = k, v
        k, v = keys, values
    mixed = attend(q, k, v, given).transpose(1, 2).reshape(batch, tokens, hidden)
    x = x + linear(mixed, w.out)
    normed = norm(x, w.norm_2)
    if joined:
        gate, up = linear(normed, w.gate_up).chunk(2, dim=-1)
    elif side is not None:
        gate, up = _side_by_side(normed, w, side)
    else:
        gate, up = F.linear(normed, w.gate), F.linear(normed, w.up)
    return x + linear(F.silu(gate) * up, w.down)


def reference(
    x: Tensor, weights: Sequence[Weights], heads: int, caches: Sequence[_Cache] | None = None
) -> tuple[Tensor, list[_Cache]]:
    """Pass through the layers in float64, written by the definitions and not as the rungs are.

    Parameters
    ----------
    x : Tensor
        (B, T, D). With caches T is 1, and the token takes the last place of the cache.
    weights : sequence of Weights
    heads : int
    caches : sequence of (keys, values), optional
        Each (B, H, S, K), keys rotated.

    Returns
    -------
    output : Tensor
        (B, T, D), float64.
    caches : list of (keys, values)
        What attention saw in each layer, (B, H, S, K), float64.
    """
    x, seen = x.double(), []
    half = x.shape[-1] // heads // 2
    for number, w in enumerate(weights):
        normed = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * w.norm_1.double()
        q, k, v = (
            torch.einsum("btd,nd->btn", normed, m.double()).view(*x.shape[:2], heads, -1) for m in (w.q, w.k, w.v)
        )
        before = 0 if caches is None else caches[number][0].shape[2] - 1
        place = torch.arange(before, before + x.shape[1], dtype=torch.float64, device=x.device)
        turn = torch.polar(
            torch.ones((), dtype=torch.float64, device=x.device), torch.outer(place, _frequency(half, x))
        )
        q, k = (
            torch.view_as_real(torch.complex(t[..., :half], t[..., half:]) * turn[:, None]).movedim(-1, -2).flatten(-2)
            for t in (q, k)
        )
        if caches is not None:
            k, v = (
                torch.cat([old[:, :, :before].transpose(1, 2).double(), new], 1)
                for old, new in zip(caches[number], (k, v), strict=True)
            )
        scores = torch.einsum("bthc,bshc->bhts", q, k) / math.sqrt(2 * half)
        later = torch.arange(k.shape[1], device=x.device) > place[:, None]
        mixed = torch.einsum("bhts,bshc->bthc", scores.masked_fill(later, -math.inf).softmax(-1), v).flatten(2)
        x = x + mixed @ w.out.double().t()
        normed = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * w.norm_2.double()
        gate, up = normed @ w.gate.double().t(), normed @ w.up.double().t()
        x = x + (gate * gate.sigmoid() * up) @ w.down.double().t()
        seen.append((k.transpose(1, 2), v.transpose(1, 2)))
    return x, seen


def _frequency(pairs: int, like: Tensor) -> Tensor:
    return torch.pow(10_000.0, -(torch.arange(pairs, dtype=torch.float64, device=like.device) / pairs))


def triton_kernels(device: torch.device) -> ModuleType | None:
    """Import the Triton kernels, for the interpreter where there is no GPU; None without Triton."""
    if device.type != "cuda":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
    try:
        from nsightkit.workloads import layer_triton
    except ImportError:
        return None
    return layer_triton


class LayerRun(Workload):
    """Layers that are passed through a step at a time.

    Attributes
    ----------
    parameters : dict
        The configuration as plain values, and ``instead``: what ran in place of what this device cannot run, empty
        where the rung ran as it is named.
    weights : list of Weights
    caches : list of (keys, values) or None

    Notes
    -----
    A forced backend of attention is a setting of the whole process, taken back by ``close``.
    """

    @torch.inference_mode()  # also what is drawn here: a compiler takes tensors of another kind for another program
    def __init__(self, config: LayerConfig, device: str = "cpu") -> None:
        super().__init__(config, device)
        self._rung = RUNGS[config.mode][config.rung]
        self._instead: list[str] = []
        drawn = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(config.seed)
        self._random = functools.partial(torch.randn, generator=drawn, device=self.device)
        self.dtype = DTYPES[config.precision]
        tokens = 1 if config.mode == "decode" else config.context
        self.x = self._random(config.batch, tokens, config.hidden).to(self.dtype)
        self.weights = [self._drawn() for _ in range(config.layers)]
        self.caches: list[_Cache] | None = None
        if config.mode == "decode":
            shape = (config.batch, config.heads, config.context, config.hidden // config.heads)
            self.caches = [
                (self._random(shape).to(self.dtype), self._random(shape).to(self.dtype)) for _ in self.weights
            ]
        self._given = self._shared(tokens)
        self._run = self._built()
        self.parameters["instead"] = "; ".join(self._instead)

    def _drawn(self) -> Weights:
        """Random weights that keep the size of what passes through them."""
        width, inner = self.config.hidden, self.config.d_ff
        qkv, out, gate_up, down = (
            (self._random(rows, columns) / math.sqrt(columns)).to(self.dtype)
            for rows, columns in ((3 * width, width), (width, width), (2 * inner, width), (width, inner))
        )
        norm_1, norm_2 = ((1 + 0.1 * self._random(width)).to(self.dtype) for _ in range(2))
        return Weights(norm_1, qkv, out, norm_2, gate_up, down, *qkv.chunk(3), *gate_up.chunk(2))

    def _shared(self, tokens: int) -> _Given:
        context, decoding = self.config.context, self.config.mode == "decode"
        place = torch.arange(context - tokens, context, dtype=torch.float64, device=self.device)
        angle = torch.outer(place, _frequency(self.config.hidden // self.config.heads // 2, place))
        written = self._rung.attention == "written" and not decoding
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=self.device).triu(1) if written else None
        position = torch.tensor([context - 1], device=self.device) if decoding else None
        return _Given(angle.cos().float(), angle.sin().float(), future, position)

    def _built(self) -> Callable[[], Tensor]:
        """Put the rung together."""
        rung, cuda = self._rung, self.device.type == "cuda"
        if rung.attention in _BACKENDS and self._can(cuda or rung.attention == "flash", "the fused attention of a CPU"):
            self.enter_context(sdpa_kernel(_BACKENDS[rung.attention]))  # type: ignore[arg-type] # it lets errors pass
        weights = self.weights
        if rung.fp8:
            weights, self.parameters["use_fast_accum"] = self._eight(), cuda
        layer = self._layer(cuda)
        if hasattr(layer, "prepared"):
            weights = [layer.prepared(w) for w in weights]
        if rung.compiled is not None:
            compiler = self.config.compiler
            fuses = self._can(compiler == "inductor", f"traced by {compiler}, which fuses nothing")
            self.callback(torch._dynamo.reset)
            layer = torch.compile(
                layer, backend=compiler, fullgraph=True, dynamic=False, **(rung.compiled if fuses else {})
            )
        caches: Sequence[_Cache | None] = self.caches or [None] * len(weights)

        def chain() -> Tensor:
            x = self.x
            for w, cache in zip(weights, caches, strict=True):
                x = layer(x, w, self._given, cache)
            return x

        graphed = rung.graphed and self._can(cuda, "launched one by one: a CPU has no CUDA graphs")
        return self._graphed(chain) if graphed else chain

    def _can(self, possible: bool, instead: str) -> bool:
        """Whether this device can run something; where it cannot, what runs instead is noted."""
        if not possible:
            self._instead.append(instead)
        return possible

    def _layer(self, cuda: bool) -> _Layer:
        rung = self._rung
        if rung.triton:
            kernels = triton_kernels(self.device)
            if kernels is not None:
                self._can(cuda, "through Triton's interpreter")
                return self._of_triton(kernels, cuda)
            if cuda:
                raise RuntimeError("this rung needs Triton, which is not installed")
            self._can(False, "PyTorch's operations: Triton is not installed")
        two_streams = rung.streams and self._can(cuda, "one after the other: a CPU has no streams")
        options: dict[str, Any] = {
            "heads": self.config.heads,
            "attend": _attended if rung.attention == "written" else fused_attention,
            "joined": rung.joined,
            "linear": _linear_eight if rung.fp8 else F.linear,
            "side": torch.cuda.Stream(self.device) if two_streams else None,  # type: ignore[no-untyped-call]
        }
        return lambda x, w, given, cache: _forward(x, w, given, cache, **options)

    def _of_triton(self, kernels: ModuleType, cuda: bool) -> _Layer:
        switches, heads = dict.fromkeys(self._rung.switches, True), self.config.heads
        if "epilogue" in switches:
            words = "SwiGLU in a kernel of its own: this Triton has no descriptors of matrices"
            switches["epilogue"] = self._can(kernels.DESCRIPTORS, words)
        if "overlapped" in switches:
            why_not = kernels.dependent_launch(self.device)
            switches["overlapped"] = self._can(not why_not, f"launched one after the other: {why_not}")
        if self.config.mode == "prefill":
            return functools.partial(kernels.prefill, heads=heads, **switches)
        # Triton's interpreter has no multiprocessors: any number will do.
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count if cuda else 3
        made: _Layer = kernels.Decode(heads, sms, **switches)
        return made

    def _eight(self) -> list[Weights]:
        """Weights in 8 bits, with scales of their inputs from a pass in 16 bits, as calibration finds them."""
        largest: dict[int, Tensor] = {}

        def watched(x: Tensor, weight: Tensor) -> Tensor:
            largest[id(weight)] = x.abs().amax().float()
            return F.linear(x, weight)

        x = self.x
        for w in self.weights:
            x = _forward(
                x, w, self._given, None, heads=self.config.heads, attend=fused_attention, joined=True, linear=watched
            )

        def eight(weight: Tensor) -> Any:
            scale = weight.abs().amax().float() / _LARGEST_FP8
            return _Eight(_in_eight(weight, scale), scale, largest[id(weight)] / _LARGEST_FP8)

        return [
            w._replace(qkv=eight(w.qkv), out=eight(w.out), gate_up=eight(w.gate_up), down=eight(w.down))
            for w in self.weights
        ]

    def _graphed(self, chain: Callable[[], Tensor]) -> Callable[[], Tensor]:
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # first uses allocate, compile and choose: not what a graph may hold
            for _ in range(3):
                chain()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = chain()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Pass through all layers once.

        Returns
        -------
        Tensor
            (B, T, D). A graphed rung gives the same memory each time.
        """
        with phase("step"):
            return self._run()

    @torch.inference_mode()
    def observed(self) -> dict[str, list[float]]:
        """Compare what the layers give with the same in float64.

        Returns
        -------
        dict of str to list
            One value each: ``max_abs_error``; ``relative_error``, the norm of the difference over that of the
            reference; ``rounding_error``, the same of the reference rounded once to the layers' type: no output of
            that type is nearer.
        """
        output = self.step().double()
        exact, _ = reference(self.x, self.weights, self.config.heads, self.caches)
        size = exact.norm()
        return {
            "max_abs_error": [float((output - exact).abs().max())],
            "relative_error": [float((output - exact).norm() / size)],
            "rounding_error": [float((exact.to(self.dtype).double() - exact).norm() / size)],
        }

    def launches(self) -> list[dict[str, Any]]:
        """Count what a step launches, operation by operation.

        Returns
        -------
        list of dict
            As from :func:`written`, of all layers.
        """
        counted = _Launches()
        with torch.inference_mode(), counted, _Fused(counted):
            self._run()
        return counted.rows


class _Launches(TorchDispatchMode):
    """Writes down operations that move data, each with its FLOPs and the bytes of what it reads and writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.prim.device.default:
            with self:  # in inference mode, operations arrive here that consist of others
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        name, given = func.overloadpacket.__name__, _tensors((args, kwargs))
        if func.is_view or name.startswith(("_unsafe_view", "empty", "new_empty")):
            return result
        # Ordinary cores compute in fp32, whatever their tensors hold.
        flops, unit = max((tensor.numel() for tensor in given), default=0), "fp32"
        read = {id(tensor): tensor for tensor in (given[1:] if name == "copy_" else given)}
        moved = sum(map(_bytes, [*read.values(), *_tensors(result)]))
        if name == "index_put_":  # of the tensor that is written to, only what is written moves
            flops, moved = 0, 2 * _bytes(args[2])
        elif name in ("mm", "bmm"):
            flops, unit = 2 * result.numel() * args[0].shape[-1], _UNITS[result.dtype]
        self.add(name, flops, moved, unit)
        return result

    def add(self, name: str, flops: int, moved: int, unit: str) -> None:
        self.rows.append({"name": name, "flops": flops, "bytes": moved, "unit": unit})


class _Fused(TorchFunctionMode):
    """Counts PyTorch's fused attention as the one kernel it is on a GPU, whatever this device makes of it."""

    def __init__(self, launches: _Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args
        out = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)  # as flash attention lays it out
        flops = (2 if kwargs["is_causal"] else 4) * q.numel() * k.shape[-2]
        self._launches.add("attention", flops, sum(map(_bytes, (q, k, v, out))), _UNITS[q.dtype])
        return out


_UNITS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes that a tensor really has: an expanded dimension has one element."""
    kept = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(kept, start=tensor.element_size())


def start(device: str, **parameters: Any) -> LayerRun:
    """Begin to run layers, with fields of :class:`LayerConfig`."""
    return LayerRun(LayerConfig(**parameters), device)


def written(**parameters: Any) -> list[dict[str, Any]]:
    """Count what one layer of an eager rung launches, at any size and without computing anything.

    An operation counts with the bytes of the tensors it reads and writes, as written: there is no cache. Attention that
    is one kernel counts as one, half of its square when it is causal.

    Parameters
    ----------
    **parameters
        Fields of :class:`LayerConfig`.

    Returns
    -------
    list of dict
        ``name``, ``flops``, ``bytes`` and ``unit`` (``fp32`` for ordinary cores, else the precision of tensor cores),
        in the order they are launched.

    Raises
    ------
    ValueError
        The rung is not made of PyTorch's operations as they are written.
    """
    config = LayerConfig(**{**parameters, "layers": 1})
    rung = RUNGS[config.mode][config.rung]
    if rung.compiled is not None or rung.triton:
        raise ValueError(f"what {config.rung} launches is not what is written")
    with LayerRun(config, "meta") as run:
        return run.launches()
