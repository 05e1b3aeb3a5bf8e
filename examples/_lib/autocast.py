"""Look at every tensor of a training step, in fp32 and under autocast: its type and its bytes (page 06).

The model is a small GPT with its norms after the projections, so each norm reads the result of a matmul.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nsightkit.workloads.models import DTYPES, Workload, autocast

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
#: What a module is called on the page, by the last part of its name; others are not looked at.
_ROLES = {
    "embedding": "embedding",
    "qkv": "linear",
    "scores": "scores",
    "softmax": "softmax",
    "weighted": "weighted",
    "out": "linear",
    "norm_attention": "norm",
    "up": "linear",
    "gelu": "gelu",
    "down": "linear",
    "norm_mlp": "norm",
    "residual": "residual",
    "head": "logits",
    "loss": "loss",
}
_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model, and how its norm is written; the defaults suit a CPU.

    Parameters
    ----------
    vocabulary, hidden, layers, heads, context, batch : int
    norm : {"written", "fused"}
        Layer norm as a chain of elementary operations, or ``F.layer_norm``.
    """

    vocabulary: int = 512
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    batch: int = 4
    norm: Literal["written", "fused"] = "written"


class Norm(nn.Module):
    """Layer norm over the last dimension."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(sizes.hidden))
        self.bias = nn.Parameter(torch.zeros(sizes.hidden))
        self.fused = sizes.norm == "fused"

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (…, D)."""
        if self.fused:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias)
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        return centred * scale * self.weight + self.bias


class Block(nn.Module):
    """Attention and an MLP, each with a norm behind it; the identities are there for hooks to look at."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.heads = sizes.heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.scores = nn.Identity()
        self.softmax = nn.Softmax(-1)
        self.weighted = nn.Identity()
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm_attention = Norm(sizes)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * hidden, hidden, bias=False)
        self.norm_mlp = Norm(sizes)
        self.residual = nn.Identity()

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        """Pass x (B, T, D) through."""
        x = x + self.norm_attention(self._attend(x, future))
        x = x + self.norm_mlp(self.down(self.gelu(self.up(x))))
        return self.residual(x)

    def _attend(self, x: Tensor, future: Tensor) -> Tensor:
        batch, context, hidden = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind()
        scores = self.scores(q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        weights = self.softmax(scores.masked_fill(future, -math.inf))
        mixed = self.weighted(weights @ v)
        return self.out(mixed.transpose(1, 2).reshape(batch, context, hidden))


class Model(nn.Module):
    """A language model with its loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        self.loss = nn.CrossEntropyLoss()
        future = torch.ones(sizes.context, sizes.context, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the mean loss of tokens (B, T + 1), int64."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.future)
        return self.loss(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class Autocast(Workload):
    """One training run in each precision, all of the same model, batch and seed."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        super().__init__(device)
        self.sizes = sizes
        torch.manual_seed(0)
        self.tokens = torch.randint(1, sizes.vocabulary, (sizes.batch, sizes.context + 1), device=self.device)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Train a few steps in each precision, the last one under hooks, and try single operations.

        Yields
        ------
        dict
            One row per tensor, with ``what``, ``precision``, ``name``, ``type`` and ``bytes``. `what` is ``output`` or
            ``gradient`` (of a module's output), ``parameter``, ``parameter gradient``, ``optimizer`` or ``saved``
            (storages kept for backward, each once, without the parameters). Rows ``operation`` have a ``name``, the
            type of their ``input`` and the ``type`` of their result; rows ``loss`` a ``value`` per step; the row
            ``listed`` says by its ``value`` whether rms_norm is on CUDA's fp32 list.
        """
        for precision in ("fp32", "bf16", "fp16"):
            for row in self._train(precision):
                yield {"precision": precision, **row}
            if precision != "fp32":
                for row in operations(self.device, precision):
                    yield {"what": "operation", "precision": precision, **row}
        listed = rms_norm_is_listed()
        if listed is not None:
            yield {"what": "listed", "name": "rms_norm", "value": float(listed)}

    def _train(self, precision: str) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model = Model(self.sizes).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        # A modest first scale: a step that overflows is left out, and there would be no optimizer state to look at.
        scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**10, enabled=precision == "fp16")
        rows: list[dict[str, Any]] = []
        for number in range(_STEPS):
            optimizer.zero_grad()
            with contextlib.ExitStack() as hooks:
                if number == _STEPS - 1:
                    hooks.enter_context(watched(model, rows))
                    hooks.enter_context(saved(model, rows))
                with autocast(self.device, precision):
                    loss = model(self.tokens)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            rows.append({"what": "loss", "value": float(loss.detach())})
        for parameter in model.parameters():
            rows.append(_row("parameter", "", parameter))
            rows.append(_row("parameter gradient", "", parameter.grad))
            for state in optimizer.state[parameter].values():
                rows.append(_row("optimizer", "", state))
        return rows


def _row(what: str, name: str, tensor: Tensor) -> dict[str, Any]:
    return {"what": what, "name": name, "type": _type(tensor), "bytes": tensor.nbytes}


def _type(tensor: Tensor) -> str:
    return _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


@contextlib.contextmanager
def watched(model: Model, rows: list[dict[str, Any]]) -> Iterator[None]:
    """Note type and bytes of what modules give, and of its gradients."""
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            role = _ROLES.get(name.rpartition(".")[2])
            if role is not None:
                hook = module.register_forward_hook(functools.partial(_note, role, rows))
                hooks.callback(hook.remove)
        yield


def _note(role: str, rows: list[dict[str, Any]], _: nn.Module, __: Any, output: Tensor) -> None:
    rows.append(_row("output", role, output))
    output.register_hook(lambda gradient: rows.append(_row("gradient", role, gradient)))


@contextlib.contextmanager
def saved(model: Model, rows: list[dict[str, Any]]) -> Iterator[None]:
    """Note the storages that are kept for backward, each once, however many operations and views keep it."""
    seen = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = tensor.detach()  # holds it, so that no address is used twice
            rows.append({"what": "saved", "name": "", "type": _type(tensor), "bytes": storage.nbytes()})
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def operations(device: torch.device, precision: str) -> Iterator[dict[str, Any]]:
    """Try single operations under autocast; weights are fp32, as a model's are.

    Parameters
    ----------
    device : torch.device
    precision : {"bf16", "fp16"}

    Yields
    ------
    dict
        ``name``, and the types of its ``input`` and its result (``type``).
    """
    weight = torch.ones(16, device=device)
    bias = torch.ones(16, device=device)
    square = torch.ones(16, 16, device=device)
    classes = torch.zeros(16, dtype=torch.int64, device=device)
    tried: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda x: F.linear(x, square),
        "matmul": lambda x: x @ x,
        "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        "softmax": lambda x: F.softmax(x, -1),
        "log_softmax": lambda x: F.log_softmax(x, -1),
        "cross_entropy": lambda x: F.cross_entropy(x, classes),
        "layer_norm": lambda x: F.layer_norm(x, (16,), weight, bias),
        "rms_norm": lambda x: F.rms_norm(x, (16,), weight),
        "pow": lambda x: x.pow(2),
        "rsqrt": torch.rsqrt,
        "exp": torch.exp,
        "sum": torch.sum,
        "mean": torch.mean,
        "gelu": F.gelu,
        "product with an fp32 weight": lambda x: x * weight,
    }
    for given in (precision, "fp32"):
        x = torch.full((16, 16), 0.5, dtype=DTYPES[given], device=device)
        for name, operation in tried.items():
            with warnings.catch_warnings(), torch.no_grad(), autocast(device, precision):
                # rms_norm says that weight and input differ in type, which is what is tried here.
                warnings.filterwarnings("ignore", "Mismatch dtype", UserWarning)
                result = operation(x)
            yield {"name": name, "input": given, "type": _type(result)}


def rms_norm_is_listed() -> bool | None:
    """Say whether rms_norm is on CUDA's fp32 list, which depends on the version; None without PyTorch's headers."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.is_file():
        return None
    match = re.search(r"define AT_FORALL_FP32\(_\)(.*?[^\\])\n", header.read_text(encoding="utf-8"), re.DOTALL)
    return None if match is None else "_(rms_norm)" in match[1]


def run(device: str, **parameters: Any) -> Autocast:
    """Look at the tensors of a training step.

    Parameters
    ----------
    device : str
    **parameters
        Fields of :class:`Sizes`.

    Returns
    -------
    Autocast
    """
    return Autocast(Sizes(**parameters), device)
