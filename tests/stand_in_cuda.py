"""A stand-in for ``torch.cuda``: code for a GPU runs on the CPU, and what it asks of CUDA is written down and judged.

It proves names and order, and no numbers: every function that is called exists in the installed PyTorch and takes these
arguments; events are recorded before they are read, and the device is waited for in between; a graph holds only what
was run before on a side stream, and waits for nothing itself; the history of memory ends after it began, and its
snapshot is taken in between. It says nothing of times, of memory, of kernels, or of what a GPU computes. What Inductor
or Triton would compile is not compiled.

Every tensor of the CPU says that it is on ``cuda:0``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it, and it must see PyTorch as it is
from make_snapshot import random_program
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["StandIn", "stand_in"]

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)
_GIB = 2**30


def _is_cuda(value: object) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.partition(":")[0] == "cuda"
    )


def _on_cpu(value: Any) -> Any:
    return _CPU if _is_cuda(value) else value


class StandIn:
    """What is asked of the GPU that is not there.

    Attributes
    ----------
    log : list of str
        Calls, in order.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._main = Stream(self)
        self._streams = [self._main]
        self._synchronized = 0
        self._capturing: Graph | None = None
        self._warm: list[str] = []
        self._history = False
        self._room: int | None = None  # operators that there is memory for
        self.allocator = random_program(1, 40)

    def note(self, what: str) -> None:
        self.log.append(what)

    def index(self, what: str) -> int:
        """Give the place of a call in the log."""
        return self.log.index(what)

    # -- the device --------------------------------------------------------------------------------------------------

    def not_captured(self, what: str) -> None:
        assert self._capturing is None, f"{what} while a graph is captured: {self.log[-8:]}"

    def synchronize(self, device: object = None) -> None:
        self.not_captured("synchronize")
        self._synchronized = len(self.log)
        self.note("synchronize")

    def operator(self, name: str) -> None:
        """An operator is launched on the current stream."""
        if self._room is not None:
            self._room -= 1
            if self._room < 0:
                self.note("out of memory")
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        if self._capturing is not None:
            assert name not in ("_local_scalar_dense", "nonzero"), f"{name} waits, and a graph is captured"
            self._capturing.ran.append(name)
        elif self._streams[-1] is not self._main:
            assert self._streams[-1].waited, f"{name} on a stream that did not wait for what was launched before"
            self._warm.append(name)

    # -- streams, events, graphs ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, Stream)
        self._streams.append(stream)
        if self._capturing is None:
            self._warm.clear()
        try:
            yield
        finally:
            self._streams.pop()

    def current_stream(self, device: object = None) -> Stream:
        return self._streams[-1]

    @contextlib.contextmanager
    def graph(self, cuda_graph: Graph, *_: object, **__: object) -> Iterator[None]:
        assert self._warm, "a graph is captured that was not run on a side stream before"
        assert self._main.waited, "the current stream does not wait for the side stream before the capture"
        self.synchronize()  # as torch.cuda.graph does
        self.note("capture begins")
        self._capturing = cuda_graph
        try:
            yield
        finally:
            self._capturing = None
            self.note("capture ends")
        cuda_graph.captured = True
        new = set(cuda_graph.ran) - set(self._warm)
        assert cuda_graph.ran, "nothing was captured"
        assert not new, f"captured, and never run before: {sorted(new)}"

    # -- memory ------------------------------------------------------------------------------------------------------

    def memory_allocated(self, device: object = None) -> int:
        return _GIB

    def max_memory_allocated(self, device: object = None) -> int:
        return 2 * _GIB

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self.not_captured("reset_peak_memory_stats")
        self.note("reset_peak_memory_stats")

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        self.not_captured("mem_get_info")
        self.note("mem_get_info")
        return 130 * _GIB, 140 * _GIB

    def limit(self, fraction: float, device: object = None) -> None:
        self.note(f"memory fraction {fraction:g}")
        self._room = 1500 if fraction < 1 else None

    def empty_cache(self) -> None:
        self.not_captured("empty_cache")
        self.note("empty_cache")

    def record_memory_history(self, enabled: str | None = "all", **how: Any) -> None:
        assert bool(enabled) != self._history, "the history of memory is begun, or ended, twice"
        self._history = bool(enabled)
        self.note(f"memory history {'begins' if enabled else 'ends'}")

    def snapshot(self, *_: object, **__: object) -> dict[str, Any]:
        assert self._history, "a snapshot without a history"
        self.note("snapshot")
        return self.allocator.snapshot()


class Stream:
    """A stream that knows whether it waited for another."""

    def __init__(self, owner: StandIn, device: object = None, priority: int = 0) -> None:
        self._owner = owner
        self.waited = False

    def wait_stream(self, stream: Stream) -> None:
        self._owner.note("wait_stream")
        self.waited = True


class Event:
    """An event that can be read once it was recorded and waited for."""

    def __init__(self, owner: StandIn, enable_timing: bool = False) -> None:
        self._owner, self._timing = owner, enable_timing
        self._recorded: tuple[int, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        assert self._recorded is None, "an event is recorded twice"
        self._owner.not_captured("an event with a time")
        self._recorded = len(self._owner.log), time.perf_counter_ns()
        self._owner.note("record")

    def elapsed_time(self, end_event: Event) -> float:
        self._owner.not_captured("elapsed_time")
        for event in (self, end_event):
            assert event._timing, "an event without timing is read"
            assert event._recorded is not None, "an event is read that was never recorded"
            assert event._recorded[0] < self._owner._synchronized, "an event is read before the device was waited for"
        assert self._recorded is not None
        assert end_event._recorded is not None
        return max((end_event._recorded[1] - self._recorded[1]) / 1e6, 1e-3)


class Graph:
    """A graph that can be replayed once it was captured; what it gave stays as it was."""

    def __init__(self, owner: StandIn) -> None:
        self._owner = owner
        self.captured = False
        self.ran: list[str] = []

    def replay(self) -> None:
        assert self.captured, "a graph is replayed that was not captured"
        self._owner.not_captured("replay")
        self._owner.note("replay")


class _Watch(TorchDispatchMode):
    def __init__(self, owner: StandIn) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace == "aten":
            self._owner.operator(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _checked(real: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Let a fake be called only as the real one can be."""
    try:
        signature = inspect.signature(real)
    except ValueError:  # of C++
        return fake

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        return fake(*args, **kwargs)

    return call


def _device_rewritten(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        return real(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    return call


def _real_device(tensor: torch.Tensor) -> torch.device:
    return torch._C.TensorBase.device.__get__(tensor)


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    """Put the stand-in in place of ``torch.cuda``.

    Yields
    ------
    StandIn
    """
    cuda = StandIn()
    with pytest.MonkeyPatch.context() as patch:
        _replace_cuda(patch, cuda)
        _replace_devices(patch, cuda)
        with _Watch(cuda):
            yield cuda


def _replace_cuda(patch: pytest.MonkeyPatch, cuda: StandIn) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200", total_memory=140 * _GIB, multi_processor_count=132, major=9, minor=0, uuid="7c2a",
        L2_cache_size=60 * 2**20,
    )  # fmt: skip

    def noted(name: str, value: Any = None) -> Callable[..., Any]:
        def call(*_: object, **__: object) -> Any:
            cuda.not_captured(name)
            cuda.note(name)
            return value

        return call

    fakes: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: cuda._capturing is not None,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: properties.name,
        "synchronize": cuda.synchronize,
        "current_stream": cuda.current_stream,
        "stream": cuda.stream,
        "mem_get_info": cuda.mem_get_info,
        "memory_allocated": cuda.memory_allocated,
        "max_memory_allocated": cuda.max_memory_allocated,
        "memory_reserved": lambda *_: 3 * _GIB,
        "reset_peak_memory_stats": cuda.reset_peak_memory_stats,
        "empty_cache": cuda.empty_cache,
        "set_per_process_memory_fraction": cuda.limit,
        "_sleep": lambda cycles: cuda.note(f"sleep {cycles}"),
    }
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, _checked(getattr(torch.cuda, name), fake))
    memory = torch.cuda.memory
    for name, fake in (("_record_memory_history", cuda.record_memory_history), ("_snapshot", cuda.snapshot)):
        patch.setattr(memory, name, _checked(getattr(memory, name), fake))
    for name, kind in (("Stream", Stream), ("Event", Event), ("CUDAGraph", Graph)):
        patch.setattr(torch.cuda, name, functools.partial(kind, cuda))
    patch.setattr(torch.cuda, "graph", _checked(torch.cuda.graph, cuda.graph))
    patch.setattr(torch.cuda, "device", _checked(torch.cuda.device, lambda _: contextlib.nullcontext()))
    # What a DataLoader asks before it pins memory.
    for name, value in {"is_available": True, "current_accelerator": _CUDA, "current_device_index": 0}.items():
        patch.setattr(torch.accelerator, name, functools.partial(lambda given, *_, **__: given, value))
    patch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    stream = SimpleNamespace(is_capturing=lambda: cuda._capturing is not None)
    patch.setattr(torch.accelerator, "current_stream", lambda *_: stream)


def _replace_devices(patch: pytest.MonkeyPatch, cuda: StandIn) -> None:
    """Let what is made on, or moved to, a GPU be on the CPU, and say that it is not."""
    for maker in _device_constructors():
        if getattr(torch, maker.__name__, None) is maker:
            patch.setattr(torch, maker.__name__, _device_rewritten(maker))
    plain = DeviceContext.__init__
    patch.setattr(DeviceContext, "__init__", lambda self, device: plain(self, _on_cpu(device)))

    moved = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if any(map(_is_cuda, (*args, *kwargs.values()))):
            cuda.note(f"to cuda{', not waiting' if kwargs.get('non_blocking') else ''}")
        return moved(tensor, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    def pinned(tensor: torch.Tensor, *_: object) -> torch.Tensor:
        cuda.not_captured("pin_memory")
        cuda.note("pin_memory")
        return tensor

    def to_cpu(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        cuda.not_captured("cpu")
        return tensor

    for name, method in {"to": to, "pin_memory": pinned, "cpu": to_cpu}.items():
        patch.setattr(torch.Tensor, name, method)
    here = os.getpid()  # not in a loader's workers, whose batches lie in the host's memory

    def device(tensor: torch.Tensor) -> torch.device:
        real = _real_device(tensor)
        return _CUDA if real.type == "cpu" and os.getpid() == here else real

    patch.setattr(torch.Tensor, "device", property(device), raising=False)
    patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: device(tensor).type == "cuda"), raising=False)
    _replace_operations(patch, cuda)


def _replace_operations(patch: pytest.MonkeyPatch, cuda: StandIn) -> None:
    """What a CPU does otherwise: 16 bits, 8 bits, attention, profiles; and what compiles for a GPU."""
    cast, multiplied, attend = torch.autocast, torch._scaled_mm, torch.nn.functional.scaled_dot_product_attention

    def autocast(device_type: str, dtype: torch.dtype | None = None, **how: Any) -> Any:
        cuda.note(f"autocast {device_type}")
        return cast("cpu", dtype, **how)

    def scaled_mm(*args: Any, use_fast_accum: bool = False, **kwargs: Any) -> torch.Tensor:
        cuda.note(f"scaled_mm {'fast' if use_fast_accum else 'exact'}")
        return multiplied(*args, **kwargs)

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(*args, **kwargs)

    patch.setattr(torch, "autocast", _checked(cast.__init__.__get__(object()), autocast))
    patch.setattr(torch, "_scaled_mm", scaled_mm)
    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    patch.setattr(torch, "compile", _checked(torch.compile, lambda function, **_: (cuda.note("compile"), function)[1]))
    patch.setattr(torch._dynamo, "reset", lambda: cuda.note("compiled code is dropped"))

    profile = torch.profiler.profile

    def profiled(*, activities: list[Any], experimental_config: Any = None, **how: Any) -> Any:
        cuda.note(f"profile {', '.join(sorted(activity.name for activity in activities))}")
        return profile(activities=[torch.profiler.ProfilerActivity.CPU], **how)

    patch.setattr(torch.profiler, "profile", _checked(profile, profiled))
