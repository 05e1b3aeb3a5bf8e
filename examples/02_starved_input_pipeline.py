"""
Is the GPU waiting for data?
============================

A data loader and a training step take turns or work side by side. Which of
the two sets the pace, where does the waiting hide in a profile, and what do
loader workers buy?

What is measured: a training step of a small language model whose batches are
read and decoded by the training process itself, then the same with worker
processes. What came out: :measured:`02_starved_input_pipeline.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# Loader and step are two machines in a line. When one process does both, the
# times add up. With workers beside it the slower of the two sets the pace,
# and each further worker shortens the loader's side until the step is the
# slower one. After that, more workers buy nothing.


# sphinx_gallery_thumbnail_number = -1
def step_time(load, rest, gpu=0, workers=0):
    """Shortest time of a step that loading, CPU and GPU allow together."""
    if workers == 0:
        return max(load + rest, gpu)
    return max(load / workers, rest, gpu)


for workers in (0, 1, 2, 4, 8):
    bound = step_time(load=3, rest=1, workers=workers)
    print(f"load 3, rest 1, {workers} workers: {bound:.2f} for each step")

# %%
# The bound on the GPU's side stands apart, because a GPU works through its
# queue while the CPU loads: a starved GPU is not idle for all of the wait, but
# from the moment its queue is empty.

# %%
# On a real GPU
# -------------
# PyTorch's developers recorded six steps of ResNet-50 in training on a V100,
# first with the data loaded by the training process itself. The line of the
# program that matters is ``DataLoader(..., num_workers=0)``.

from nsightkit.investigations import case, measure

alone = case("v100-starved-loader", "workers-0")
alone

# %%
# What would you change, and what would it gain? The verdict plays the trace
# again without each kind of waiting:

alone.trace.verdict()

# %%
# The same program with ``num_workers=4``, and nothing else changed. The GPU
# has as much to do as before; what it waits for is something else.

from nsightkit import plots

four = case("v100-starved-loader", "workers-4")
plots.before_after(
    alone.trace.gaps(),
    four.trace.gaps(),
    key="cause",
    value="total_ns",
    labels=("loaded in the process", "four workers"),
    title="GPU idle time by cause, ResNet-50 on a V100 (case file)",
)

# %%
# Predicted was a loader that is never late. Was it right? Two of the six steps
# with workers took much longer than the others, so the median step and the
# whole capture differ; more workers would not have helped those two, as the
# replay of the second trace says.


def without_waits(trace):
    """How many times as fast the trace is, played without waits for data."""
    return trace.whatif("no-input-wait")["speedup"].iloc[0]


steps_ns = [run.trace.steps()["wall_ns"] for run in (alone, four)]
never_late = without_waits(alone.trace)
step_gain = steps_ns[0].median() / steps_ns[1].median()
print(f"predicted: {never_late:.2f} times as fast, never late")
print(f"median step: {step_gain:.2f} times as fast with four workers")
print(f"whole capture: {steps_ns[0].sum() / steps_ns[1].sum():.2f} times")
print(f"left to gain: {without_waits(four.trace):.2f} times, never late")
print("steps with workers (ms):", *(steps_ns[1] / 1e6).round().astype(int))
print("now in the way:", four.trace.verdict()["bottleneck"])

# %%
# Measure
# -------
# The wait is measured around ``next(it)``, in every step, without a profiler.
# The profile is of a few more steps.

before = measure("starved-input", "before")
before

# %%
# Read
# ----
# How much of a step is the wait? Both are medians over the timed steps.

wait_ns = before.median("data_wait_ns")
rest_ns = before.median("step_ns") - wait_ns
wait_before = wait_ns / before.median("step_ns")
print(f"a step takes {before.median('step_ns') / 1e6:.1f} ms ({before.mode})")
print(f"it waits for {wait_ns / 1e6:.1f} ms of them, {wait_before:.0%}")

# %%
# The profile has the same in the range ``data``. Where that range stands
# matters. In ``for batch in loader:`` the wait is over *before* the loop's
# body begins, so a range around the first lines of the body sees nothing of
# it. Both can be read from this trace: ``data`` is around ``next(it)``, and
# what comes between its end and the next phase is where the body would begin.

import numpy as np
import pandas as pd

phases = before.trace.table("ranges", ["name", "start_ns", "end_ns"])
phases = phases.sort_values("start_ns").set_index("name")
start, end = (phases.loc["data", c].to_numpy() for c in phases.columns)
body = phases.loc["copy", "start_ns"].to_numpy()
places = {"around next(it)": end - start, "in the body": body - end}
rows = [(place, np.median(ns)) for place, ns in places.items()]
plots.table(pd.DataFrame(rows, columns=["where the range is", "median_ns"]))

# %%
# A trace that shows next to no time in "data loading" may have its range in
# the wrong place. On the timeline, the wait is the block before each step's
# own work; in a GPU run the stream below it runs dry.

plots.timeline(before.trace, title=f"Loading in the process ({before.mode})")

# %%
# A worked example with a known answer
# ------------------------------------
# This trace is synthetic: ``nsightkit.workloads.planted`` wrote it and it
# never ran on a GPU. Its loader was planted to be slower than its step, and
# the idle time that this causes is known. Found and planted, cause by cause:

import tempfile
from pathlib import Path

import nsightkit
from nsightkit.analysis.timeline import gaps
from nsightkit.workloads import planted

folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "starved.sqlite")
truth = planted.training(path, fault="starved")
synthetic = nsightkit.load(path)
causes = gaps.summary(synthetic)
causes["planted_ns"] = causes["cause"].map(truth["gaps"])
plots.table(causes)

# %%
# Found is ``total_ns``; it equals what was planted. The few gaps that are not
# the loader's are those between two launches. A cause comes with its evidence,
# what the CPU was in while the GPU had nothing to do:

longest = gaps.find(synthetic).nlargest(3, "duration_ns")
evidence = pd.DataFrame(longest.pop("evidence").tolist())
longest = longest[["duration_ns", "cause"]].reset_index(drop=True)
plots.table(longest.join(evidence[["kind", "name", "ended_by"]]))

# %%
# What would it gain never to wait? Not simply the share of idle time: without
# this wait something else may hold the step up. ``whatif`` plays the trace
# again as a schedule, with its launches, streams and waits, but without those
# for data. The same loop was also written without its fault, and what that
# one takes less is the truth:

from nsightkit.analysis.replay import whatif
from nsightkit.analysis.timeline import overview

planted.training(Path(folder.name, "healthy.sqlite"))
healthy = nsightkit.load(Path(folder.name, "healthy.sqlite"))
took = [overview.summary(t)["window_ns"] for t in (synthetic, healthy)]
(known,) = whatif.summary(synthetic, ["no-input-wait"])
print(f"predicted: {known['speedup']:.3f} times as fast")
print(f"written without the fault: {took[0] / took[1]:.3f} times")

# %%
# Without the range, the wait would still show: the process sits in ``poll``,
# and waiting in the operating system outside CUDA calls, other than a sleep,
# counts as input as well. The figure of all idle time, and of the real trace
# where it is a GPU's:

traces = {"synthetic": synthetic}
if before.trace.recorded("kernels"):
    traces[before.mode] = before.trace
for origin, trace in traces.items():
    title = f"GPU idle time by cause ({origin})"
    plots.gap_bars(gaps.summary(trace), title=title)

# %%
# One thing no trace of Nsight Systems shows: the workers. They are forked and
# never call ``exec``, and such processes are not traced unless one asks for
# it with ``--trace-fork-before-exec``, which is documented as able to
# deadlock. A timeline without workers says nothing about how many there are.
# Starvation has to be read from the process that waits.

# %%
# Change one thing
# ----------------
# Let worker processes prepare the batches. In a program of your own:
#
# .. code-block:: python
#
#    loader = DataLoader(dataset, batch_size, num_workers=8,
#                        prefetch_factor=4, pin_memory=True)
#    ...
#    batch = batch.to("cuda", non_blocking=True)
#
# Pinned memory helps only together with ``non_blocking=True``. Before running
# it, the prediction for this machine, from the first run alone:

from nsightkit.analysis.timeline import steps

workers = before.parameters["workers"]
gpu_ns = float(steps.summary(before.trace)["busy_ns"].fillna(0).median())
predicted_ns = step_time(wait_ns, rest_ns, gpu_ns, workers)
print(f"predicted: {predicted_ns / 1e6:.1f} ms a step, {workers} workers")

# %%
# The second prediction plays the trace again with no wait for data at all, as
# if there were enough workers. Its last column says how far the replay without
# a change is from what was recorded. A smoke run has no GPU work to play.

(replay,) = whatif.summary(before.trace, ["no-input-wait"])
names = {"speedup": "times as fast", "replay_error": "share off, unchanged"}
plots.table(pd.DataFrame([replay]).rename(columns=names), missing="not known")

# %%
# Measure again
# -------------

after = measure("starved-input", "after")
after

# %%
# Nothing else may have changed: the parameters of the two runs should differ
# in one switch, and both should learn the same from the same samples.

gpus = [(run.provenance["gpu"] or {}).get("name") for run in (before, after)]
comparable = before.mode == after.mode and gpus[0] == gpus[1]
if comparable:
    new = after.parameters.items() - before.parameters.items()
    print("changed:", {k: (before.parameters[k], v) for k, v in new})
    apart = abs(before.values("loss") - after.values("loss")).max()
    print(f"largest difference between the losses of a step: {apart:.2g}")
plots.step_times(
    {run.part: run.values("step_ns") for run in (before, after)},
    title=f"Step times with and without workers ({after.mode})",
)

# %%
# And where the time of a step went, phase by phase. These are times on the
# CPU: in a GPU run forward and backward are what it takes to launch them. A
# table of phases should add up to the step, so what is left over is printed.

from nsightkit.analysis.timeline import ranges

for run in (before, after):
    whole = ranges.summary(run.trace, match="^step$").iloc[0]
    rest = whole["exclusive_ns"] / whole["total_ns"]
    print(f"{run.part}: {rest:.1%} of the steps lie outside of all phases")
names = "^(data|copy|forward|backward|optimizer)$"
plots.before_after(
    *(ranges.summary(run.trace, match=names) for run in (before, after)),
    key="name",
    value="median_ns",
    labels=("in the process", "with workers"),
    title=f"Median CPU time of a phase ({after.mode})",
)

# %%
# Verdict
# -------
# Computed from the two runs:

import textwrap

step_ns = after.median("step_ns")
wait_after = after.median("data_wait_ns") / step_ns
gain = before.median("step_ns") / step_ns
by_replay = "not known"
if replay["speedup"]:
    by_replay = f"{replay['speedup']:.1f}"
where = "in a smoke run on a CPU" if after.mode == "smoke" else "on a GPU"
verdict = (
    f"{where}, waiting took {wait_before:.0%} of a step without workers and "
    f"{wait_after:.0%} with {workers}; a step got {gain:.1f} times as fast "
    f"(predicted by replay: {by_replay}): {step_ns / 1e6:.1f} ms, with "
    f"{predicted_ns / 1e6:.1f} ms predicted for so many workers."
)
if not comparable:
    verdict = "the two runs are not of the same machine; nothing to compare."
if before.mode == after.mode == "smoke":
    print("This page's own run:", textwrap.fill(verdict), sep="\n")
    verdict = (
        f"on a {alone.source['gpu']} (case file), four loader workers made "
        f"the median step of ResNet-50 {step_gain:.2f} times as fast; replay "
        f"predicts {never_late:.2f} for a loader that is never late. Then "
        f"{four.trace.verdict()['bottleneck']} was in the way."
    )
findings = {"verdict": verdict, "wait": wait_before, "wait_left": wait_after}
print(textwrap.fill(verdict))

# %%
# The prediction for the workers is a bound, and it is made from medians of
# another run: a step a little below it is noise. A step far above it has met
# something that the bound leaves out, and ``nsightkit gaps`` on the second
# trace names it. The replay is of the profiled steps, and of a loader that is
# always in time; workers that still let the step wait gain less.

# %%
# Limits
# ------
# The bound assumes that every worker has a core to itself. On a machine with
# few cores workers compete with the training process, and the step itself
# becomes slower; the smoke version therefore mostly waits for its storage,
# which costs no core. It also assumes a loader that scales: one lock, one disk
# or one network link, shared by all workers, ends that.
#
# The first batch is left out of the medians: starting the workers takes time,
# once an epoch. Step times come from runs without a profiler, the ranges from
# a profiled run, which is somewhat slower on the CPU.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{run.part}, {run.mode}, as a timeline": run.trace
    for run in (before, after)
}
downloads["synthetic, as a timeline"] = synthetic

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/02_starved_input_pipeline.py
#
# The loop itself, under Nsight Systems; save it as ``loop.py``:
#
# .. code-block:: python
#
#    from nsightkit.workloads import training
#
#    if __name__ == "__main__":
#        with training.start("cuda", starved=True, read_ms=5.0) as loop:
#            for _ in range(50):
#                loop.step()
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output starved -- python loop.py
#    $ nsightkit gaps starved.sqlite
#    $ nsightkit whatif starved.sqlite no-input-wait
#    $ nsightkit ranges starved.sqlite --match data
#    $ nsightkit calls starved.sqlite --os
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only starved-input
