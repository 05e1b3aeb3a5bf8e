"""One transformer layer, forward, in several implementations of the same arithmetic: the rungs of a ladder.

RMSNorm, rotary positions, causal attention, SwiGLU, two residuals, no biases, bf16 weights. A step passes through
several layers, each with its own weights, so that no weight is still in the L2 cache because it was just used. Prefill
runs a whole context at once; decode runs one token against a cache of keys and values.

Shapes are written B (batch), T (tokens), S (positions in the cache), D (``hidden``), H (heads), K (head size, ``D /
H``), F (``d_ff``).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from nsightkit.workloads.models import (
    DTYPES,
    EPSILON,
    Samples,
    Workload,
    fp8_matmul,
    future_mask,
    naive_attention,
    rotary_tables,
    rotate,
)
from nsightkit.workloads.phases import phase

#: The largest value of float8_e4m3fn.
_LARGEST_FP8 = 448.0
#: Scale of all inputs in fp8, fixed as after a calibration: inputs up to 56 fit, and those above 0.002 keep all bits.
_INPUT_SCALE = 0.125


@dataclasses.dataclass(frozen=True)
class Rung:
    """An implementation of the layer.

    Parameters
    ----------
    change : str
        What is different from `base`.
    base : str or None
        The rung that it changes; None for the first.
    attention : {"naive", "sdpa"}
        Scores written to memory, or PyTorch's fused attention.
    joined : bool
        One GEMM for queries, keys and values, and one for gate and up.
    compiled : str or None
        Mode of ``torch.compile``; None runs eagerly.
    graphed : bool
        Replay a CUDA graph.
    triton : bool
        Use the Triton kernel of the mode: SwiGLU in prefill, the GEMV in decode.
    fp8 : bool
        GEMMs in fp8, with a scale per tensor.
    """

    change: str
    base: str | None = None
    attention: Literal["naive", "sdpa"] = "sdpa"
    joined: bool = True
    compiled: str | None = None
    graphed: bool = False
    triton: bool = False
    fp8: bool = False


#: {mode: {name: Rung}}, each in the order of the ladder.
RUNGS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, dict[str, Rung]])

#: The rung that :func:`reference` runs, in float64.
_REFERENCE = Rung("one operation after the other", attention="naive", joined=False)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """Sizes, and the implementation that runs.

    Parameters
    ----------
    mode : {"prefill", "decode"}
    rung : str
        A name in :data:`RUNGS` of that mode.
    batch : int
        Sequences; 1 in decode with Triton.
    context : int
        Tokens of a prefill, or positions that a decoded token sees, itself included.
    hidden, heads, d_ff : int
    layers : int
        Layers that a step passes through.
    precision : {"bf16", "fp16", "fp32"}

    Notes
    -----
    At hidden 4096, d_ff 11,008 and 2,048 tokens a layer is 0.86 TFLOP, 1.2 ms or more on an H100, and its 45 eager
    launches take the CPU 0.2 ms: a CUDA graph gains 0 to 2%. One decoded token reads 440 MB in at least 131 µs (H100)
    or 91 µs (H200), and 40 eager launches take 200 µs: decode is launch-bound until it is graphed.
    """

    mode: str
    rung: str
    batch: int = 1
    context: int = 48
    hidden: int = 64
    heads: int = 4
    d_ff: int = 176
    layers: int = 3
    precision: str = "bf16"


class Fp8Weight(NamedTuple):
    """A weight in fp8, its scale, and the scale of the input that it is multiplied with."""

    values: Tensor
    scale: Tensor
    input_scale: Tensor


class Weights(NamedTuple):
    """Weights of one layer, each a Tensor or an ``Fp8Weight``; the norms are Tensors (D,)."""

    norm_1: Tensor
    qkv: Any  #: (3D, D)
    out: Any  #: (D, D)
    norm_2: Tensor
    gate_up: Any  #: (2F, D)
    down: Any  #: (D, F)


class Shared(NamedTuple):
    """What all layers share: how many heads, rotary tables (T, K / 2), the mask of the future (T, T), and `position`.

    `position` (1,) is the place in the cache to which decode writes its token.
    """

    heads: int
    cosine: Tensor
    sine: Tensor
    future: Tensor
    position: Tensor


class Kernels(NamedTuple):
    """Functions that replace PyTorch's: ``linear(x, weight)`` and ``swiglu(gate_up)``."""

    linear: Callable[[Tensor, Any], Tensor]
    swiglu: Callable[[Tensor], Tensor]


#: Keys and values of one layer, (B, H, S, K) each.
_Cache = tuple[Tensor, Tensor]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in elementary operations, in fp32 or wider, as model code writes it."""
    wide = x.to(_at_least_fp32(x.dtype))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return wide.to(x.dtype) * weight


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Choose fp32, or the type itself where it is wider."""
    return torch.promote_types(dtype, torch.float32)


def fp8_linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Multiply x (B, T, columns) with a weight (rows, columns) in fp8; gives (B, T, rows) in the type of x."""
    x_fp8 = _to_fp8(x, weight.input_scale).flatten(0, 1)
    product = fp8_matmul(x_fp8, weight.values.t(), weight.input_scale, weight.scale, x.dtype)
    return product.view(*x.shape[:2], -1)


def swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU of gate and up side by side (…, 2F), as two operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Divide by the scale, clamp to the range of fp8, and convert: the result times the scale is x again."""
    return (x.float() / scale).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)


def _weights_to_fp8(w: Weights) -> Weights:
    """Convert the matrices of a layer to fp8, each with the scale that maps its largest weight to the largest value."""
    converted = []
    for weight in (w.qkv, w.out, w.gate_up, w.down):
        scale = weight.abs().amax().float() / _LARGEST_FP8
        converted.append(Fp8Weight(_to_fp8(weight, scale), scale, torch.full_like(scale, _INPUT_SCALE)))
    qkv, out, gate_up, down = converted
    return w._replace(qkv=qkv, out=out, gate_up=gate_up, down=down)


#: The kernels of a rung that replaces none.
_PYTORCH_KERNELS = Kernels(F.linear, swiglu)


def forward(
    x: Tensor, w: Weights, shared: Shared, cache: _Cache | None, rung: Rung, kernels: Kernels = _PYTORCH_KERNELS
) -> Tensor:
    """Pass through one layer.

    Parameters
    ----------
    x : Tensor
        (B, T, D).
    w : Weights
    shared : Shared
    cache : (keys, values) or None
        (B, H, S, K) each; None in prefill. In decode the token's own keys and values are written to
        ``shared.position``, and the token attends to all S.
    rung : Rung
        The implementation. This function reads its ``attention`` and ``joined`` (one GEMM for q, k and v); compilation,
        CUDA graph and fp8 are applied around it.
    kernels : Kernels
        What replaces PyTorch's functions in rungs that are joined; the separate GEMMs are always PyTorch's.

    Returns
    -------
    Tensor
        (B, T, D).
    """
    normed = norm(x, w.norm_1)
    if rung.joined:
        projected = list(kernels.linear(normed, w.qkv).chunk(3, dim=-1))
    else:
        projected = [F.linear(normed, weight) for weight in w.qkv.chunk(3)]
    # (B, T, D) each becomes (B, H, T, K).
    q, k, v = [torch.unflatten(part, -1, (shared.heads, -1)).transpose(1, 2) for part in projected]
    q = rotate(q, shared.cosine, shared.sine)
    k = rotate(k, shared.cosine, shared.sine)
    if cache is not None:  # add the token's own to the cache, and attend to all of it
        keys, values = cache
        keys[:, :, shared.position] = k
        values[:, :, shared.position] = v
        k = keys
        v = values
    if rung.attention == "naive":
        # In decode the mask is (1, 1), a single False: nothing in the cache comes after the token.
        attended = naive_attention(q, k, v, shared.future, softmax_dtype=_at_least_fp32(q.dtype))
    else:
        # is_causal, not a mask: a mask tensor would rule out flash attention. A decoded token sees the whole cache.
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
    x = x + kernels.linear(attended.transpose(1, 2).flatten(2), w.out)
    normed = norm(x, w.norm_2)
    if rung.joined:
        activated = kernels.swiglu(kernels.linear(normed, w.gate_up))
    else:
        gate, up = [F.linear(normed, weight) for weight in w.gate_up.chunk(2)]
        activated = F.silu(gate) * up
    return x + kernels.linear(activated, w.down)


def reference(x: Tensor, weights: Sequence[Weights], shared: Shared, caches: Sequence[_Cache | None]) -> Tensor:
    """Pass through the layers in float64, one operation after the other.

    Parameters
    ----------
    x : Tensor
        (B, T, D).
    weights : sequence of Weights
        Not in fp8.
    shared : Shared
    caches : sequence of (keys, values) or None
        One per layer.

    Returns
    -------
    Tensor
        (B, T, D), float64.
    """
    x = x.double()
    exact_shared = shared._replace(cosine=shared.cosine.double(), sine=shared.sine.double())
    for w, cache in zip(weights, caches, strict=True):
        exact_weights = Weights(*(part.double() for part in w))
        exact_cache = None if cache is None else (cache[0].double(), cache[1].double())
        x = forward(x, exact_weights, exact_shared, exact_cache, _REFERENCE)
    return x


class LayerRun(Workload):
    """Layers that a step passes through.

    Parameters
    ----------
    config : LayerConfig
    device : str

    Attributes
    ----------
    x : Tensor
        Input of every step, (B, T, D).
    weights : list of Weights
        In the layers' own type, also where the rung runs in fp8.
    caches : list
        (keys, values) of each layer; None in prefill.
    shared : Shared
    program : callable
        Passes through all layers once, in inference mode.
    """

    @torch.inference_mode()  # weights and inputs, too: torch.compile would compile again for ordinary tensors
    def __init__(self, config: LayerConfig, device: str = "cpu") -> None:
        super().__init__(device)
        self.config = config
        self.rung = RUNGS[config.mode][config.rung]
        self.dtype = DTYPES[config.precision]
        self.rule_out_cudnn_attention()
        torch.manual_seed(0)
        tokens = 1 if config.mode == "decode" else config.context
        self.x = self._random(config.batch, tokens, config.hidden)
        self.weights = [self._draw_weights() for _ in range(config.layers)]
        self.caches: list[_Cache | None] = [None] * config.layers
        if config.mode == "decode":
            shape = (config.batch, config.heads, config.context, config.hidden // config.heads)
            self.caches = [(self._random(*shape), self._random(*shape)) for _ in self.caches]
        self.shared = self._make_shared(tokens)
        self.program = self._build_program()

    def _random(self, *shape: int) -> Tensor:
        """Draw a tensor from a normal distribution, in the layers' type.

        It is drawn in fp32, so that all types get the same numbers, rounded.
        """
        return torch.randn(shape, device=self.device).to(self.dtype)

    def _draw_weights(self) -> Weights:
        """Draw the weights of a layer, scaled so that activations keep their size from layer to layer."""
        hidden = self.config.hidden
        d_ff = self.config.d_ff
        return Weights(
            norm_1=1 + 0.1 * self._random(hidden),
            qkv=self._random(3 * hidden, hidden) / math.sqrt(hidden),
            out=self._random(hidden, hidden) / math.sqrt(hidden),
            norm_2=1 + 0.1 * self._random(hidden),
            gate_up=self._random(2 * d_ff, hidden) / math.sqrt(hidden),
            down=self._random(hidden, d_ff) / math.sqrt(d_ff),
        )

    def _make_shared(self, tokens: int) -> Shared:
        """Make what all layers share, for the last `tokens` positions of the context."""
        config = self.config
        positions = torch.arange(config.context - tokens, config.context, device=self.device)
        cosine, sine = rotary_tables(positions, config.hidden // config.heads)
        # The last position is the one that decode computes: it has a single token, at the end of a full cache.
        return Shared(config.heads, cosine, sine, future_mask(tokens, self.device), positions[-1:])

    def _build_program(self) -> Callable[[], Tensor]:
        """Build the function that passes through all layers as the rung has it: kernels, compilation, CUDA graph."""
        rung = self.rung
        on_gpu = self.device.type == "cuda"
        kernels = _PYTORCH_KERNELS
        weights = self.weights
        if rung.triton:
            kernels = self._triton_kernels()
        if rung.fp8:
            kernels = Kernels(fp8_linear, swiglu)
            weights = [_weights_to_fp8(w) for w in self.weights]
        layer: Callable[..., Tensor] = forward
        if rung.compiled is not None:
            self.callback(torch._dynamo.reset)  # when the workload is closed: the next one may compile other sizes
            # A CPU would need a C++ compiler for inductor; aot_eager traces the same program and fuses nothing.
            options: dict[str, Any] = {"mode": rung.compiled} if on_gpu else {"backend": "aot_eager"}
            layer = torch.compile(forward, fullgraph=True, dynamic=False, **options)

        def program() -> Tensor:
            x = self.x
            for w, cache in zip(weights, self.caches, strict=True):
                x = layer(x, w, self.shared, cache, rung, kernels)
            return x

        if rung.graphed and on_gpu:
            return self._capture_graph(program)
        return program

    def _triton_kernels(self) -> Kernels:
        """Import the Triton kernel of the mode; a CPU without Triton's interpreter runs PyTorch's operations."""
        if self.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return _PYTORCH_KERNELS
        from nsightkit.workloads import layer_triton

        if self.config.mode == "prefill":
            return Kernels(F.linear, layer_triton.swiglu)
        return Kernels(layer_triton.gemv, swiglu)

    def _capture_graph(self, program: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture a program in a CUDA graph, and return the function that replays it."""
        side_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream(self.device))
        # PyTorch asks for first runs on a side stream: they allocate, compile and tune, which a graph may not hold.
        with torch.cuda.stream(side_stream):
            for _ in range(3):
                program()
        torch.cuda.current_stream(self.device).wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = program()

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
            (B, T, D). A CUDA graph writes to the same memory each time.
        """
        with phase("step"):
            return self.program()

    @torch.inference_mode()
    def samples(self) -> Samples:
        """Compare the output of the layers with float64.

        Returns
        -------
        dict of str to list of float
            ``relative_error``: the norm of the difference divided by the norm of the reference.
        """
        output = self.step().double()
        exact = reference(self.x, self.weights, self.shared, self.caches)
        return {"relative_error": [float((output - exact).norm() / exact.norm())]}


def run(device: str, **parameters: Any) -> LayerRun:
    """Pass through transformer layers in one implementation.

    Parameters
    ----------
    device : str
        ``"cuda"`` or ``"cpu"``. A CPU runs every rung, without CUDA graphs, without inductor, and without Triton unless
        ``TRITON_INTERPRET=1`` was set when Python started.
    **parameters
        Fields of :class:`LayerConfig`.

    Returns
    -------
    LayerRun
        A context manager with ``step()`` and ``samples()``.
    """
    return LayerRun(LayerConfig(**parameters), device)
