"""Run a workload once and write what was measured into a folder.

``python -m nsightkit.guide.running MODULE:FUNCTION PARAMETERS DEVICE WARMUP STEPS`` is the program that Nsight Systems
and Nsight Compute run: the same workload, with an NVTX range around its steady steps.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

import nsightkit
from nsightkit.capture import memory, ncu, nsys, provenance, timing, torch_profiler, utilization
from nsightkit.capture.children import child_environment
from nsightkit.errors import NsightkitError
from nsightkit.safe import Json
from nsightkit.trace import ncu as reports
from nsightkit.trace import store

if TYPE_CHECKING:
    from nsightkit.api import Trace


#: Names in a measurement's folder.
PROVENANCE = "provenance.json"
SAMPLES = "samples.parquet"
ROWS = "rows.parquet"
TRACE = "trace"
NSYS = "nsys"
NCU = "ncu.csv"
SNAPSHOT = "snapshot.pickle"

#: The NVTX range that opens a capture, and the one inside it around the steps that are kept.
_CAPTURED = "nsightkit-captured"
_STEADY = "nsightkit-steady"
#: Steps between the two: the first step under nsys waits until its tracing is set up.
_SETTLING_STEPS = 2
#: No OS calls: they cost time, and the PyTorch profile beside this one has none.
_NSYS_ARGS = ("--trace=cuda,nvtx", "--capture-range=nvtx", f"--nvtx-capture={_CAPTURED}")
#: The sections are all that :mod:`nsightkit.analysis.roofline.counters` needs, without samples of the program counter.
#: With the slash ncu looks for a push/pop range.
_NCU_ARGS = (
    "--nvtx",
    f"--nvtx-include={_STEADY}/",
    "--section=SpeedOfLight",
    "--section=ComputeWorkloadAnalysis",
    "--section=MemoryWorkloadAnalysis",
    "--section=MemoryWorkloadAnalysis_Tables",
    "--section=LaunchStats",
    "--section=Occupancy",
    "--section=SchedulerStats",
    "--section=WarpStateStats",
)
_Samples = dict[str, list[float]]
_TOOL_TIMEOUT_S = 300.0
#: The largest relative error of a correct result; sums of 8-bit numbers may be further off.
_LARGEST_ERROR = 0.05
_LARGEST_ERROR_FP8 = 0.12
#: An event of the allocator takes about 60 bytes in the snapshot.
_SNAPSHOT_EVENTS = 20_000


class Run(NamedTuple):
    """One run of a workload.

    Parameters
    ----------
    name : str
        ``page/part``.
    workload : callable
    parameters : dict
    device : {"cuda", "cpu"}
    revision : int
    warmup, steps : int
        Steps before the clock starts, and timed steps.
    profile : {"torch", "shapes", "memory", "nsys", "ncu"} or None
    script : str
        The page that measures.
    """

    name: str
    workload: Callable[..., Any]
    parameters: Json
    device: str
    revision: int
    warmup: int
    steps: int
    profile: str | None
    script: str

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is measured."""
        return self.device == "cuda"

    @property
    def profiled(self) -> int:
        """Steps under the profiler."""
        if self.on_gpu:
            return 3
        return 2


def run(task: Run, folder: Path) -> None:
    """Measure, check the results, and write them.

    Parameters
    ----------
    task : Run
    folder : Path
        Empty; gets the files of a recording.

    Raises
    ------
    NsightkitError
        A result is wrong.
    """
    begin = time.perf_counter()
    facts: Json = {}
    with _settings(task):
        samples, rows = _measured(task, folder)
    _check(task, samples)
    if task.on_gpu and task.profile in ("nsys", "ncu"):
        facts[task.profile] = _under_tool(task, folder)
    raw_profile = folder / "profile.json"
    if raw_profile.exists():
        facts["sdpa_backend"] = ", ".join(torch_profiler.attention_back_ends(raw_profile)) or None
        store.write(nsightkit.load(raw_profile, cache=False), folder / TRACE)
        raw_profile.unlink()
    samples_frame(samples).to_parquet(folder / SAMPLES, compression="zstd", index=False)
    if rows:
        pd.DataFrame(rows).to_parquet(folder / ROWS, compression="zstd", index=False)
    record = provenance.collect(
        device=task.device,
        kind="measured" if task.on_gpu else "small",
        name=task.name,
        parameters=task.parameters,
        revision=task.revision,
        steps={"warm-up": task.warmup, "timed": task.steps, "profiled": task.profiled},
        clock="CUDA events" if task.on_gpu else "perf_counter",
        command=f"python {task.script}",
        duration_s=round(time.perf_counter() - begin, 3),
        **facts,
    )
    text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / PROVENANCE).write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def _settings(task: Run) -> Iterator[None]:
    """Give every run of a process the same start, and free what it leaves."""
    import torch

    threads = torch.get_num_threads()
    if task.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        torch.set_num_threads(1)  # idle threads that spin slow a small run down
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if "torch._dynamo" in sys.modules:
            # One process compiles the same code at many sizes; beyond 8 of them torch.compile falls back to eager.
            sys.modules["torch._dynamo"].reset()
        gc.collect()
        if task.on_gpu:
            torch.cuda.empty_cache()


# -- the run itself ---------------------------------------------------------------------------------------------


def _measured(task: Run, folder: Path) -> tuple[_Samples, list[Json]]:
    """Run the workload: samples by metric, and the rows of a sweep."""
    with contextlib.ExitStack() as recording:
        first_steps = 0
        if task.on_gpu and task.profile == "memory":
            first_steps = task.profiled
            snapshot = memory.recording(folder / SNAPSHOT, max_entries=_SNAPSHOT_EVENTS, context="alloc")
            recording.enter_context(snapshot)
        with task.workload(task.device, **task.parameters) as work:
            if hasattr(work, "rows"):
                return {}, list(work.rows())
            for _ in range(first_steps):
                work.step()
            recording.close()  # the model is still there, and is in the snapshot
            samples = _timed(task, work, first_steps)
            if task.profile is not None:
                torch_profiler.profile_steps(
                    work.step,
                    folder / "profile.json",
                    warmup=2 if task.on_gpu else 1,
                    active=task.profiled,
                    shapes=task.profile == "shapes",
                )
            return samples, []


def _timed(task: Run, work: Any, first_steps: int) -> _Samples:
    """Time steps without a profiler, which would slow the CPU down."""
    samples: _Samples = {}
    if task.steps:
        with utilization.watching(task.device) as readings:
            times = timing.time_calls(work.step, warmup=task.warmup, repetitions=task.steps, device=task.device)
        samples["step_ns"] = times.tolist()
        samples |= readings
    all_steps = first_steps + (task.warmup + task.steps if task.steps else 0)
    if hasattr(work, "samples"):
        for metric, values in work.samples().items():
            per_step = len(values) == all_steps
            samples[metric] = list(values[-task.steps :] if per_step and task.steps else values)
    if task.on_gpu:
        samples |= _gpu_memory()
    return samples


def _gpu_memory() -> _Samples:
    """What the allocator holds and held at most, and what the device holds beyond the allocator."""
    from torch import cuda

    cuda.synchronize()
    free, total = cuda.mem_get_info()
    reserved = cuda.memory_reserved()
    return {
        "peak_bytes": [cuda.max_memory_allocated()],
        "reserved_bytes": [reserved],
        "context_bytes": [total - free - reserved],
    }


def samples_frame(samples: _Samples) -> pd.DataFrame:
    """Make the table of raw samples: ``metric, index, value``.

    Parameters
    ----------
    samples : dict of str to list of float
    """
    rows = []
    for metric, values in samples.items():
        for index, value in enumerate(values):
            rows.append((metric, index, value))
    frame = pd.DataFrame(rows, columns=["metric", "index", "value"])
    return frame.astype({"metric": "str", "index": "int64", "value": "float64"})


def _check(task: Run, samples: _Samples) -> None:
    """Refuse results that cannot be right."""
    limit = _LARGEST_ERROR
    if "fp8" in task.parameters.values():
        limit = _LARGEST_ERROR_FP8
    for metric, values in samples.items():
        if not np.isfinite(values).all():
            raise NsightkitError(f"{task.name}: {metric} is not finite; the result is wrong")
        if metric == "relative_error" and max(values) > limit:
            problem = f"the relative error is {max(values):.3g}, above {limit}"
            raise NsightkitError(f"{task.name}: {problem}; the result is wrong")
        if metric == "step_ns" and min(values) <= 0:
            raise NsightkitError(f"{task.name}: a step took no time; the result is wrong")


# -- once more under Nsight Systems or Nsight Compute ------------------------------------------------------------


def _under_tool(task: Run, folder: Path) -> Json:
    """Run the workload under a tool, in a child process; a failure is a notice, for the rest was measured."""
    place = f"{task.workload.__module__}:{task.workload.__qualname__}"
    how = [task.device, str(task.warmup), str(task.profiled)]
    command = [sys.executable, "-m", __name__, place, json.dumps(task.parameters), *how]
    env = child_environment()  # pages' own modules included
    with tempfile.TemporaryDirectory(prefix="nsightkit-", ignore_cleanup_errors=True) as scratch:
        report = Path(scratch, "report")
        try:
            if task.profile == "nsys":
                captured = nsys.profile(command, report, nsys_args=_NSYS_ARGS, timeout_s=_TOOL_TIMEOUT_S, env=env)
            else:
                captured = ncu.profile(command, report, ncu_args=_NCU_ARGS, timeout_s=_TOOL_TIMEOUT_S, env=env)
            if captured.returncode:
                raise NsightkitError(f"the program ended with exit code {captured.returncode} under the profiler")
            if task.profile == "nsys":
                store.write(_steady(nsightkit.load(captured.trace, cache=False)), folder / NSYS)
            else:
                reports.write(reports.read(captured.report), folder / NCU)
        except NsightkitError as error:
            # Paths are cut to their last part: a recording does not say where things are on this machine.
            problem = " ".join(str(error).split())
            return {"notice": re.sub(r"(?:/[^\s/:;,'\"()]+)+/([^\s/:;,'\"()]+)", r"\1", problem)}
    return {"steps": task.profiled}


def _steady(trace: Trace) -> Trace:
    """Cut a capture to the events that begin in the range around the steady steps, without our own two ranges."""
    ranges = trace.table("ranges", ["name", "start_ns", "end_ns"])
    around = ranges[ranges["name"] == _STEADY]
    if len(around) != 1:
        raise NsightkitError(f"nsys recorded {len(around)} ranges {_STEADY!r}, not one")
    begin = int(around["start_ns"].iloc[0])
    end = int(around["end_ns"].iloc[0])
    trace.meta.window_ns = (begin + trace.t0_ns, end + trace.t0_ns)
    return trace.time(begin + 1, end)


def _child(place: str, parameters: str, device: str, warmup: str, steps: str) -> None:
    """Run steady steps of a workload, in the ranges that the tools look for."""
    from nsightkit.workloads.phases import phase

    module, _, function = place.partition(":")
    workload = getattr(importlib.import_module(module), function)
    with workload(device, **json.loads(parameters)) as work:
        _run_steps(work, device, int(warmup))
        with phase(_CAPTURED):
            _run_steps(work, device, _SETTLING_STEPS)
            with phase(_STEADY):
                _run_steps(work, device, int(steps))


def _run_steps(work: Any, device: str, count: int) -> None:
    """Run steps, and wait until a GPU has finished them."""
    import torch

    for _ in range(count):
        work.step()
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    _child(*sys.argv[1:])
