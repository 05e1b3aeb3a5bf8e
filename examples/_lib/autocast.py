"""A training step of a small language model whose tensors are looked at: their types and their bytes.

The same model is trained in fp32 and under autocast in bf16 and, where the device can, in fp16. Its norms stand
behind the projections, where their input is what a matrix product wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nsightkit.workloads.models import Block, Sizes
from nsightkit.workloads.phases import phase
from nsightkit.workloads.workload import DTYPES, Workload, autocast

__all__ = ["Autocast", "AutocastConfig", "Model", "precisions", "probe", "saved", "start"]

_NAMES = {DTYPES[name]: name for name in ("fp32", "bf16", "fp16")}
#: What a module is to the reader, by its own name; the modules of other names hold these.
_ROLES = {
    **dict.fromkeys(("qkv", "out", "up", "down"), "linear"),
    **dict.fromkeys(("norm_attention", "norm_mlp"), "norm"),
    **{name: name for name in ("embedding", "scores", "softmax", "weighted", "loss")},
    "activation": "gelu",
    "head": "logits",
}


@dataclasses.dataclass(frozen=True)
class AutocastConfig(Sizes):
    """Sizes of the model, and how its norm is written.

    Parameters
    ----------
    vocabulary, hidden, layers, heads, context, batch, seed : int
        As for :class:`nsightkit.workloads.models.Sizes`.
    norm : {"written", "fused"}
        Layer norm as a chain of elementary operations, or ``F.layer_norm``.
    """

    norm: Literal["written", "fused"] = "written"


class Model(nn.Module):
    """A decoder-only language model with its loss."""

    def __init__(self, config: AutocastConfig) -> None:
        super().__init__()
        self.decoder = config.decoder(form="gpt", attention="naive", norm=config.norm)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the mean loss of tokens (batch, context + 1), int64."""
        loss: Tensor = self.loss(self.decoder(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        return loss


class Autocast(Workload):
    """One training run in each precision, all of the same model, batch and seed."""

    def __init__(self, config: AutocastConfig, device: str = "cpu") -> None:
        super().__init__(config, device)
        random = torch.Generator().manual_seed(config.seed)
        shape = (config.batch, config.context + 1)
        self._tokens = torch.randint(1, config.vocabulary, shape, generator=random).to(self.device)
        self._runs = {name: self._build(name) for name in precisions(device)}
        self.callback(self._runs.clear)
        self._losses_of: dict[str, list[Tensor]] = defaultdict(list)

    def _build(self, precision: str) -> tuple[Model, torch.optim.Optimizer, torch.amp.GradScaler]:
        torch.manual_seed(self.config.seed)
        model = Model(self.config).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        # A modest first scale: a step that overflows is left out, and there would be no optimizer state to look at.
        scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**10, enabled=precision == "fp16")
        return model, optimizer, scaler

    def step(self) -> None:
        """Train one step in each precision."""
        with phase("step"):
            for precision in self._runs:
                with phase(precision):
                    self._train(precision)
                self._runs[precision][1].zero_grad()

    def _train(self, precision: str) -> None:
        model, optimizer, scaler = self._runs[precision]
        with phase("forward"), autocast(self.device, precision):
            loss = model(self._tokens)
        with phase("backward"):
            torch.autograd.backward(scaler.scale(loss))
        with phase("optimizer"):
            scaler.step(optimizer)
            scaler.update()
        self._losses_of[precision].append(loss.detach())

    def observed(self) -> dict[str, list[float]]:
        """Train one more step in each precision, under hooks, and try single operations.

        Returns
        -------
        dict of str to list of float
            Bytes of every tensor seen, by names with slashes:
            ``output/PRECISION/MODULE/TYPE`` what modules gave,
            ``gradient/PRECISION/MODULE/TYPE`` gradients of what they gave,
            ``parameter/PRECISION/TYPE``, ``parameter gradient/PRECISION/TYPE``, ``optimizer/PRECISION/TYPE``,
            ``saved/PRECISION/KIND/TYPE`` storages kept for backward, each once, of the kinds ``activation``,
            ``weight copy`` and ``parameter``. Further ``operation/PRECISION/NAME/INPUT/OUTPUT``,
            ``listed/NAME`` (1 if CUDA's autocast computes it in fp32 and gives fp32) and ``loss/PRECISION``.
        """
        found: dict[str, list[float]] = defaultdict(list)
        for precision, (model, optimizer, _) in self._runs.items():
            with _watched(model, precision, found), saved(model) as kept:
                self._train(precision)
            found |= {f"saved/{precision}/{kind}/{dtype}": sizes for (kind, dtype), sizes in kept.items()}
            parameters = list(model.parameters())
            for what, tensors in (
                ("parameter", parameters),
                ("parameter gradient", [parameter.grad for parameter in parameters]),
                ("optimizer", [value for state in optimizer.state.values() for value in state.values()]),
            ):
                for tensor in tensors:
                    if tensor is not None:
                        found[f"{what}/{precision}/{_type(tensor)}"].append(tensor.nbytes)
            optimizer.zero_grad()
            tried = probe(self.device.type, precision).items() if precision != "fp32" else ()
            found |= {f"operation/{precision}/{name}/{given}/{output}": [1] for (name, given), output in tried}
            found[f"loss/{precision}"] = [float(loss) for loss in self._losses_of[precision]]
        return {**found, **_listed()}


def precisions(device: str) -> list[str]:
    """List the precisions of a device: fp32, and what its autocast supports.

    Parameters
    ----------
    device : str

    Returns
    -------
    list of str
    """
    found, where = ["fp32"], torch.device(device)
    for name in ("bf16", "fp16"):
        try:
            # A type that is not supported is a warning that autocast is now off, or an operator without a kernel.
            with warnings.catch_warnings(action="error"), autocast(where, name):
                product = torch.ones(8, 8, device=where) @ torch.ones(8, 8, device=where)
        except (RuntimeError, UserWarning):
            continue
        if product.dtype == DTYPES[name]:
            found.append(name)
    return found


def probe(device: str, precision: str) -> dict[tuple[str, str], str]:
    """Try single operations under autocast.

    Parameters
    ----------
    device : str
    precision : {"bf16", "fp16"}

    Returns
    -------
    dict of (str, str) to str
        Type of the result by name of the operation and type of its input. Weights are fp32, as a model's are.
    """
    weight, bias, square = (torch.ones(shape, device=device) for shape in ((16,), (16,), (16, 16)))
    classes = torch.zeros(16, dtype=torch.int64, device=device)
    operations: dict[str, Callable[[Tensor], Tensor]] = {
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
    found = {}
    for given in (precision, "fp32"):
        x = torch.full((16, 16), 0.5, dtype=DTYPES[given], device=device)
        for name, operation in operations.items():
            with warnings.catch_warnings(), torch.no_grad(), autocast(torch.device(device), precision):
                # rms_norm says that weight and input differ in type, which is what is tried here.
                warnings.filterwarnings("ignore", "Mismatch dtype", UserWarning)
                found[name, given] = _type(operation(x))
    return found


def _type(value: Tensor) -> str:
    return _NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))


@contextlib.contextmanager
def _watched(model: Model, precision: str, found: dict[str, list[float]]) -> Iterator[None]:
    """Note type and bytes of what modules give, and of its gradients."""
    with contextlib.ExitStack() as hooks:

        def add(what: str, role: str, value: Tensor) -> None:
            found[f"{what}/{precision}/{role}/{_type(value)}"].append(value.nbytes)

        def note(role: str, _: nn.Module, __: Any, output: Tensor) -> None:
            add("output", role, output)
            hook = functools.partial(add, "gradient", role)
            hooks.callback(output.register_hook(hook).remove)  # type: ignore[no-untyped-call]

        for name, module in model.named_modules():
            role = "residual" if isinstance(module, Block) else _ROLES.get(name.rpartition(".")[2])
            if role is not None:
                hooks.callback(module.register_forward_hook(functools.partial(note, role)).remove)
        yield


@contextlib.contextmanager
def saved(model: Model) -> Iterator[dict[tuple[str, str], list[float]]]:
    """Note the storages that are kept for backward: each once, however many operations and views keep it.

    Parameters
    ----------
    model : Model

    Yields
    ------
    dict of (str, str) to list of float
        Bytes by kind (``activation``, ``weight copy`` or ``parameter``) and type.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, Tensor] = {}  # holds them, so that no address is used twice

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = value.detach()
            copied = "weight copy" if _is_weight_copy(value) else "activation"
            kind = "parameter" if storage.data_ptr() in own else copied
            found[kind, _type(value)].append(storage.nbytes())
        return value

    with saved_tensors_hooks(pack, lambda value: value):
        yield found


def _is_weight_copy(value: Tensor) -> bool:
    """Whether a tensor is a converted parameter, or a view of one: nothing but conversions lies between the two."""
    node = value.grad_fn
    while node is not None and re.match(r"ToCopy|TBackward|Transpose|View|Permute", node.name()):
        node = node.next_functions[0][0]
    return node is not None and value.grad_fn is not node and "AccumulateGrad" in node.name()


def _listed() -> dict[str, list[float]]:
    """Whether rms_norm is on CUDA's fp32 list, which versions of torch differ in, by the header torch comes with."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return {}
    match = re.search(r"define AT_FORALL_FP32\(_\)(.*?[^\\])\n", text, re.DOTALL)
    return {"listed/rms_norm": [float("_(rms_norm)" in match[1])]} if match else {}


def start(device: str, **parameters: Any) -> Autocast:
    """Begin, with fields of :class:`AutocastConfig`."""
    return Autocast(AutocastConfig(**parameters), device)
