"""
GPU-Util is high: is the GPU working hard?
==========================================

``nvidia-smi`` shows a high utilisation, and the job is slow all the same. What
does the figure count, and what does a trace say instead?

.. in-short::
"""

# %%
# The symptom
# -----------
# The question that everybody asks of a GPU, once a second:
#
# .. code-block:: console
#
#    $ nvidia-smi --query-gpu=utilization.gpu --format=csv -l 1
#
# NVML, the library behind it, defines the answer as the percentage of *time*
# over the past sample period in which one or more kernels were executing.
# Time, and not multiprocessors: a kernel of one thread counts like one that
# fills the GPU.
#
# Here are eighty milliseconds of a job on an H100 that somebody recorded. The
# GPU has hardly a gap:

# sphinx_gallery_thumbnail_number = 2
from nsightkit import plots
from nsightkit.investigations import case

copies = case("h100-all-copies", "two-gpus-1s")
one = copies.trace.device(0)
plots.timeline(
    one, end_ns=80_000_000, levels=1, title="A busy H100 (case file)"
)
copies

# %%
# Predict: what does the figure hide?
# -----------------------------------
# A single thread that never stops is a kernel that is always running. How much
# of an H200 is it?

multiprocessors, threads_each = 132, 2048  # an H200; CUDA's limit for each
slots = multiprocessors * threads_each
print(f"one thread fills {1 / slots:.5%} of {slots:,} thread slots")

# %%
# What does GPU-Util show for it? And for a loop that waits for three units of
# time out of nine?
#
# .. dropdown:: Answer
#
#    All of it for the thread, by NVML's definition. Two thirds for the loop,
#    if the driver looks often enough. Waits that are shorter than it can
#    resolve do not show, and how finely it looks inside its sample period is
#    not documented.
#
# Now the H100 above. For which share of its time do kernels run, and would it
# be faster if its launches, or its waits, cost nothing?
#
# .. dropdown:: Answer
#
#    The green is copies. Kernels run for hardly any of the time, and cheaper
#    launches or waits gain nothing: even the change that gains most, in the
#    table below, gains a few percent.

# %%
# Evidence: three busy programs
# -----------------------------
# *Busy* is the union of all kernels, copies and graph replays over the span of
# the trace. The other two programs are from :doc:`02_starved_input_pipeline`
# and :doc:`04_tiny_kernels`. The last two columns are the change that gains
# most when the trace is played again, and what it gains:

import pandas as pd

programs = {
    "copies, H100": one,
    "starved loader, V100": case("v100-starved-loader", "workers-0").trace,
    "tiny kernels, A100": case("a100-batch-size", "batch-2").trace,
}


def described(name, trace):
    """What a trace says of how busy a GPU was, and with what."""
    whole = trace.summary()
    change = trace.verdict()["changes"][0]
    return {
        "program": name,
        "share busy": whole["busy_ns"] / whole["span_ns"],
        "share with kernels": whole["density"],
        "1 / busy": whole["span_ns"] / whole["busy_ns"],
        "change": change["change"],
        "times as fast": change["speedup"],
    }


table = pd.DataFrame([described(*row) for row in programs.items()])
plots.table(table, dict.fromkeys(["1 / busy", "times as fast"], "{:.2f}"))

# %%
# The H100 is the busiest of them, and computes least. Nor is the idle share
# what there is to gain: no single change of the other two gains all of it.
#
# What would GPU-Util have shown? Nobody recorded it. Be the driver: cut each
# trace into windows, and count those in which any kernel ran at any moment.
# Short windows give the true share. Long ones swallow every gap that is
# shorter than they are:

import numpy as np

from nsightkit.analysis.core.intervals import Coverage


def reported(trace, period_ns):
    """Share of windows of this length that hold a part of a kernel."""
    events = trace.table("kernels", ["start_ns", "end_ns"])
    begin, end = events["start_ns"].min(), events["end_ns"].max()
    windows = np.arange(begin, max(end - period_ns, begin + 1), period_ns)
    busy = Coverage(events["start_ns"], events["end_ns"])
    return (busy.of(windows, windows + period_ns) > 0).mean()


# %%

# fold: How the figure is drawn
periods = np.geomspace(1e3, 2e8, 40).astype(int)
shares = zip(programs, table["share with kernels"], strict=True)
levels = dict(list(shares)[1:])
curves = {n: [reported(t, p) for p in periods] for n, t in programs.items()}
plots.share_curves(
    periods,
    curves,
    levels=levels,
    level="true share",
    title="What a sampler would report (case file)",
    axis="length of a window",
    share="windows with a kernel",
)

# %%
# NVML's documentation gives a sample period between a sixth of a second and a
# second. If the driver only asked whether any kernel ran in its period, all
# three would read as full. If it added up the time, none would. A job that is
# slow at full utilisation has many short gaps, or kernels that make little of
# the GPU. A starved loader usually shows as less.

# %%
# The clue beside it: power
# -------------------------
# The same tool has a better question:
#
# .. code-block:: console
#
#    $ nvidia-smi --query-gpu=utilization.gpu,power.draw,power.limit \
#          --format=csv -l 1
#
# Switching transistors takes power, and waiting takes little. Large matrix
# products in 16 bits draw so much that the power limit sets their clock
# (:doc:`15_real_ceilings`). A GPU that shows full utilisation and draws half
# of its limit is not doing such work: look for copies, small kernels, or
# kernels that wait for memory. The clue works in one direction only. High
# power is not yet useful work.

# %%
# Change one thing: the work, and not the figure
# ----------------------------------------------
# The H100's copies come from pinned memory of the host. A program that fetches
# its weights for each use looks like this:
#
# .. code-block:: diff
#
#     for layer in layers:
#    -    layer.to("cuda", non_blocking=True)
#         x = layer(x)
#    -    layer.to("cpu", non_blocking=True)
#
# What if they stayed on the card? Played again without copies to the device:

fetched = one.memops().groupby("kind")[["bytes", "total_ns"]].sum()
moved, took_ns = fetched.loc["HtoD"]
kept = copies.trace.whatif(without="HtoD")["speedup"].iloc[0]
print(f"{moved / 1e9:.1f} GB copied in {took_ns / 1e9:.2f} s", end=", ")
print(f"{moved / took_ns:.1f} GB/s")
print(f"without these copies: {kept:.1f} times as fast, by replay")

# %%
# Verdict
# -------
# Utilisation says that something ran. Well below full, it says that something
# makes the GPU wait, and ``nsightkit gaps`` says what. Near full, it says
# nothing: ask what ran, and what it achieved.

# %%
# Limits
# ------
# * The window model shows what a given resolution would hide, and not how a
#   driver is built. Nobody read NVML while these traces were recorded.
# * NVML's definition speaks of kernels; the busy time of a trace also counts
#   copies. Whether a copy alone counts for GPU-Util is not documented.
# * The trace of the copies does not hold the program. That weights are fetched
#   is a guess, and whether they fit on the card is not known. It lasts a
#   second.
# * A profiler slows the CPU, so a profiled run has somewhat more idle time.

# %%
# Run it yourself
# ---------------
# On a program of your own, next to what ``nvidia-smi`` says about it:
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output run -- python train.py
#    $ nsightkit summary run.sqlite
#    $ nsightkit kernels run.sqlite --by category
#    $ nsightkit gaps run.sqlite
#    $ nsightkit whatif run.sqlite
#
# This page, which measures with a GPU and else runs small on the CPU:
#
# .. code-block:: console
#
#    $ python examples/01_gpu_util_lies.py

downloads = {f"{name}, case file": trace for name, trace in programs.items()}

# %%
# Exercises
# ---------
# 1. Open the starved loader's timeline in Perfetto. How long are its gaps, and
#    how often would the driver have to look to see them?
#
#    .. dropdown:: Answer
#
#       The longest gap lasts :measured:`01_gpu_util_lies.gap_ms:.0f` ms. A
#       window has to fit into it: the curve leaves the top where windows
#       become shorter than that.
#
# 2. ``nsightkit memops`` on the H100's trace: which copies take the time, and
#    what is the rate of the others?
#
#    .. dropdown:: Answer
#
#       Copies from pinned host memory take nearly all of it. Copies within the
#       card move more bytes, :measured:`01_gpu_util_lies.inside:.0f` times as
#       many each second. So what crosses the bus should cross it once.
#
# 3. GPU-Util shows full, and the power draw is near the limit. What do you ask
#    next?
#
#    .. dropdown:: Answer
#
#       How much of the time is matrix products (``nsightkit kernels --by
#       category``), and how close they come to the card's peak (``nsightkit
#       sol``). :doc:`09_precision` has a GPU full of fp32 products.

# %%
# Measured here
# -------------
# .. own-run::
#
# A training step of a small language model, and a program that keeps a single
# GPU thread spinning. On a GPU NVML is read while the loops run unwatched.

from nsightkit.analysis.timeline import overview
from nsightkit.investigations import headline, measure

training = measure("gpu-util", "training")
one_thread = measure("gpu-util", "one-thread")
training

# %%
# What NVML said, what the trace says, and what was achieved:


# fold: How the table is made
def flops(sizes):
    """Count a multiply and an add as two; backward costs twice forward."""
    if "hidden" not in sizes:
        return 0
    d, tokens = sizes["hidden"], sizes["batch"] * sizes["context"]
    layer = 2 * tokens * 16 * d**2 + 4 * tokens * sizes["context"] * d
    return 3 * (sizes["layers"] * layer + 2 * tokens * d * sizes["vocabulary"])


def utilisation(run):
    """Give what NVML said, what the trace says, and what was achieved."""
    whole, step_ns = overview.summary(run.trace), run.median("step_ns")
    nvml = run.median("gpu_utilization_percent")
    power = run.median("power_w")
    found = {
        "run": f"{run.part} ({run.mode})",
        "share by NVML": None if nvml is None else nvml / 100,
        "share busy": whole["span_ns"] and whole["busy_ns"] / whole["span_ns"],
        "median step (ms)": step_ns / 1e6,
        "useful work (TFLOP/s)": flops(run.parameters) / step_ns / 1e3,
    }
    return found if power is None else found | {"power (W)": power}


both = [utilisation(training), utilisation(one_thread)]
plots.timeline(training.trace, title=f"Training steps ({training.mode})")
plots.table(pd.DataFrame(both), missing="not measured")

# %%

one_thread

# %%
# Traces whose truth is known. They are synthetic:
# ``nsightkit.workloads.planted`` wrote them, and they never ran on a GPU. The
# first loop waits for its data in every step, the second has kernels that are
# over before the next is launched. The gain of the first is known, because it
# was also written without its fault:

# fold: How they are planted
import tempfile
from pathlib import Path

import nsightkit
from nsightkit.workloads import planted

folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "healthy.sqlite")
planted.training(path)
healthy_ns = nsightkit.load(path).summary()["window_ns"]
rows = []
changes = {"starved": "no-input-wait", "tiny": "free-launches"}
for fault, change in changes.items():
    path = Path(folder.name, f"{fault}.sqlite")
    truth = planted.training(path, fault=fault)
    trace = nsightkit.load(path)
    whole = trace.summary()
    known = whole["window_ns"] / healthy_ns if fault == "starved" else None
    played = trace.whatif(change)["speedup"].iloc[0]
    busy_ms = [ns["busy_ns"] / 1e6 for ns in (truth, whole)]
    rows.append((fault, *busy_ms, played, known))
names = ["synthetic trace", "busy, planted (ms)", "busy, found (ms)"]
names += ["times as fast, predicted", "planted"]
plots.table(pd.DataFrame(rows, columns=names), missing="not written")

# %%
# What the two runs say:

# fold: How the answer is put together
real, spin = (row["share by NVML"] for row in both)
said = "NVML was not read in both runs."
if real is not None and spin is not None:
    said = (
        f"NVML read {real:.0%} for the training step and {spin:.0%} for one "
        f"spinning thread, which does no useful work at all."
    )
within = one.memops().groupby("kind")[["bytes", "total_ns"]].sum().loc["DtoD"]
gaps = programs["starved loader, V100"].gaps(each=True)
first = table.iloc[0]
findings = headline(
    said,
    training,
    otherwise=(
        f"an H100 was busy for {first['share busy']:.0%} of a second, and ran "
        f"kernels for {first['share with kernels']:.0%} of it. Nearly all the "
        "rest was copies from the host's memory."
    ),
    badge=copies.label,
    gap_ms=float((gaps["end_ns"] - gaps["start_ns"]).max() / 1e6),
    inside=float(within["bytes"] / within["total_ns"] / (moved / took_ns)),
)
