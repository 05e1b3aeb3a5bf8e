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
from nsightkit.text import Json
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
#: Steps inside the first range and before the second: the first step under nsys waits until its tracing is set up.
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
#: Raw samples by metric.
_Samples = dict[str, list[float]]
#: Time limit of the second run, under nsys or ncu.
_TOOL_TIMEOUT_S = 300.0
#: The largest relative error of a correct result; sums of 8-bit numbers may be further off.
_LARGEST_ERROR = 0.05
_LARGEST_ERROR_FP8 = 0.12
#: Events that a snapshot keeps: each takes about 60 bytes, so it stays near 1 MB.
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
        """Steps under a profiler (PyTorch's, nsys or ncu) or in a memory snapshot.

        Three show how steps differ. On a CPU, where a run only tries the mechanics, two save time.
        """
        if self.on_gpu:
            return 3
        return 2


def run_and_write(task: Run, folder: Path) -> None:
    """Run a workload, check its results, and write them with their provenance.

    Parameters
    ----------
    task : Run
    folder : Path
        Empty at first; gets the files of a recording.

    Raises
    ------
    NsightkitError
        A result is wrong.
    """
    begin = time.perf_counter()
    facts: Json = {}
    raw_profile = folder / "profile.json"
    with _process_settings(task):
        samples, sweep_rows = _run_workload(task, folder, raw_profile)
    _refuse_wrong_results(task, samples)
    if task.on_gpu and task.profile in ("nsys", "ncu"):
        facts[task.profile] = _run_under_tool(task, folder)
    if raw_profile.exists():
        facts["sdpa_backend"] = ", ".join(torch_profiler.attention_back_ends(raw_profile)) or None
        # A recording is published: Parquet is far smaller than PyTorch's JSON, and cleaned of private data.
        store.write(nsightkit.load(raw_profile, cache=False), folder / TRACE)
        raw_profile.unlink()
    samples_frame(samples).to_parquet(folder / SAMPLES, compression="zstd", index=False)
    if sweep_rows:
        pd.DataFrame(sweep_rows).to_parquet(folder / ROWS, compression="zstd", index=False)
    record = provenance.collect(
        device=task.device,
        kind="measured" if task.on_gpu else "small",  # without a GPU the sizes are small, and nothing is to be quoted
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
def _process_settings(task: Run) -> Iterator[None]:
    """Start each run of this process with the same settings; then free the memory and the compiled code it leaves."""
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


def _run_workload(task: Run, folder: Path, raw_profile: Path) -> tuple[_Samples, list[Json]]:
    """Run a workload of steps, or a sweep; gives the samples of the first, or the rows of the second.

    For a workload of steps also writes PyTorch's profile and the memory snapshot that the task asks for.
    """
    with contextlib.ExitStack() as recording:
        # Memory is recorded from before the model is built, so that its allocations have a call stack, and only during
        # the first steps: recording would slow the timed ones.
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
            recording.close()  # writes the snapshot while the model is still in memory
            samples = _run_timed_steps(task, work, first_steps)
            if task.profile is not None:
                torch_profiler.profile_steps(
                    work.step,
                    raw_profile,
                    warmup=2 if task.on_gpu else 1,
                    active=task.profiled,
                    shapes=task.profile == "shapes",
                )
            return samples, []


def _run_timed_steps(task: Run, work: Any, first_steps: int) -> _Samples:
    """Time steps without a profiler, which would slow the CPU down; gives all samples of the run.

    `first_steps` is the number of steps that have run already. A workload may have its own samples, such as the time
    that each step waited for data: it keeps them for all steps, and those before the timed ones are dropped here.
    """
    samples: _Samples = {}
    if task.steps:
        with utilization.watching(task.device) as readings:
            times = timing.time_calls(work.step, warmup=task.warmup, repetitions=task.steps, device=task.device)
        samples["step_ns"] = times.tolist()
        samples |= readings
    untimed_steps = first_steps + task.warmup
    if hasattr(work, "samples"):
        for metric, values in work.samples().items():
            kept = values
            # A metric without a value per step, such as the error of the result, stays whole.
            if task.steps and len(values) == untimed_steps + task.steps:
                kept = values[untimed_steps:]
            samples[metric] = list(kept)
    if task.on_gpu:
        samples |= _gpu_memory_samples()
    return samples


def _gpu_memory_samples() -> _Samples:
    """Read GPU memory: allocated at the peak, reserved by the allocator now, and in use beyond the allocator."""
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
    rows = [(metric, index, value) for metric, values in samples.items() for index, value in enumerate(values)]
    frame = pd.DataFrame(rows, columns=["metric", "index", "value"])
    return frame.astype({"metric": "str", "index": "int64", "value": "float64"})


def _refuse_wrong_results(task: Run, samples: _Samples) -> None:
    """Refuse samples that are not finite, steps that took no time, and outputs too far from the reference."""
    limit = _LARGEST_ERROR
    # A workload calls it a precision or a rung.
    if "fp8" in task.parameters.values():
        limit = _LARGEST_ERROR_FP8
    for metric, values in samples.items():
        problem = ""
        if not np.isfinite(values).all():
            problem = f"{metric} is not finite"
        elif metric == "relative_error" and max(values) > limit:
            problem = f"the relative error is {max(values):.3g}, above {limit}"
        elif metric == "step_ns" and min(values) <= 0:
            problem = "a step took no time"
        if problem:
            raise NsightkitError(f"{task.name}: {problem}; the result is wrong")


# -- once more under Nsight Systems or Nsight Compute ------------------------------------------------------------


def _run_under_tool(task: Run, folder: Path) -> Json:
    """Run the workload under nsys or ncu, in a child process, and write the trace or the counters.

    Gives facts for the provenance. A failure is one of them, ``notice``: the rest of the run was measured.
    """
    place = f"{task.workload.__module__}:{task.workload.__qualname__}"
    device_and_steps = [task.device, str(task.warmup), str(task.profiled)]
    # Calls _run_watched_program with these words.
    command = [sys.executable, "-m", __name__, place, json.dumps(task.parameters), *device_and_steps]
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
                store.write(_cut_to_steady_steps(nsightkit.load(captured.trace, cache=False)), folder / NSYS)
            else:
                reports.write(reports.read(captured.report), folder / NCU)
        except NsightkitError as error:
            # Paths are cut to their last part: a recording does not say where things are on this machine.
            problem = " ".join(str(error).split())
            return {"notice": re.sub(r"(?:/[^\s/:;,'\"()]+)+/([^\s/:;,'\"()]+)", r"\1", problem)}
    return {"steps": task.profiled}


def _cut_to_steady_steps(trace: Trace) -> Trace:
    """Cut a capture to the events that begin inside the range around the steady steps."""
    ranges = trace.table("ranges", ["name", "start_ns", "end_ns"])
    around = ranges[ranges["name"] == _STEADY]
    if len(around) != 1:
        raise NsightkitError(f"nsys recorded {len(around)} ranges {_STEADY!r}, not one")
    begin = int(around["start_ns"].iloc[0])
    end = int(around["end_ns"].iloc[0])
    # The captured window is kept on the source's clock; the trace's own begins at 0.
    trace.meta.window_ns = (begin + trace.t0_ns, end + trace.t0_ns)
    return trace.time(begin + 1, end)  # + 1: without that range itself, which begins at `begin`


def _run_watched_program(place: str, parameters: str, device: str, warmup: str, steps: str) -> None:
    """Be the program that a tool watches: run steady steps of a workload, inside the two ranges the tool looks for.

    All arguments are words of the command line; `place` is ``module:function``.
    """
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
    _run_watched_program(*sys.argv[1:])
