"""A language model's step that says where its memory went: at each phase's end and peak, and by item at the highest.

Two accounts are kept, of two steps. PyTorch's allocator knows a GPU's bytes to the last one, workspaces and what
operators need within themselves included, but not what they are for. Looking at what each operator gives
(:mod:`nsightkit.workloads.tensor_memory`) says what they are for, on a GPU and on a CPU, and misses the rest.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nsightkit.workloads import lm
from nsightkit.workloads.lm import PHASES
from nsightkit.workloads.out_of_memory import is_out_of_memory, is_sticky
from nsightkit.workloads.tensor_memory import Allocator, TensorMemory
from nsightkit.workloads.workload import Workload

__all__ = ["PHASES", "Column", "MemoryRun", "start"]

_ITEMS = (
    *("weights", "gradients", "optimizer_states", "activations", "logits", "temporary_buffers", "autocast_cache"),
    "inputs_and_tables",
)


class _Allocator(Allocator):
    """The caching allocator's account of a GPU, by phase."""

    phase = ""

    def leave(self, phase: str, _: torch.nn.Module) -> dict[str, int]:
        """Give, as near to the peak as a phase ends, what is free in segments of which another part is in use."""
        split = torch.cuda.memory_stats(self._device).get("inactive_split_bytes.all.current", 0)
        return {"fragmentation_bytes": split} if phase == "forward" else {}


class _Tensors(TensorMemory):  # type: ignore[no-untyped-call]
    """An account by tensor, each with what it is for."""

    def __init__(
        self, config: lm.LMConfig, known: Mapping[str, list[Tensor]], limit_bytes: int | None, device: str
    ) -> None:
        super().__init__(limit_bytes=limit_bytes, device=device)
        self.phase = ""
        self._rows: dict[int, dict[str, str]] = {}  # phase and item of each storage that is alive
        self._changes: list[tuple[dict[str, str], int]] = []  # the same, and a change in bytes
        self._activations: set[int] = set()  # what the forward pass keeps: the identities of those
        self._weights = {id(weight.untyped_storage()) for weight in known["weights"]}
        self._logits = (config.batch * config.context * config.vocabulary, config.vocabulary)
        # Not entered: that would watch these very loops.
        for self._of, tensors in known.items():
            self.count(tensors)
        self._of = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cast = func is torch.ops.aten._to_copy.default and any(
            isinstance(leaf, Tensor) and id(leaf.untyped_storage()) in self._weights for leaf in tree_leaves(args)
        )
        self._of = "autocast_cache" if cast else ""
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _see(self, tensor: Tensor) -> int:
        size = super()._see(tensor)
        if size:
            like_logits = (tensor.numel(), tensor.shape[-1] if tensor.dim() else 0) == self._logits
            row = {"phase": self.phase, "item": self._of or ("logits" if like_logits else "")}
            self._rows[id(tensor.untyped_storage())] = row
            self._changes.append((row, size))
        return size

    def _end(self, identity: int) -> None:
        before = self.allocated_bytes
        super()._end(identity)
        self._changes.append((self._rows.pop(identity), self.allocated_bytes - before))

    def leave(self, phase: str, model: torch.nn.Module) -> dict[str, int]:
        """Note what only now is known: what the forward pass keeps for the backward, and what gradients are."""
        self.phase = ""
        if phase == "forward":
            self._activations = {id(row) for row in self._rows.values() if row["phase"] == phase}
        for gradient in (p.grad for p in model.parameters() if p.grad is not None and phase == "backward"):
            if row := self._rows.get(id(gradient.untyped_storage())):
                row["item"] = "gradients"
        return {}

    def at_peak(self, *, graph: bool) -> dict[str, int]:
        """Give bytes by item at the highest moment there was."""
        when = int(np.cumsum([change for _, change in self._changes]).argmax())
        found = dict.fromkeys(_ITEMS, 0)
        for row, change in self._changes[: when + 1]:
            activation = not graph or id(row) in self._activations
            found[row["item"] or ("activations" if activation else "temporary_buffers")] += change
        return found


class MemoryRun(lm.Run):
    """A language model's run that also says where its memory went.

    Parameters
    ----------
    config : LMConfig
        Not compiled: a compiler makes other tensors.
    device : str
    limit_bytes : int, optional
        On a CPU, the memory of a device that is imagined: more raises ``torch.OutOfMemoryError``.
    """

    def __init__(self, config: lm.LMConfig, device: str = "cpu", limit_bytes: int | None = None) -> None:
        self._account: _Allocator | _Tensors | None = None
        self._moments: dict[str, int] = {}
        self._limit_bytes = limit_bytes
        super().__init__(config, device)
        if limit_bytes is not None:
            self.parameters["limit_bytes"] = limit_bytes

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        account, unwatched = self._account, super()._phase(name)
        if account is None or name not in ("forward", "backward", "optimizer"):
            with unwatched:
                yield
        else:
            account.phase = name
            account.reset_peak()
            yield
            peak = f"{name}_peak_bytes"
            self._moments[peak] = max(account.peak_bytes, self._moments.get(peak, 0))
            if name != "optimizer":
                self._moments[f"{name}_end_bytes"] = account.allocated_bytes
            self._moments |= account.leave(name, self.model)

    def _step_watched(self, account: _Allocator | _Tensors) -> dict[str, int]:
        self._account, self._moments = account, {"before_the_step_bytes": account.allocated_bytes}
        try:
            self.step()
        finally:
            self._account = None
        peak = max(size for name, size in self._moments.items() if name.endswith("_peak_bytes"))
        return {**self._moments, "peak_bytes": peak}

    def observed(self) -> dict[str, list[float]]:
        """Watch two more steps: one by the allocator, on a GPU, and one by tensor.

        Returns
        -------
        dict of str to list
            One value each, in bytes. ``before_the_step_bytes``, ``forward_peak_bytes``, ``forward_end_bytes``,
            ``backward_peak_bytes``, ``backward_end_bytes``, ``optimizer_peak_bytes`` (as far as the mode has them) and
            ``peak_bytes``, the highest: of the allocator on a GPU, by tensor on a CPU. ``tensor_peak_bytes``, by
            tensor on both, and its parts ``at_peak_…_bytes`` by item. On a GPU also ``reserved_bytes``,
            ``fragmentation_bytes``, ``workspace_bytes``, ``context_bytes`` and ``limit_bytes``, what the allocator
            could have had. Then ``loss``, one a step.
        """
        if not self._losses:
            self.step()  # an optimizer's states come with its first step
        found: dict[str, int] = {}
        if self.device.type == "cuda":
            found |= self._step_watched(_Allocator(self.device)) | self._device_account()
        kept = self._optimizer.state.values() if self._optimizer else []
        states = [value for state in kept for value in state.values() if isinstance(value, Tensor)]
        tables = [*self.model.buffers(), self.tokens]
        known: dict[str, list[Tensor]] = {
            "weights": list(self.model.parameters()),
            "inputs_and_tables": [table for table in tables if table.device.type == self.device.type],
            "optimizer_states": [value for value in states if value.dim()],  # counts of steps lie on the CPU
        }
        with _Tensors(self.config, known, self._limit_bytes, self.device.type) as tensors:
            moments = self._step_watched(tensors)
        parts = tensors.at_peak(graph=self.config.mode != "fwd")
        tensors.close()
        # On a GPU the moments are the allocator's, on a CPU these.
        found = (found or moments) | {"tensor_peak_bytes": moments["peak_bytes"]}
        found |= {f"at_peak_{item}_bytes": size for item, size in parts.items()}
        if self._limit_bytes is not None:
            found["limit_bytes"] = self._limit_bytes
        return {**{name: [value] for name, value in found.items()}, "loss": self.losses()}

    def _device_account(self) -> dict[str, int]:
        """What a GPU's allocator and driver say beyond the allocations."""
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        reserved, held = torch.cuda.max_memory_reserved(self.device), torch.cuda.memory_reserved(self.device)
        found = {"reserved_bytes": reserved, "context_bytes": total - free - held, "limit_bytes": free + held}
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            before = torch.cuda.memory_allocated(self.device)
            clear()
            found["workspace_bytes"] = before - torch.cuda.memory_allocated(self.device)
        return found


class Column(Workload):
    """One model at several contexts, the shortest first, until one does not fit.

    Parameters
    ----------
    device : str
    contexts : sequence of int
        Ascending.
    limit_bytes : int, optional
        As for :class:`MemoryRun`.
    **parameters
        Fields of :class:`nsightkit.workloads.lm.LMConfig` but ``context``.

    Attributes
    ----------
    parameters : dict
        Those of the first cell, and ``contexts``.
    """

    def __init__(self, device: str, contexts: Sequence[int], limit_bytes: int | None = None, **parameters: Any) -> None:
        self._contexts = list(contexts)
        self._cell = functools.partial(start, device, limit_bytes, **parameters)
        first = self._cell(context=self._contexts[0])
        super().__init__(first.config, device)
        self.parameters = {**first.parameters, "contexts": self._contexts}
        self._first: MemoryRun | None = self.enter_context(first)
        self.callback(setattr, self, "_first", None)

    def step(self) -> None:
        """Run the first cell once."""
        assert self._first is not None
        self._first.step()

    def losses(self) -> list[float]:
        """Read the losses of the first cell."""
        return self._first.losses() if self._first else []

    def observed(self) -> dict[str, list[float]]:
        """Measure the cells one after the other, each as if it were alone.

        Returns
        -------
        dict of str to list
            What :meth:`MemoryRun.observed` gives, but losses: one value for each context that fits, in ``context``.
            For the first that does not, and is the last to be tried, ``oom_context`` and ``oom_phase``, the position
            in :data:`PHASES` of where it was. A context that ends in another error is left out, and ``parameters`` say
            so, in ``errors``; after an error that ended the GPU's work it is the last.

        Raises
        ------
        RuntimeError
            Such an error came before anything was measured.
        """
        self.close()
        found: dict[str, list[float]] = {"context": []}
        for context in self._contexts:
            values = self._measured(context)
            if isinstance(values, str):
                found |= {"oom_context": [context], "oom_phase": [PHASES.index(values)]}
                break
            if isinstance(values, RuntimeError):
                if not found["context"]:
                    raise values
                self.parameters.setdefault("errors", {})[str(context)] = " ".join(str(values).split())[:300]
                if is_sticky(values):
                    break
                continue
            for name, value in (values | {"context": [context]}).items():
                found.setdefault(name, []).extend(value)
        return found

    def _measured(self, context: int) -> dict[str, list[float]] | str | RuntimeError:
        """Measure a cell, or say where its memory ran out, or what else went wrong."""
        # A function of its own: what an exception's frames hold is let go when it returns.
        run: MemoryRun | None = None
        try:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)
            with self._cell(context=context) as run:
                return {name: values for name, values in run.observed().items() if name != "loss"}
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return run.doing if run else "setup"
            return RuntimeError(str(error))


def start(device: str, limit_bytes: int | None = None, **parameters: Any) -> MemoryRun:
    """Begin to run a model whose memory is watched.

    Parameters
    ----------
    device : str
    limit_bytes : int, optional
        As for :class:`MemoryRun`.
    **parameters
        Fields of :class:`nsightkit.workloads.lm.LMConfig`.

    Returns
    -------
    MemoryRun
    """
    return MemoryRun(lm.LMConfig(**parameters), device, limit_bytes)
