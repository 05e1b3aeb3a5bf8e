"""An account of a step's memory on a CPU, tensor by tensor: what predictions of a GPU's memory are compared with.

PyTorch keeps no account of a CPU's memory. The result of every operator is looked at instead: a storage that was not
there before is an allocation, and its end is a free. What an operator allocates and frees within itself is not seen.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsightkit.workloads import lm

ITEMS = (
    "weights",
    "gradients",
    "optimizer_states",
    "activations",
    "logits",
    "temporary_buffers",
    "autocast_cache",
    "inputs_and_tables",
)


class TensorMemory(TorchDispatchMode):
    """Count the bytes of tensors while it is active.

    Attributes
    ----------
    allocated_bytes, peak_bytes : int
        Of all storages that are alive, and the most since the last :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated_bytes = 0
        self.peak_bytes = 0
        # By the identity of the storage's Python object, which lives exactly as long as the storage.
        self.finalizers: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view of something that was there before, such as a weight's transpose, is not an allocation.
        given = {id(leaf.untyped_storage()) for leaf in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if id(tensor.untyped_storage()) not in given:
                self.see(tensor)
        return result

    def see(self, tensor: Tensor) -> int:
        """Count a storage that was not there before; give its size, or 0."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if id(storage) in self.finalizers or not size:
            return 0
        self.finalizers[id(storage)] = weakref.finalize(storage, self.end, id(storage), size)
        self.allocated_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return size

    def end(self, identity: int, size: int) -> None:
        """Note that a storage was freed."""
        del self.finalizers[identity]
        self.allocated_bytes -= size

    def reset_peak(self) -> None:
        """Let the peak be what is allocated now."""
        self.peak_bytes = self.allocated_bytes

    def close(self) -> None:
        """Stop watching the storages that are still alive."""
        for finalizer in self.finalizers.values():
            finalizer.detach()


class _Items(TensorMemory):
    """The same, with what each storage is for, and the moments of a step."""

    def __init__(self, run: lm.Run) -> None:
        super().__init__()
        config = run.config
        self.moments: dict[str, int] = {}
        self.phase = ""
        self.rows: dict[int, dict[str, str]] = {}  # of the storages that are alive
        self.changes: list[tuple[dict[str, str], int]] = []
        self.kept: set[int] = set()  # rows of what the forward pass keeps
        self.weights = {id(weight.untyped_storage()) for weight in run.model.parameters()}
        self.logits = (config.batch * config.context * config.vocabulary, config.vocabulary)
        self.item = ""
        for self.item, tensors in _known(run).items():
            for tensor in tensors:
                self.see(tensor)
        self.item = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        casts = func is torch.ops.aten._to_copy.default
        self.item = ""
        if casts and any(id(leaf.untyped_storage()) in self.weights for leaf in _tensors(args)):
            self.item = "autocast_cache"
        return super().__torch_dispatch__(func, types, args, kwargs)

    def see(self, tensor: Tensor) -> int:
        size = super().see(tensor)
        if size:
            item = self.item
            if not item and (tensor.numel(), tensor.shape[-1] if tensor.dim() else 0) == self.logits:
                item = "logits"
            row = {"phase": self.phase, "item": item}
            self.rows[id(tensor.untyped_storage())] = row
            self.changes.append((row, size))
        return size

    def end(self, identity: int, size: int) -> None:
        super().end(identity, size)
        self.changes.append((self.rows.pop(identity), -size))

    def leave(self, phase: str, model: torch.nn.Module) -> None:
        """Note the moments of a phase, and what only its end shows: what forward keeps, and which are gradients."""
        self.moments[f"{phase}_peak_bytes"] = max(self.peak_bytes, self.moments.get(f"{phase}_peak_bytes", 0))
        self.moments[f"{phase}_end_bytes"] = self.allocated_bytes
        self.phase = ""
        if phase == "forward":
            self.kept = {id(row) for row in self.rows.values() if row["phase"] == "forward"}
        if phase == "backward":
            for parameter in model.parameters():
                row = self.rows.get(id(parameter.grad.untyped_storage()))
                if row is not None:
                    row["item"] = "gradients"

    def at_peak(self, *, graph: bool) -> dict[str, int]:
        """Give bytes by item at the highest moment of the step."""
        level = highest = place = 0
        for number, (_, change) in enumerate(self.changes):
            level += change
            if level > highest:
                highest = level
                place = number
        items = dict.fromkeys(ITEMS, 0)
        for row, change in self.changes[: place + 1]:
            item = row["item"]
            if not item:
                item = "activations" if not graph or id(row) in self.kept else "temporary_buffers"
            items[item] += change
        return items


class _Watched(lm.Run):
    account: _Items | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Any:
        with super().phase(name):
            if self.account is None or name not in ("forward", "backward", "optimizer"):
                yield
                return
            self.account.phase = name
            self.account.reset_peak()
            yield
            self.account.leave(name, self.model)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _known(run: lm.Run) -> dict[str, list[Tensor]]:
    """Tensors that are there before the step, by item."""
    states = []
    if run.optimizer is not None:
        for state in run.optimizer.state.values():
            states += [value for value in state.values() if value.dim()]  # counts of steps do not count
    return {
        "weights": list(run.model.parameters()),
        "inputs_and_tables": [*run.model.buffers(), run.tokens],
        "optimizer_states": states,
    }


def memory_of_a_step(**parameters: Any) -> dict[str, int]:
    """Watch the second step of a language model on the CPU.

    Parameters
    ----------
    **parameters
        Fields of :class:`nsightkit.workloads.lm.LMConfig`.

    Returns
    -------
    dict of str to int
        The metrics of :mod:`_lib.memory_steps`, counted by tensor, ``peak_bytes``, and ``at_peak_…_bytes`` by item.
    """
    with _Watched(lm.LMConfig(**parameters, annotate=False), "cpu") as run:
        run.step()  # an optimizer's states come with its first step
        account = _Items(run)
        before = account.allocated_bytes
        run.account = account
        with account:
            run.step()
        run.account = None
        account.close()
    moments = {"before_the_step_bytes": before, **account.moments}
    moments["peak_bytes"] = max(size for name, size in moments.items() if name.endswith("_peak_bytes"))
    parts = account.at_peak(graph=run.config.mode != "fwd")
    return moments | {f"at_peak_{item}_bytes": size for item, size in parts.items()}
