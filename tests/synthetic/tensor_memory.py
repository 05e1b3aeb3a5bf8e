"""Memory of tensors, counted as PyTorch's allocator counts a GPU's: now, at its peak, and with a limit.

PyTorch keeps no account of a CPU's memory. What every operator gives back is looked at instead: a storage that was
not there before is an allocation, and its end is a free. What an operator allocates and frees within itself is not
seen; on a GPU the allocator sees that as well, but not which tensor it was for: the two complete each other.

It lies with the workloads because those that report memory use it themselves, and captures may use workloads.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Allocator", "TensorMemory"]

#: What PyTorch puts between an operator and this mode, last of all what keeps its compiler out.
_DISPATCH = ("_python_dispatch.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")
_DEEPEST = 32  # frames of a stack that are kept: enough to reach the program from the innermost module


class Allocator:
    """The caching allocator's account of a GPU, by the names that :class:`TensorMemory` has for the same."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    @property
    def allocated_bytes(self) -> int:
        """Of all that is allocated."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """The most that ever was."""
        return torch.cuda.max_memory_allocated(self._device)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that ever was taken from the device."""
        return torch.cuda.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        """Let the highest so far be what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self._device)


class TensorMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of tensors while it is active.

    Parameters
    ----------
    limit_bytes : int, optional
        An operator whose result exceeds this raises ``torch.OutOfMemoryError``, as a full GPU does, and its result is
        dropped.
    history : bool
        Keep each allocation and free with its stack, for :meth:`snapshot`.
    device : str
        Type of the device whose tensors count.

    Attributes
    ----------
    allocated_bytes, peak_bytes : int
        Of all storages that are alive, and the highest that ever was.

    Examples
    --------
    >>> with TensorMemory() as memory:
    ...     x = torch.zeros(1024)
    ...     del x
    >>> memory.allocated_bytes, memory.peak_bytes
    (0, 4096)
    """

    def __init__(self, *, limit_bytes: int | None = None, history: bool = False, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated_bytes = self.peak_bytes = 0
        self._limit_bytes, self._history, self._device = limit_bytes, history, device
        # By the identity of the storage's Python object, which lives exactly as long as the storage: its address, its
        # bytes, the stack that made it, and what is called at its end.
        self._alive: dict[int, tuple[int, int, list[dict[str, Any]], weakref.finalize[Any, Any]]] = {}
        self._events: list[dict[str, Any]] = []
        self._ranges: list[dict[str, Any]] = []
        self._open: list[str] = []

    @property
    def peak_reserved_bytes(self) -> int:
        """As a CPU caches nothing, no more than what was allocated."""
        return self.peak_bytes

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were there before, such as a model's parameters.

        Parameters
        ----------
        tensors : iterable of Tensor
        """
        for tensor in tensors:
            self._see(tensor)

    def reset_peak(self) -> None:
        """Let the highest so far be what is allocated now."""
        self.peak_bytes = self.allocated_bytes

    def close(self) -> None:
        """Forget every storage; those still alive are watched no longer."""
        for *_, finalizer in self._alive.values():
            finalizer.detach()
        self._alive.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and look at what it gives."""
        result = func(*args, **(kwargs or {}))
        if self._history and func.namespace == "profiler":
            self._mark(func.name(), args)
        # A view of something that was there before, such as a weight's transpose, is not an allocation.
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            here = isinstance(leaf, Tensor) and leaf.device.type == self._device
            if here and id(leaf.untyped_storage()) not in given:
                self._see(leaf)
        if self._limit_bytes is not None and self.allocated_bytes > self._limit_bytes:
            asked = sum(leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            del result, leaf
            self._note("oom", 0, asked, self._stack(), device_free=self._limit_bytes - self.allocated_bytes)
            raise torch.OutOfMemoryError(
                f"simulated out of memory: tried to allocate {asked} bytes with {self.allocated_bytes} of "
                f"{self._limit_bytes} bytes allocated"
            )
        return result

    def _see(self, tensor: Tensor) -> int:
        """Count a storage that was not there before; gives its size, else 0."""
        storage = tensor.untyped_storage()
        identity, size, address = id(storage), storage.nbytes(), storage.data_ptr()
        if identity in self._alive or not size:
            return 0
        frames = self._stack()
        self._alive[identity] = address, size, frames, weakref.finalize(storage, self._end, identity)
        self.allocated_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        for action in ("segment_alloc", "alloc"):
            self._note(action, address, size, frames)
        return size

    def _end(self, identity: int) -> None:
        address, size, *_ = self._alive.pop(identity)
        self.allocated_bytes -= size
        for action in ("free_requested", "free_completed", "segment_free"):
            self._note(action, address, size, [])

    def _note(self, action: str, address: int, size: int, frames: list[dict[str, Any]], **more: int) -> None:
        if self._history:
            event = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames, **more}
            self._events.append(event | {"time_us": time.time_ns() // 1000})

    def _mark(self, operator: str, args: tuple[Any, ...]) -> None:
        """Keep what ``record_function`` marks, as ``global_record_annotations`` does; ranges end in reverse order."""
        if operator.endswith("_enter_new"):
            name, stage = str(args[0]), "START"
            self._open.append(name)
        elif operator.endswith("_exit._RecordFunction") and self._open:
            name, stage = self._open.pop(), "END"
        else:
            return
        self._ranges.append({"device": 0, "time_us": time.time_ns() // 1000, "name": name, "stage": stage})

    def _stack(self) -> list[dict[str, Any]]:
        """Give the stack from the innermost frame outwards, without PyTorch's own dispatch of this very mode."""
        frames: list[dict[str, Any]] = []
        frame: FrameType | None = sys._getframe(1) if self._history else None
        while frame is not None and len(frames) < _DEEPEST:
            code = frame.f_code
            if code.co_filename != __file__ and not code.co_filename.endswith(_DISPATCH):
                frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
            frame = frame.f_back
        return frames

    def snapshot(self) -> dict[str, Any]:
        """Give the history in the form of ``torch.cuda.memory._snapshot()``.

        Returns
        -------
        dict
            ``segments`` (each live storage is one, as a CPU caches nothing), ``device_traces`` (one list of events) and
            ``external_annotations`` (ranges of ``record_function``).
        """
        segments = [
            {
                "device": 0, "address": address, "total_size": size, "allocated_size": size, "active_size": size,
                "requested_size": size, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
                "frames": frames,
                "blocks": [
                    {
                        "address": address, "size": size, "requested_size": size, "state": "active_allocated",
                        "frames": frames,
                    }
                ],
            }
            for address, size, frames, _ in self._alive.values()
        ]  # fmt: skip
        return {
            "segments": segments, "device_traces": [list(self._events)], "external_annotations": list(self._ranges)
        }  # fmt: skip
