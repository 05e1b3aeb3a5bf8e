"""The process in which what a part runs is listed: its workload is built for ``cuda`` at a GPU's sizes, and steps once.

No GPU is touched, and none is needed. Tensors have shapes and types and no data: they are PyTorch's fake tensors, which
lie on the ``meta`` device. What is asked of CUDA, Triton, the compiler and the loader of data is written down instead
of done, so that a workload takes the way that it takes on a GPU. PyTorch's own choices are those for a CPU: which
elementary operations an optimizer consists of, and which types its autocast gives. They differ from a GPU's, and are
the same whenever the code is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
import torch.nn.functional as F
import torch.utils.data
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from nsightkit.investigations.parts import Part, find, resolve
from nsightkit.investigations.recordings import part_key
from nsightkit.investigations.sweep_column import SweepConfig
from nsightkit.investigations.what_runs import sources

__all__ = ["listed", "main"]

#: What CUDA says of a GPU here: any one new enough for all that is tried, with no memory that could run out.
_GPU: Mapping[str, Any] = {
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
    "is_available": True,
    "is_current_stream_capturing": False,
    "device_count": 1,
    "get_device_capability": (9, 0),
    "get_device_properties": SimpleNamespace(multi_processor_count=132),
    "mem_get_info": (0, 0),
    "memory_stats": {},
    "_lazy_init": None,
}
#: What CUDA is asked to do.
_ASKED = (
    *("synchronize", "current_stream", "stream", "Stream", "CUDAGraph", "graph", "Event", "_sleep", "set_device"),
    *("empty_cache", "reset_peak_memory_stats", "init"),
)
_LOADER = ("batch_size", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers")
_LONGEST = 400  # characters of a reason
_PROCESSES = "it starts processes of its own, and what they run is not seen"


def main(investigation: str, part: str) -> dict[str, Any]:
    """List what a part runs, or why it cannot be listed.

    Parameters
    ----------
    investigation, part : str

    Returns
    -------
    dict
        As :func:`nsightkit.investigations.what_runs.ask` gives it.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.pop("TRITON_INTERPRET", None)
    chosen = find(investigation, part)
    try:
        found = listed(chosen)
        seen = sources(chosen, found.pop("kernels"), found.pop("data"))
        found |= {"counts": chosen.counts("live"), "sources": seen, "key": part_key(chosen)}
    # Any workload can do what fake tensors cannot, and a recording is made all the same.
    except Exception as error:
        found = {"why_not": " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]}
    return found | {"torch": torch.__version__.partition("+")[0]}


def listed(part: Part) -> dict[str, Any]:
    """List what a part runs on a GPU.

    To be called in a process of its own: PyTorch is changed while it runs.

    Parameters
    ----------
    part : Part

    Returns
    -------
    dict
        ``operators``: what is called, in order, a line each; ``parameters``: all sizes and switches, defaults included;
        ``kernels`` and ``data``: ``module:name`` of own kernels, and of what makes the data, that were seen.

    Raises
    ------
    Exception
        Whatever the workload raises where it does what cannot be listed.
    """
    found = _Listed()
    sweep = {field.name for field in dataclasses.fields(SweepConfig)} if part.measured == "swept" else set()
    beside = sweep or ({"limit_bytes"} if part.measured == "remembered" else set())
    given = part.parameters("live")
    own = {name: value for name, value in given.items() if name not in beside}
    if "contexts" in own:  # what a column runs at the others follows from their number
        own["contexts"] = own["contexts"][:1]
    with found.stand_in(), resolve(part.workload)("cuda", **own) as work:
        parameters = {**work.parameters, **{name: given[name] for name in given.keys() & (beside | {"contexts"})}}
        found.settings()
        if part.measured == "swept":
            for width, context in itertools.product(given["d_model"], given["context"]):
                found.lines.append(f"cell {width} {context}")
                cell = work.cell(width, context)
                cell.backward(cell.forward())
        else:
            work.step()
        if part.measured == "observed":
            found.lines.append("observed")
            work.observed()
        elif part.measured == "timed":
            work.losses()
    return {
        "parameters": json.loads(json.dumps(parameters)),
        "operators": found.lines,
        "kernels": sorted(found.kernels),
        "data": sorted(found.data),
    }


def _word(value: Any) -> str:
    """Say what an operator is given: of a tensor its type, shape and, unless they follow from that, strides."""
    if isinstance(value, Tensor):
        strides = "" if value.is_contiguous() else f" by {list(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}={_word(each)}' for name, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_word, value))}]"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return repr(value)
    return value.name if isinstance(value, _Asked) else str(getattr(value, "__name__", type(value).__name__))


class _Listed:
    """The list, and what stands in for a GPU while it is made."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.kernels: set[str] = set()
        self.data: set[str] = set()

    def call(self, name: str, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> None:
        """Add a call."""
        words = [*map(_word, args), *(f"{key}={_word(value)}" for key, value in (kwargs or {}).items())]
        self.lines.append(f"{name}({', '.join(words)})")

    def settings(self) -> None:
        """Add what is set for the whole process, when a workload has been built."""
        products = torch.backends.cuda.matmul
        reduced = [str(getattr(products, f"allow_{kind}_reduced_precision_reduction")) for kind in ("fp16", "bf16")]
        chosen = [torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()]
        self.call("settings", [torch.get_float32_matmul_precision(), *reduced, *chosen, _attention_by()])

    @contextlib.contextmanager
    def stand_in(self) -> Iterator[None]:
        """Write down what is asked of a GPU and of what makes data, and let nothing be computed."""
        patches: tuple[contextlib.AbstractContextManager[Any], ...] = (
            *(mock.patch.object(torch.cuda, name, _Asked(self.call, name)) for name in _ASKED),
            *(mock.patch.object(torch.cuda, name, return_value=answer) for name, answer in _GPU.items()),
            mock.patch.object(torch, "autocast", self._autocast()),
            mock.patch.object(torch, "compile", self._compile),
            mock.patch.object(torch, "manual_seed", _Asked(self.call, "manual_seed")),
            mock.patch.object(torch, "Generator", self._generator()),
            mock.patch.object(torch.nn.Module, "to", lambda module, *args, **given: self._moved(module, args, given)),
            mock.patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
            mock.patch.object(torch.utils.data.DataLoader, "__iter__", lambda of: self._batches(of)),  # noqa: PLW0108
            mock.patch.object(time, "sleep", lambda seconds: self.call("sleep", [seconds])),
            mock.patch.object(time, "perf_counter_ns", self._clock),
            mock.patch.object(subprocess, "Popen", side_effect=NotImplementedError(_PROCESSES)),
            self._triton(),
            FakeTensorMode(allow_non_fake_inputs=True),
            _Functions(self),
            _Operators(self),
        )
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield

    def _autocast(self) -> type:
        call = self.call

        class Autocast(torch.autocast):
            """That of the CPU, which has all types without a GPU."""

            def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
                call("autocast", (device_type, *args), kwargs)
                super().__init__("cpu", *args, **kwargs)

        return Autocast

    def _compile(self, function: Any = None, **options: Any) -> Any:
        self.call("compile", (), options)
        return function

    def _clock(self) -> int:
        self.call("perf_counter_ns")  # what lies between two of them is measured
        return 0

    def _generator(self) -> type:
        call = self.call

        class Generator(torch.Generator):
            def __new__(cls, device: Any = None) -> Any:
                call("Generator", [device])
                return super().__new__(cls)

            def manual_seed(self, seed: int) -> Any:
                call("Generator.manual_seed", [seed])
                return self

        return Generator

    def _moved(self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> torch.nn.Module:
        # Tensors without data lie nowhere, so there is nothing to move.
        self.call(f"{type(module).__name__}.to", args, kwargs)
        if kwargs or not isinstance(args[0], torch.device | str):
            raise NotImplementedError("a model is converted to another type, which fake tensors cannot be")
        return module

    def _batches(self, loader: torch.utils.data.DataLoader[Any]) -> Iterator[Any]:
        self.call("DataLoader", (), {name: getattr(loader, name) for name in _LOADER})
        made = type(loader.dataset)
        self.data.add(f"{made.__module__}:{made.__name__}")
        rows = iter(loader.dataset)
        while True:
            yield loader.collate_fn(list(itertools.islice(rows, loader.batch_size)))

    def _triton(self) -> contextlib.AbstractContextManager[Any]:
        try:
            from triton.runtime.jit import KernelInterface
        except ImportError:
            return contextlib.nullcontext()

        def launched(kernel: Any, grid: Any) -> Callable[..., None]:
            function = kernel
            while hasattr(function, "fn"):
                function = function.fn
            names = list(inspect.signature(function).parameters)

            def launch(*args: Any, **kwargs: Any) -> None:
                given = dict(zip(names, args, strict=False)) | kwargs
                # A grid that depends on what is tuned is given for each of the configurations.
                tuned = [config.all_kwargs() for config in getattr(kernel, "configs", ())] or [{}]
                grids = [grid({**given, **config}) for config in tuned] if callable(grid) else grid
                self.kernels.add(f"{function.__module__}:{function.__name__}")
                self.call(f"launch {function.__name__}{_word(grids)}", args, kwargs)

            return launch

        return mock.patch.object(KernelInterface, "__getitem__", launched)


class _Asked:
    """Something of CUDA's, such as a stream: what is asked of it is written down, and not done."""

    def __init__(self, call: Callable[..., None], name: str) -> None:
        self._call, self.name = call, name

    def __getattr__(self, name: str) -> _Asked:
        return _Asked(self._call, f"{self.name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> _Asked:
        self._call(self.name, args, kwargs)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._call(f"end of {self.name}")


class _Seeing:
    """A mode of PyTorch that writes down what it sees."""

    def __init__(self, found: _Listed) -> None:
        super().__init__()
        self._found = found


class _Functions(_Seeing, TorchFunctionMode):
    """Sees what a program calls, before PyTorch asks for a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._found.call("scaled_dot_product_attention", args, {**kwargs, "by": _attention_by()})
            with sdpa_kernel(SDPBackend.MATH):  # a forced backend may not exist here
                return func(*args, **kwargs)
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.pin_memory):
            self._found.call(func.__name__, args, kwargs)
        if func in (Tensor.cpu, Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is Tensor.data_ptr:
            return 0
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func is torch.device:
            return func(*args, **kwargs)
        args, here = tree_map(_on_cpu, (args, kwargs))
        if here.get("device") != kwargs.get("device"):
            self._found.lines.append(f"{func.__name__} on {kwargs['device']}")
        return func(*args, **here)


class _Operators(_Seeing, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what is run, operator by operator, backward and in an optimizer too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
        if name == "profiler::_record_function_enter_new":
            self._found.call("phase", args[:1])
        elif func.namespace == "aten":
            # All lie on the same device here; which it would be is in what a program called.
            self._found.call(name, args, {key: value for key, value in kwargs.items() if key != "device"})
        if name in ("item", "_local_scalar_dense"):
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    on_gpu = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if on_gpu or (isinstance(value, str) and value.startswith("cuda")) else value


def _attention_by() -> list[str]:
    """Name the backends of fused attention that are allowed now."""
    kinds = ("flash", "mem_efficient", "cudnn", "math")
    return [kind for kind in kinds if getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()]
