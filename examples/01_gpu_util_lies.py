"""
GPU-Util is high: is the GPU working hard?
==========================================

``nvidia-smi`` shows a high utilization, and the job is slow. What does that
number count, and what does a trace show that it leaves out?

.. in-short::
"""

# %%
# The symptom
# -----------
# The first thing most of us do with a slow job is look at this, once a second:
#
# .. code-block:: console
#
#    $ nvidia-smi --query-gpu=utilization.gpu --format=csv -l 1
#
# The number comes from NVML. It is the percentage of *time*, over the last
# sample period, in which at least one kernel was executing. A kernel of a
# single thread counts as much as a kernel that fills every multiprocessor.
#
# Here are eighty milliseconds of a language model on an A100, recorded and
# published by others. The GPU row is almost solid, so GPU-Util would show
# full:

# sphinx_gallery_thumbnail_number = 2
# record: 40 s
from nsightkit import plots
from nsightkit.guide import case

model = case("a100-cuda-graphs", "eager")
plots.timeline(
    model.trace,
    start_ns=2_000_000_000,
    end_ns=2_080_000_000,
    levels=1,
    title="A language model on an A100 (case file)",
)
model

# %%
# Predict: how little work makes it read full?
# --------------------------------------------
# A single thread that spins forever is a kernel that is always running. How
# much of an H200 does it use?

multiprocessors, threads_each = 132, 2048  # an H200; CUDA's limit for each
slots = multiprocessors * threads_each
print(f"one thread fills {1 / slots:.5%} of {slots:,} thread slots")

# %%
# So what does GPU-Util show for that thread? And for a loop in which the GPU
# waits for a third of the time?
#
# .. dropdown:: Answer
#
#    Full for the thread, by NVML's definition. Two thirds for the loop, if the
#    driver samples often enough. Waits shorter than its resolution do not
#    show, and that resolution is not documented.
#
# Now the A100 above. Its kernels run nearly all of the time. Is anything left
# to gain, and would cheaper launches help?
#
# .. dropdown:: Answer
#
#    Launches gain nothing: the GPU never waits for one. But most of its kernel
#    time goes to fp32 matmuls that do not use the tensor cores. One line could
#    make the run several times faster. GPU-Util shows none of this.

# %%
# Evidence: does the busy share predict the gain?
# -----------------------------------------------
# *Busy* is the union of all kernels, copies and graph replays over the span of
# the trace. GPU-Util counts kernels only, so we show both. The last two
# columns are the change that gains most in a replay of the trace, and its
# predicted speedup. The loader is from :doc:`02_starved_input_pipeline`, the
# tiny kernels are from :doc:`04_tiny_kernels`:

import pandas as pd

copies = case("h100-all-copies", "two-gpus-1s")
one = copies.trace.device(0)
programs = {
    "fp32 model, A100": model.trace,
    "copies, H100": one,
    "starved loader, V100": case("v100-starved-loader", "workers-0").trace,
    "tiny kernels, A100": case("a100-batch-size", "batch-2").trace,
}


def described(name, trace):
    """Collect how busy a GPU was and which change gains most."""
    whole = trace.summary()
    changes = trace.verdict()["changes"]
    best = changes[0] if changes else {"change": "none", "speedup": 1.0}
    return {
        "program": name,
        "share busy": whole["busy_ns"] / whole["span_ns"],
        "share with kernels": whole["density"],
        "change": best["change"],
        "speedup": best["speedup"],
    }


table = pd.DataFrame([described(*row) for row in programs.items()])
looks = dict.fromkeys(["share busy", "share with kernels"], "{:.1%}")
plots.table(table, looks | {"speedup": "{:.2f}x"})

# %%
# Neither share predicts the gain. The A100 model runs kernels all the time,
# and no change that removes waiting helps: its kernels themselves are slow.
# The H100 is busy as well, but with copies. Kernels run for only a few percent
# of its time. Depending on how the driver samples, GPU-Util could read
# anything from a few percent to full. The other two have idle time, and no
# single change wins all of it back. (The starved loader waits for data more
# than for launches, but the two changes gain about the same; its page explains
# why.)
#
# What would GPU-Util have shown? No reading was recorded with these traces, so
# we simulate its sampling. We cut each trace into windows and count the
# windows that contain any part of a kernel. Short windows give the true share.
# Long windows hide every gap shorter than themselves:

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
    title="GPU-Util of four recorded programs (simulated sampling)",
)

# %%
# NVML documents a sample period between a sixth of a second and a second. If
# the driver only checked whether any kernel ran in a period, even a program
# with long gaps would read full. If it added up the time, only the model
# would. Either way, full utilization rules out only waits longer than a
# sample period. It leaves two problems: shorter gaps, and kernels that use
# little of the GPU.

# %%
# Does the power draw show more?
# ------------------------------
# The same tool has a second clue:
#
# .. code-block:: console
#
#    $ nvidia-smi --query-gpu=utilization.gpu,power.draw,power.limit \
#          --format=csv -l 1
#
# Switching transistors takes power and waiting takes little. Large bf16
# matmuls draw so much that the power limit sets their clock
# (:doc:`15_ceilings_and_rooflines`). A GPU at full utilization and half its
# power limit is doing something else: copies, small kernels, or kernels that
# wait for memory. The clue works in one direction only. High power can still
# be wasted work.

# %%
# Change one thing: the precision
# -------------------------------
# We look at the kernels' names instead of the utilization. Nearly all of the
# model's time is in ``sgemm``, fp32 on ordinary cores. One line lets PyTorch
# use the tensor cores:
#
# .. code-block:: diff
#
#    +torch.set_float32_matmul_precision("high")   # TF32
#
# On this card the peak of TF32 is eight times as high. We replay the trace
# with the matmuls sped up by that factor:

kernels = model.trace.kernels()
sgemm = kernels["name"].str.contains("sgemm")
share = kernels.loc[sgemm, "share"].sum()
tf32 = model.trace.whatif(scale=f"sgemm={1 / 8}")["speedup"].iloc[0]
print(f"sgemm takes {share:.1%} of the kernels' time")
print(f"with TF32: {tf32:.1f}x faster at most (replay)")

# %%
# Verdict
# -------
# A high GPU-Util means that some kernel ran. When it is well below full, the
# GPU waits or copies, and ``nsightkit verdict`` names the cause. When it is
# near full, ask two more questions: which kernels ran (``nsightkit kernels``),
# and how close they came to the card's limits (``nsightkit sol``). The chapter
# :doc:`/guide/hundred_percent` asks them of five programs.

# %%
# Limits
# ------
# * The window model shows what a given resolution would hide. The driver's
#   real method is not documented, and NVML was not read while these traces
#   were recorded.
# * NVML's definition speaks of kernels. Whether a copy alone counts towards
#   GPU-Util is not documented.
# * The TF32 speedup is a prediction. It assumes that matmuls keep their share
#   of the peak.
# * A profiler slows the CPU, so a profiled run has more idle time than the
#   same run without one.

# %%
# Run it yourself
# ---------------
# On your own program, next to its ``nvidia-smi`` reading:
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output run -- python train.py
#    $ nsightkit summary run.sqlite
#    $ nsightkit kernels run.sqlite --by category
#    $ nsightkit gaps run.sqlite
#    $ nsightkit whatif run.sqlite
#
# On a GPU, this page's script also reads NVML during a training step and
# during a single spinning thread. Without a GPU it runs a tiny CPU version:
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
#       window has to fit into it: the curve drops below full where windows
#       become shorter than that.
#
# 2. Run ``nsightkit memops`` on the H100's trace. Which copies take the time,
#    and how much faster are the others?
#
#    .. dropdown:: Answer
#
#       Copies from pinned host memory take nearly all of it. Copies within the
#       card move :measured:`01_gpu_util_lies.inside:.0f` times more bytes per
#       second, so data that has crossed the bus once should stay on the card.
#
# 3. GPU-Util shows full, and the power draw is near the limit. What do we ask
#    next?
#
#    .. dropdown:: Answer
#
#       How much of the time is matmuls (``nsightkit kernels --by category``),
#       and how close they come to the card's peak (``nsightkit sol``).
#       :doc:`09_precision` predicts what TF32 and bf16 would gain on the
#       model of this page.

# %%
# Measured here
# -------------
# .. own-run::
#
# NVML is read while two programs run unprofiled: a training step of a small
# language model, and a kernel that keeps a single thread spinning.

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


# fold: How the table is made
def flops(sizes):
    """Count a multiply and an add as two; backward costs twice forward."""
    d, tokens = sizes["hidden"], sizes["batch"] * sizes["context"]
    layer = 2 * tokens * 16 * d**2 + 4 * tokens * sizes["context"] * d
    return 3 * (sizes["layers"] * layer + 2 * tokens * d * sizes["vocabulary"])


def utilisation(run, work_flops):
    """Compare NVML's reading with the trace and the work achieved."""
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
looks = {"share by NVML": "{:.0%}", "share busy": "{:.1%}"}
plots.table(both, looks, missing="not measured") if len(both) else None

# %%

spinning

# %%
# A check on synthetic traces, which never ran on a GPU and whose truth is
# known:

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

# fold: How the answer is put together
said = "NVML was not read in both runs."
if len(both) and both["share by NVML"].notna().all():
    real, spin = both["share by NVML"]
    said = (
        f"NVML read {real:.0%} for the training step and {spin:.0%} for one "
        f"spinning thread, which does no useful work."
    )
moved = one.memops().groupby("kind")[["bytes", "total_ns"]].sum()
rates = moved["bytes"] / moved["total_ns"]
gaps = programs["starved loader, V100"].gaps(each=True)
first = table.iloc[0]
findings = headline(
    said,
    language_model,
    spinning,
    otherwise=(
        f"Not necessarily. A run that keeps an A100 busy would be up to "
        f"{tf32:.1f}x faster with TF32 (replay). Kernels ran for "
        f"{first['share with kernels']:.1%} of the time, and {share:.0%} of "
        f"that time went to fp32 matmuls that do not use the tensor cores. "
        "GPU-Util shows none of this."
    ),
    badge=model.label,
    gap_ms=float((gaps["end_ns"] - gaps["start_ns"]).max() / 1e6),
    inside=float(rates["DtoD"] / rates["HtoD"]),
)
