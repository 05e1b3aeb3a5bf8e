"""The measuring function of a sweep's column: one implementation in one precision, at every size, in one process.

A recording of such a part is valid for exactly this code, as one of any other part is for
``nsightkit.investigations.ways_to_measure``. What the samples are called and what their codes mean is
:mod:`nsightkit.workloads.attention_samples`.

Every cell begins as in a fresh process: references dropped, compiled code forgotten, cached memory and the libraries'
workspaces returned. Within a cell each direction has a status of its own: where the backward pass runs out of memory,
the forward pass is still timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from nsightkit.capture import timing, torch_profiler
from nsightkit.workloads.attention_samples import (
    BACKWARD_CANNOT_FIT,
    BROKEN,
    DIRECTIONS,
    FORWARD_CANNOT_FIT,
    LOST,
    NO_FORWARD,
    NO_TIME,
    RAN_OUT,
    REASONS,
    REFUSED,
    SIXTEEN_BITS,
    STATUSES,
    metric,
)
from nsightkit.workloads.out_of_memory import is_out_of_memory, is_sticky, requested_bytes
from nsightkit.workloads.phases import phase
from nsightkit.workloads.tensor_memory import Allocator, TensorMemory

__all__ = ["SweepConfig", "swept"]

_OF_COLUMN = ("batch", "heads", "causal")
_Cell = tuple[int, int]
_Gives = TypeVar("_Gives")
#: Fewest samples of one direction of a cell.
_FEWEST = 3
#: Passes of a look at a cell, in which code is loaded, then memory watched.
_LOOKED = 2
#: What a sample of each direction takes together, in passes: before each backward, forward is passed through once more.
_SAMPLED = 4 / 3
#: What PyTorch and cuDNN say when a backend has no kernel for some inputs.
_NO_KERNEL = re.compile(r"no (available|viable|valid) (kernel|backend|execution|engine)|NOT_SUPPORTED", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """Which cells, and how long they may take.

    Parameters
    ----------
    d_model, context : list of int
        Widths and context lengths; each width is taken through the contexts in ascending order.
    traced : list of int
        Contexts of which one pass each is profiled afterwards, where it fits.
    cell_s : float
        What one direction of a cell should take: a slow cell is repeated less often, though three times at least.
    budget_s : float
        Of the column, once code has been compiled. The widths that are left share what is left of it evenly, so that a
        width leaves to the next what it did not need. A cell for which the rest of its width's share is probably too
        short is skipped, or only looked at: then it has its memory and no times.
    limit_bytes : int or None
        Memory there is; None for all the GPU has, or on a CPU for no limit.
    impossible : list of str
        Precisions in which this implementation exists on no GPU: recorded as ``unsupported``, without a process.
    """

    d_model: list[int]
    context: list[int]
    traced: list[int] = dataclasses.field(default_factory=list)
    cell_s: float = 0.08
    budget_s: float = 60.0
    limit_bytes: int | None = None
    impossible: list[str] = dataclasses.field(default_factory=list)


class _LostGpuError(Exception):
    """An error after which the GPU does nothing more for this process."""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def swept(
    workload: Any, device: str, parameters: Mapping[str, Any], counts: Mapping[str, int], folder: Path
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Measure one column: time, memory and status of each cell and direction, then a profile of the cells that fit.

    Parameters
    ----------
    workload : callable
        :func:`nsightkit.workloads.attention.start`, or what gives cells as it does.
    device : str
    parameters : mapping
        Fields of :class:`SweepConfig`, and of the workload.
    counts : mapping
        ``warmup``, ``repetitions`` (the most of a cell), ``active``.
    folder : Path
        Gets the profile, ``trace.json.gz``.

    Returns
    -------
    samples : dict of str to list
        By metric, named by :func:`nsightkit.workloads.attention_samples.metric`: ``forward_ns`` and ``backward_ns``
        (one sample a pass),
        ``…_status``, ``…_reason`` (codes), ``…_stopped_context``, ``…_requested_bytes``; ``inputs_bytes``,
        ``idle_bytes`` (inputs, and what libraries keep), ``before_backward_bytes``, ``…_peak_bytes``,
        ``…_reserved_bytes``; and of the column ``batch``, ``heads``, ``causal``, ``limit_bytes``.
    resolved : dict
        All sizes and switches, defaults included; and ``errors``, where there were any, by the cell and direction that
        ended in them.

    Raises
    ------
    RuntimeError
        Nothing could be measured, and not for want of memory.
    """
    names = {field.name for field in dataclasses.fields(SweepConfig)}
    config = SweepConfig(**{name: value for name, value in parameters.items() if name in names})
    own = {name: value for name, value in parameters.items() if name not in names}
    with workload(device, **own) as work:
        column = _Column(work, device, config, counts)
        try:
            column.run()
        finally:
            gc.unfreeze()
        if column.errors and not column.fitting:
            raise RuntimeError("; ".join(f"{name}: {words}" for name, words in list(column.errors.items())[:3]))
        fitting = [(cell, both) for cell, both in column.fitting if cell[1] in config.traced and not column.lost]
        trace = folder / "trace.json.gz"
        try:
            _profile(work, fitting, device, trace, counts["active"], gpu=not column.lost)
        except (RuntimeError, MemoryError) as error:  # it is not worth the times
            column.errors["profile"] = _one_line(error)
            _profile(work, [], device, trace, counts["active"], gpu=False)
        resolved = work.parameters | dataclasses.asdict(config) | ({"errors": column.errors} if column.errors else {})
    return column.samples, resolved


class _Column:
    """Takes the cells, each a width and a context, in turn and keeps what they gave."""

    def __init__(self, work: Any, device: str, config: SweepConfig, counts: Mapping[str, int]) -> None:
        self._work, self._device, self._config, self._counts = work, device, config, counts
        self._gpu = device.startswith("cuda")
        #: What the column that is being measured is called.
        self._name = work.column
        self.samples: dict[str, list[float]] = {}
        #: Cells whose forward pass fits, and whether the backward pass does.
        self.fitting: list[tuple[_Cell, bool]] = []
        #: The words of errors by the name of a sample, and whether the last of them cost the GPU.
        self.errors: dict[str, str] = {}
        self.lost = False
        #: The context at which a direction ran out of memory, of the width that is measured.
        self._stopped: dict[str, int] = {}
        #: The direction that runs.
        self._way = "forward"

    def run(self) -> None:
        """Go through all cells."""
        if not self._gpu:
            with TensorMemory():  # the first one ever loads half of torch
                torch.zeros(1)
        gc.freeze()  # what is loaded stays: to go through it before every cell would take longer than the cells
        sizes = {name: float(self._work.parameters[name]) for name in _OF_COLUMN}
        self._keep((), limit_bytes=self._limit(), **sizes)
        refused = {d: reason for d in self._config.d_model if (reason := self._work.refusal(d)) is not None}
        for d, reason in refused.items():
            self._unsupported([d], reason)
        widths = [d for d in self._config.d_model if d not in refused]
        try:
            if widths:
                self._warm_up((widths[0], min(self._config.context)))
            end = time.perf_counter() + self._config.budget_s
            for number, d in enumerate(widths):
                now = time.perf_counter()
                self._width(d, now + (end - now) / (len(widths) - number))
            self._clean()
        except _LostGpuError:
            self.lost = True
            for *cell, way in itertools.product(widths, self._config.context, DIRECTIONS):
                if metric(f"{way}_status", self._name, *cell) not in self.samples:
                    self._say((cell[0], cell[1]), [way], "skipped", LOST)
        for precision in self._config.impossible:
            self._name = f"{self._work.parameters['implementation']}-{precision}"
            self._keep((), **sizes)
            self._unsupported(self._config.d_model, SIXTEEN_BITS)

    def _unsupported(self, widths: Sequence[int], reason: str) -> None:
        for cell in itertools.product(widths, self._config.context):
            self._say(cell, DIRECTIONS, "unsupported", reason)

    def _width(self, d: int, end: float) -> None:
        """All contexts of one width, until neither direction fits any more."""
        self._stopped = {}
        pass_s = fixed_s = before = 0.0
        for context in sorted(self._config.context):
            # Attention's work grows with the square of the context; small cells are cheaper than that says. What comes
            # once a cell (a library's plan, compiled code, memory taken and returned) does not grow.
            expected_s = fixed_s + _LOOKED * pass_s * (context / before) ** 2 if before else 0.0
            start = time.perf_counter()
            if "forward" in self._stopped:
                self._say((d, context), DIRECTIONS, "skipped", FORWARD_CANNOT_FIT, self._stopped["forward"])
            elif start + expected_s > end:
                self._say((d, context), DIRECTIONS, "skipped", NO_TIME)
            else:
                pass_s, before = self._cell((d, context), end), context
                fixed_s = max(time.perf_counter() - start - _LOOKED * pass_s - self._timing_s(pass_s), 0.0)

    def _timing_s(self, pass_s: float) -> float:
        """What it takes to time a cell."""
        return _SAMPLED * (1 + sum(self._counted(pass_s))) * pass_s

    def _counted(self, pass_s: float) -> tuple[int, int]:
        """As many passes without and with a sample as the time of one allows."""
        most = self._config.cell_s / pass_s if pass_s else float("inf")
        # Slow cells were warmed up when they were looked at; fast ones need more for their clocks and caches.
        warmup = int(min(most, self._counts["warmup"]))
        return warmup, int(min(max(most, _FEWEST), self._counts["repetitions"]))

    def _warm_up(self, smallest: _Cell) -> None:
        """Load what the first cell of all would load: a compiler, a library, the first kernels."""
        # What is wrong with this cell is found out, and kept, when it is measured.
        with contextlib.suppress(RuntimeError, MemoryError):
            cell = self._work.cell(*smallest)
            cell.backward(cell.forward())
            self._wait()

    def _cell(self, cell: _Cell, end: float) -> float:
        """Measure one cell; gives the seconds that a pass took in all directions that fit."""
        self._work.forget_compiled()
        ways = DIRECTIONS[: 1 if "backward" in self._stopped else 2]
        if len(ways) == 1:
            self._say(cell, ["backward"], "skipped", BACKWARD_CANNOT_FIT, self._stopped["backward"])
        found: dict[str, float] = {}
        took = self._tried(cell, self._look, ways, found)
        while took is None and self._way != "forward":  # the backward pass did not fit, and the forward pass may
            ways = ways[:1]
            took = self._tried(cell, self._look, ways, found)
        self._keep(cell, **found)
        if took is None:
            return 0.0
        if time.perf_counter() + self._timing_s(took) > end:
            self._say(cell, ways, "skipped", NO_TIME)
        else:
            self._time(cell, took, ways)
        return took

    def _tried(self, place: _Cell, run: Callable[..., _Gives], *given: Any) -> _Gives | None:
        """Run something with a new cell, on a device that is as before the first; None if a direction failed in it.

        Nothing of a failed pass is left then: its error, which held every frame's tensors, is gone.
        """
        self._way = "forward"
        try:
            self._clean()
            return run(self._work.cell(*place), *given)
        except (RuntimeError, MemoryError) as error:
            lost, words, requested = is_sticky(error), "", None
            if is_out_of_memory(error):
                status, reason, requested, lost = "oom", RAN_OUT, requested_bytes(str(error)), False
            elif _NO_KERNEL.search(str(error)) and not lost:
                status, reason = "unsupported", REFUSED
            else:
                status, reason, words = "failed", BROKEN, _one_line(error)
        way = self._way
        self._say(place, [way], status, reason)
        self._keep(place, **{f"{way}_requested_bytes": requested})
        if words:
            self.errors[metric(way, self._name, *place)] = words
        if status == "oom":
            self._stopped[way] = place[1]
            status, reason = "skipped", NO_FORWARD
        if way == "forward":
            self._say(place, ["backward"], status, reason)
        if lost:
            raise _LostGpuError
        return None

    def _look(self, cell: Any, ways: Sequence[str], found: dict[str, float]) -> float:
        """Run a pass with an eye on memory; gives the seconds that it took.

        What memory shows goes into `found`.
        """
        # Once before: code is loaded and compiled, and libraries allocate what they keep.
        attended = cell.forward()
        if len(ways) > 1:
            self._way = "backward"
            cell.backward(attended)
        del attended
        self._way = "forward"
        self._wait()
        start = time.perf_counter()
        with self._watching(cell, found) as memory:
            for self._way in ways:
                memory.reset_peak()
                if self._way == "forward":
                    attended = cell.forward()
                    found["before_backward_bytes"] = memory.allocated_bytes
                else:
                    cell.backward(attended)
                found[f"{self._way}_peak_bytes"] = memory.peak_bytes
                found[f"{self._way}_reserved_bytes"] = memory.peak_reserved_bytes
        self._wait()
        return time.perf_counter() - start

    @contextlib.contextmanager
    def _watching(self, cell: Any, found: dict[str, float]) -> Iterator[Allocator | TensorMemory]:
        """Watch the memory of a cell that is made and does nothing yet."""
        size = found["inputs_bytes"] = sum(tensor.untyped_storage().nbytes() for tensor in cell.tensors)
        if self._gpu:
            memory = Allocator()
            found["idle_bytes"] = memory.allocated_bytes
            yield memory
            return
        limit = self._config.limit_bytes
        if limit is not None and size > limit:
            raise torch.OutOfMemoryError(f"simulated out of memory: tried to allocate {size} bytes of {limit}")
        with TensorMemory(limit_bytes=limit) as tensors, contextlib.closing(tensors):
            tensors.count(cell.tensors)
            found["idle_bytes"] = tensors.allocated_bytes
            yield tensors

    def _time(self, cell: _Cell, pass_s: float, ways: Sequence[str]) -> None:
        """Take samples of the directions that fit, as many as the time of one pass allows."""
        fit: list[str] = []
        for way in ways:
            taken = self._tried(cell, self._samples, way, *self._counted(pass_s))
            if taken is None:  # one pass fitted; but memory can be broken up by many
                break
            self._keep(cell, **{f"{way}_ns": taken})
            self._say(cell, [way], "ok", "")
            fit.append(way)
        if fit:
            self.fitting.append((cell, "backward" in fit))

    def _samples(self, cell: Any, way: str, warmup: int, repetitions: int) -> list[float]:
        self._way = way
        if way == "forward":
            taken = timing.time_calls(cell.forward, warmup=1 + warmup, repetitions=repetitions, device=self._device)
        else:
            for _ in range(1 + warmup):
                cell.backward(cell.forward())
            taken = timing.time_prepared(cell.forward, cell.backward, repetitions=repetitions, device=self._device)
        return [float(sample) for sample in taken]

    def _limit(self) -> int | None:
        """Bytes that tensors can have."""
        limit = self._config.limit_bytes
        if self._gpu:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            free, total = torch.cuda.mem_get_info()
            if limit is None:
                return free + torch.cuda.memory_reserved()
            torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0))
        return limit

    def _clean(self) -> None:
        """Make the device as it was before the first cell."""
        gc.collect()
        if self._gpu:
            torch.cuda.synchronize()
            # Private, like all that frees what cuBLAS keeps; without it a cell has the workspaces of those before.
            with contextlib.suppress(AttributeError):
                torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _wait(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def _say(self, cell: _Cell, ways: Sequence[str], status: str, reason: str, stopped: int | None = None) -> None:
        """Keep what became of directions of a cell, and the context at which an earlier cell had run out of memory."""
        codes = {"status": STATUSES.index(status), "reason": REASONS.index(reason), "stopped_context": stopped}
        self._keep(cell, **{f"{way}_{name}": code for way in ways for name, code in codes.items()})

    def _keep(self, cell: _Cell | tuple[()], **values: float | list[float] | None) -> None:
        """Keep samples of a cell, or of the column; None says that nothing was measured."""
        for quantity, value in values.items():
            if value is not None:
                self.samples[metric(quantity, self._name, *cell)] = value if isinstance(value, list) else [value]


def _profile(work: Any, cells: list[tuple[_Cell, bool]], device: str, trace: Path, active: int, *, gpu: bool) -> None:
    """Profile one pass of each cell, each direction in a range that names it; `gpu`: there may be one to be watched."""

    def step() -> None:
        for place, both in cells:
            cell = work.cell(*place)
            with phase(metric("forward", work.column, *place)):
                attended = cell.forward()
            if both:
                with phase(metric("backward", work.column, *place)):
                    cell.backward(attended)
            del cell, attended
            if device.startswith("cuda"):
                torch.cuda.synchronize()

    work.forget_compiled()
    torch_profiler.profile_steps(step, trace, wait=0, warmup=1, active=active, gpu=gpu)
