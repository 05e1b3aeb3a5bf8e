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
# record: 40 s
from nsightkit import plots
from nsightkit.guide import case

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
from _lib import figures

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
figures.share_curves(
    periods,
    curves,
    levels,
    title="What a sampler would report (case file)",
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
# To run this page's script (without a GPU it runs a tiny CPU version):
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

from _lib import one_thread

from nsightkit.guide import headline, measure
from nsightkit.workloads import training

# 16k tokens through 0.27 G parameters: 23 TFLOP, which take 50 to 70 ms.
# Launching them takes 12 layers x 125 launches x 6 µs = 9 ms, so the GPU
# always has work. NVML averages over up to a second: both loops last for
# some seconds.
sizes = dict(vocabulary=32_000, hidden=1024, layers=12, heads=16)
sizes |= dict(context=1024, batch=16, precision="bf16", workers=8)
small = dict(vocabulary=512, hidden=64, layers=2, heads=4)
small |= dict(context=64, batch=4, workers=0)

language_model = measure(
    "gpu-util/training",
    training.run,
    gpu=sizes,
    small=small,
    steps=100,
)
spinning = measure(
    "gpu-util/one-thread",
    one_thread.run,
    gpu=dict(step_ms=100.0),
    small=dict(step_ms=2.0),
)
language_model

# %%
# What NVML said, what the trace says, and what was achieved:


# fold: How the table is made
def flops(sizes):
    """Count a multiply and an add as two; backward costs twice forward."""
    d, tokens = sizes["hidden"], sizes["batch"] * sizes["context"]
    layer = 2 * tokens * 16 * d**2 + 4 * tokens * sizes["context"] * d
    return 3 * (sizes["layers"] * layer + 2 * tokens * d * sizes["vocabulary"])


def utilisation(run, work_flops):
    """Give what NVML said, what the trace says, and what was achieved."""
    row = {"run": run.name, "share by NVML": None, "share busy": None}
    reading = run.median("gpu_utilization_percent")
    if reading is not None:
        row["share by NVML"] = reading / 100
    if run.trace.recorded("kernels"):
        whole = run.trace.summary()
        row["share busy"] = whole["busy_ns"] / whole["span_ns"]
    step_ns = run.median("step_ns")
    row["median step (ms)"] = step_ns / 1e6
    row["useful work (TFLOP/s)"] = work_flops / step_ns / 1e3
    row["power (W)"] = run.median("power_w")
    return row


both = pd.DataFrame()
if language_model and spinning:
    plots.timeline(
        language_model.trace, title=f"Training steps ({language_model.mode})"
    )
    useful = flops(language_model.parameters)
    rows = [utilisation(language_model, useful), utilisation(spinning, 0)]
    both = pd.DataFrame(rows)
plots.table(both, missing="not measured") if len(both) else None

# %%

spinning

# %%
# Traces whose truth is known. They are synthetic, and never ran on a GPU. The
# first loop waits for its data in every step, the second has kernels that are
# over before the next is launched. The gain of the first is known, because it
# was also written without its fault:

# fold: How they are made
from _lib import synthetic

healthy, _ = synthetic.training()
healthy_ns = healthy.summary()["window_ns"]
rows = []
changes = {"starved": "no-input-wait", "tiny": "free-launches"}
for fault, change in changes.items():
    trace, truth = synthetic.training(fault)
    whole = trace.summary()
    gain = whole["window_ns"] / healthy_ns if fault == "starved" else None
    row = {"synthetic trace": fault}
    row["busy, true (ms)"] = truth["busy_ns"] / 1e6
    row["busy, found (ms)"] = whole["busy_ns"] / 1e6
    row["gain, true"] = gain
    row["gain, predicted"] = trace.whatif(change)["speedup"].iloc[0]
    rows.append(row)
plots.table(pd.DataFrame(rows), missing="not written")

# %%
# What the two runs say:

# fold: How the answer is put together
said = "NVML was not read in both runs."
if len(both) and both["share by NVML"].notna().all():
    real, spin = both["share by NVML"]
    said = (
        f"NVML read {real:.0%} for the training step and {spin:.0%} for one "
        f"spinning thread, which does no useful work."
    )
within = one.memops().groupby("kind")[["bytes", "total_ns"]].sum().loc["DtoD"]
gaps = programs["starved loader, V100"].gaps(each=True)
first = table.iloc[0]
findings = headline(
    said,
    language_model,
    spinning,
    otherwise=(
        f"an H100 was busy for {first['share busy']:.0%} of a second, and ran "
        f"kernels for {first['share with kernels']:.0%} of it. Nearly all the "
        "rest was copies from the host's memory."
    ),
    badge=copies.label,
    gap_ms=float((gaps["end_ns"] - gaps["start_ns"]).max() / 1e6),
    inside=float(within["bytes"] / within["total_ns"] / (moved / took_ns)),
)
