"""
GPU-Util is high: is the GPU working hard?
==========================================

Everybody watches the utilisation that nvidia-smi shows, and many read it as
the share of the GPU that is in use. What does it count, and what does a trace
say instead?

What is measured: a training step of a small language model, and a program
that keeps a single GPU thread spinning. What came out:
:measured:`01_gpu_util_lies.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# NVML, the library behind nvidia-smi, defines the figure as the percentage of
# *time* over the past sample period in which one or more kernels were
# executing. Time, not multiprocessors: a kernel of one thread counts like one
# that fills the GPU. So a single thread that never stops should read as full
# utilisation, and this is how little of an H200 it would be:

# sphinx_gallery_thumbnail_number = 3
multiprocessors, threads_each = 132, 2048  # an H200; CUDA's limit for each
slots = multiprocessors * threads_each
print(f"one thread fills {1 / slots:.5%} of {slots:,} thread slots")

work, wait = 6, 3  # of a loop that waits in each step, in any unit of time
share = work / (work + wait)
print(f"a loop that waits {wait} of {work + wait} reads {share:.0%}")

# %%
# A program that waits for something else should read *less* than full: idle
# time is idle time. Waits that are too short for the sampling to resolve are
# the exception, and how finely the driver looks inside its sample period is
# not documented. Both cases are worked out below.

# %%
# Measure
# -------
# Steps are timed without a profiler; then a few are profiled. On a GPU NVML
# is read, too, while the loop runs unwatched.

from nsightkit.investigations import measure

training = measure("gpu-util", "training")
training

# %%
# Read
# ----
# First what a step achieves: the multiplications and additions of its matrix
# products follow from the model's sizes.


def flops(sizes):
    """Count a multiply and an add as two; backward costs twice forward."""
    if "hidden" not in sizes:
        return 0
    d, tokens = sizes["hidden"], sizes["batch"] * sizes["context"]
    layer = 2 * tokens * 16 * d**2 + 4 * tokens * sizes["context"] * d
    return 3 * (sizes["layers"] * layer + 2 * tokens * d * sizes["vocabulary"])


print(f"{flops(training.parameters) / 1e12:.3g} TFLOP in a step")

# %%
# Then both views of utilisation. *Busy* is the union of all kernels, copies
# and graph replays over the span of the trace.

import pandas as pd

from nsightkit import plots
from nsightkit.analysis.timeline import overview


def utilisation(run):
    """Give what NVML said, what the trace says, and what was achieved."""
    whole, step_ns = overview.summary(run.trace), run.median("step_ns")
    nvml = run.median("gpu_utilization_percent")
    return {
        "run": f"{run.part} ({run.mode})",
        "share by NVML": None if nvml is None else nvml / 100,
        "share busy": whole["span_ns"] and whole["busy_ns"] / whole["span_ns"],
        "median step (ms)": step_ns / 1e6,
        "useful work (TFLOP/s)": flops(run.parameters) / step_ns / 1e3,
    }


missing = "not measured"
plots.table(pd.DataFrame([utilisation(training)]), missing=missing)

# %%
# The first two shares are what a GPU run can say: what NVML reported, and how
# much of its span the trace was busy. The last column is the one that pays.
# The timeline shows where a step's time lies, CPU ranges above and, in a GPU
# run, its streams below.

plots.timeline(training.trace, title=f"Three training steps ({training.mode})")

# %%
# What fills that time? In a GPU run, kernels by the kind of work they do; in
# a smoke run, the phases of the step on the CPU.

from nsightkit.analysis.timeline import kernels, ranges

if training.trace.recorded("kernels"):
    filled = kernels.summary(training.trace, by="category")
else:
    filled = ranges.summary(training.trace, match="^[a-z]+$")
plots.table(filled[["name", "count", "total_ns", "median_ns"]])

# %%
# A worked example with a known answer
# ------------------------------------
# These two traces are synthetic: ``nsightkit.workloads.planted`` wrote them
# and they never ran on a GPU. The first loop waits for its data in every
# step, the second has kernels that are over before the next is launched. What
# was planted is known, so what the analysis finds can be checked.

import tempfile
from pathlib import Path

import nsightkit
from nsightkit.workloads import planted

folder = tempfile.TemporaryDirectory()
rows, synthetic = [], {}
for fault in ("starved", "tiny"):
    path = Path(folder.name, f"{fault}.sqlite")
    truth = planted.training(path, fault=fault)
    synthetic[fault] = nsightkit.load(path)
    found = overview.summary(synthetic[fault])
    figures = ("span_ns", "busy_ns", "idle_ns")
    rows += [(fault, name, truth[name], found[name]) for name in figures]
names = ["synthetic trace", "figure", "planted", "found"]
plots.table(pd.DataFrame(rows, columns=names))

# %%
# Planted and found agree to the nanosecond. Three steps of the first trace:
# the stream runs dry in each, while the CPU sits in ``dataload``.

from nsightkit.analysis.timeline import steps

starved = synthetic["starved"]
end_ns = int(steps.summary(starved)["start_ns"].iloc[3])
title = "Three steps of a starved loop (synthetic)"
plots.timeline(starved, end_ns=end_ns, title=title)

# %%
# Now be the driver: cut each trace into windows and count those in which any
# kernel ran at any moment. Very short windows give the true busy share. Long
# ones swallow every gap that is shorter than they are.

import numpy as np

from nsightkit.analysis.core.intervals import Coverage


def reported(trace, period_ns):
    """Share of windows of this length that hold a part of a kernel."""
    events = trace.table("kernels", ["start_ns", "end_ns"])
    begin, end = events["start_ns"].min(), events["end_ns"].max()
    windows = np.arange(begin, max(end - period_ns, begin + 1), period_ns)
    busy = Coverage(events["start_ns"], events["end_ns"])
    return (busy.of(windows, windows + period_ns) > 0).mean()


periods = np.geomspace(1e2, 3e7, 40).astype(int)
traces = {f"{fault} (synthetic)": t for fault, t in synthetic.items()}
origin = "synthetic"
if training.trace.recorded("kernels"):
    traces[f"training ({training.mode})"] = training.trace
    origin = f"synthetic and {training.mode}"
levels = {
    f"busy, {k}": overview.summary(t)["density"] for k, t in traces.items()
}
curves = {k: [reported(t, p) for p in periods] for k, t in traces.items()}
plots.share_curves(
    periods,
    curves,
    levels=levels,
    title=f"What a sampler would report ({origin})",
    axis="length of a window",
    share="windows with a kernel",
)

# %%
# The synthetic curves start near the true share and end at the top. The loop
# with tiny kernels looks full to any sampler coarser than its gaps, although
# its GPU is idle most of the time; the starved loop looks partly idle to all
# but the coarsest. High and slow is therefore a sign of many short gaps, or of
# kernels that make little of the GPU. It is not the sign of starvation.
#
# Nor is utilisation what there is to gain. ``whatif`` plays a trace again as a
# schedule, once without waiting for data and once with launches that cost next
# to nothing. The same loop was also written with nothing planted: it is what
# the first loop would be without its fault. The second has more kernels.
# Beside the predictions, what idle time would suggest if it were the gain:

from nsightkit.analysis.replay import whatif

path = Path(folder.name, "healthy.sqlite")
planted.training(path)
healthy_ns = overview.summary(nsightkit.load(path))["window_ns"]
changes = {"starved": "no-input-wait", "tiny": "free-launches"}
rows = []
for fault, change in changes.items():
    whole = overview.summary(synthetic[fault])
    (row,) = whatif.summary(synthetic[fault], [change])
    idle, gain = whole["idle_ns"] / whole["span_ns"], row["speedup"]
    truth = whole["window_ns"] / healthy_ns if fault == "starved" else None
    rows.append((fault, idle, 1 / (1 - idle), change, gain, truth))
names = ["synthetic trace", "share idle", "1 / (1 - idle)", "change"]
names += ["predicted", "truth"]
plots.table(pd.DataFrame(rows, columns=names), missing="not written")

# %%
# Change one thing
# ----------------
# Keep the GPU's time and take away the work: the step becomes one kernel of
# one thread that spins and computes nothing. If GPU-Util measured work, it
# would collapse.

# %%
# Measure again
# -------------

one_thread = measure("gpu-util", "one-thread")
one_thread

# %%

both = [utilisation(training), utilisation(one_thread)]
plots.table(pd.DataFrame(both), missing=missing)

# %%
# Verdict
# -------
# Computed from the table above, not typed:

import textwrap

real, spin = (row["share by NVML"] for row in both)
if real is None or spin is None:
    verdict = (
        "NVML was not read in this build; its synthetic traces show what a "
        "sampler can hide."
    )
else:
    verdict = (
        f"NVML read {real:.0%} for the training step and {spin:.0%} for one "
        f"spinning thread, which does no useful work at all."
    )
findings = {"verdict": verdict}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# GPU-Util is not useless. Well below full, it says that something makes the
# GPU wait, and then the next questions are for whom, and what it would gain
# not to: ``nsightkit gaps``, ``nsightkit whatif``. One thread that spins has
# no such change: nothing waits for it. Near
# full, it says nothing, and a busy share near one says little more: a busy
# GPU may run kernels that use a fraction of it. How close they come to what
# the hardware can do is a question of arithmetic and bytes per second, for
# which the last column of the table is a first answer.
#
# NVML speaks of kernels; the busy time of a trace also counts copies. The
# profiler slows the CPU, so a profiled run has somewhat more idle time than
# the run NVML was watching. The window model is a model: it shows what a given
# resolution would hide, not how a driver is built.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{run.part}, {run.mode}, as a timeline": run.trace
    for run in (training, one_thread)
}
for name, trace in synthetic.items():
    downloads[f"{name}, synthetic, as a timeline"] = trace

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/01_gpu_util_lies.py
#
# For a program of your own, next to what nvidia-smi says about it:
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output run -- python train.py
#    $ nsightkit summary run.sqlite
#    $ nsightkit kernels run.sqlite --by category
#    $ nsightkit gaps run.sqlite
#    $ nsightkit whatif run.sqlite
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only gpu-util
