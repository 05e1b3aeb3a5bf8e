"""
How do I time a step?
=====================

A benchmark prints one number, and the next run prints another. How much of it
is the first step, and how many of its digits can we trust?

.. in-short::
"""

# %%
# The symptom: one program, two answers
# -------------------------------------
# The same forward pass of a language model was recorded on an A100 twice. Many
# programs would time it like this:
#
# .. code-block:: python
#
#    start = time.perf_counter()
#    for _ in range(n):
#        step()
#    print((time.perf_counter() - start) / n)
#
# By this mean the two captures differ by
# :measured:`08_end_to_end_benchmark.differ:.0%`, and nothing was changed. Here
# are their passes, one by one:

# sphinx_gallery_thumbnail_number = 1
# record: 120 s
# fold: How the traces are split into passes
import numpy as np
import pandas as pd
from _lib import rows_of_bench

from nsightkit import plots
from nsightkit.analysis.core import noise
from nsightkit.guide import case, headline, measure
from nsightkit.workloads import lm

cold = case("a100-cuda-graphs", "eager-nvtx")
warm = case("a100-cuda-graphs", "eager")
ranges = cold.trace.ranges().set_index("name")
kernels_per_pass = ranges.loc["warmup", "kernel_count"]


def passes(trace):
    """Time of each pass, from its first kernel to its last."""
    kernels = trace["kernels"].sort_values("start_ns")
    of_pass = kernels.groupby(np.arange(len(kernels)) // kernels_per_pass)
    return of_pass["end_ns"].max() - of_pass["start_ns"].min()


series = {
    "after a warm-up": passes(warm.trace),
    "from the first pass on": passes(cold.trace),
}
plots.step_times(series, title="Passes of a model on an A100 (case file)")
cold

# %%
# Predict: how much does the first step distort?
# ----------------------------------------------
# The first step loads code, chooses kernels and allocates. If it takes *k*
# times the median and there are *n* steps, the mean is 1 + (k - 1) / n times
# the median, and the standard deviation (k - 1) / √n times. Now a first step
# takes ten times the median, in a sample of thirty. By how much are mean,
# standard deviation and median wrong?
#
# .. dropdown:: Answer
#
#    The mean is thirty percent too long, and the standard deviation is larger
#    than one and a half medians, although all other steps are equal. The
#    median does not move. "Mean ± standard deviation" of such a sample mostly
#    reports its first step.

# %%
# Evidence: does the first pass explain the difference?
# -----------------------------------------------------
# The first pass on the A100 took :measured:`08_end_to_end_benchmark.k:.2f`\ x
# the median of the others. Three summaries, with it and without:

# fold: How the table is made
later, first = series.values()
which = {
    "from the first pass on": first,
    "the same, without the first": first[1:],
    "after a warm-up": later,
    "the same, without its first": later[1:],
}
table = pd.DataFrame(
    {
        "passes": len(values),
        "mean (ms)": values.mean() / 1e6,
        "std (ms)": values.std() / 1e6,
        "median (ms)": values.median() / 1e6,
    }
    for values in which.values()
)
table.insert(0, "which", list(which))
plots.table(table, dict.fromkeys(table.columns[2:], "{:.2f}"))

# %%
# It explains all of it. By the rule above we expect a mean of
# :measured:`08_end_to_end_benchmark.rule:.3f`\ x the median, and the capture
# has :measured:`08_end_to_end_benchmark.mean:.3f`\ x. Without their first
# passes the captures agree to at least three digits. The capture after a
# warm-up starts with a slow one, too.

# %%
# Change one thing: which steps count
# -----------------------------------
# Warm up, wait for the GPU, and keep all samples:
#
# .. code-block:: diff
#
#    +for _ in range(warmup):
#    +    step()
#    +torch.cuda.synchronize()
#    -start = time.perf_counter()
#     for _ in range(n):
#    +    begin = time.perf_counter()
#         step()
#    -print((time.perf_counter() - start) / n)
#    +    torch.cuda.synchronize()
#    +    samples.append(time.perf_counter() - begin)
#    +print(statistics.median(samples))
#
# That waits once per step, at the cost that :doc:`03_hidden_synchronisation`
# explains. CUDA events around the step cost less; ``nsightkit bench`` uses
# them.

# %%
# How precise is a comparison?
# ----------------------------
# ``nsightkit`` uses the interval in :doc:`/definitions`, "Noise". It takes the
# median of all ratios between two series and computes how far chance may move
# it. We apply it to two changes: loader workers for ResNet-50 on a V100
# (:ref:`step 5 <example-changed>` of the worked example), and compiling the
# model above:

# fold: How the table is made
from nsightkit.analysis.compare import samples

loaders = [
    case("v100-starved-loader", f"workers-{n}").trace.steps()["wall_ns"]
    for n in (0, 4)
]
graphs = case("a100-cuda-graphs", "graphs").trace["graphs"]
changes = {
    "four loader workers": loaders,
    "the same, without outliers": samples.ordinary(loaders),
    "compiled": (later, graphs["end_ns"] - graphs["start_ns"]),
}
rows = []
for change, (before, after) in changes.items():
    sure = noise.ratio(after, before)
    row = {"change": change, "by means": before.mean() / after.mean()}
    row |= {"by medians": np.median(before) / np.median(after)}
    row |= {"interval": f"{sure.low:.3f} to {sure.high:.3f}"}
    rows.append(row)
gains = pd.DataFrame(rows)
plots.table(gains, dict.fromkeys(gains.columns[1:3], "{:.3f}"))

# %%
# Six steps with two stalls among them leave a wide interval: the first change
# helped, but we can trust barely one digit of its size. Ten nearly equal
# passes leave a narrow one. ``nsightkit diff`` drops outliers first, as in the
# second row, reports them, and widens the interval a little for that
# (:doc:`20_one_change_at_a_time`).

# %%
# Verdict
# -------
# Report a median after a warm-up, with its interval, and give the first step a
# separate row. Counting one slow first pass moves a mean by more than most
# changes do. Without an interval we cannot tell whether the second digit of a
# number means anything.

# %%
# Limits
# ------
# * These two captures of one program agree better than runs usually do:
#   matmuls fill the GPU, and little else can vary. Other runs differ in memory
#   placement and clock. Repeat the whole measurement before you believe a
#   small difference.
# * A pass is timed from its first kernel to its last. CPU work before the
#   first kernel is excluded.
# * The cost of the first step is real, and for a short job it matters. Give it
#   a separate row.
# * The clock of a warm GPU falls under its power limit, and the share of a
#   datasheet's peak falls with it.

# %%
# Run it yourself
# ---------------
# A table of any combinations, one row for each:
#
# .. code-block:: console
#
#    $ nsightkit bench --size small --size medium --mode fwd --mode train
#    $ nsightkit bench --size medium --warmup 0 --out-json cold.json
#
# On a GPU, this page's script also measures a training step from its first
# run, after a warm-up, and with one size changed at a time. Without a GPU it
# runs a tiny CPU version:
#
# .. code-block:: console
#
#    $ python examples/08_end_to_end_benchmark.py

downloads = {"from the first pass on, case file": cold.trace}

# %%
# Exercises
# ---------
# 1. How many passes would the first capture need for its mean to be within a
#    hundredth of its median?
#
#    .. dropdown:: Answer
#
#       The mean is off by (k - 1) / n of the median. With this ``k`` that
#       takes :measured:`08_end_to_end_benchmark.needed:.0f` passes. One pass
#       of warm-up does the same.
#
# 2. The benchmark waits with ``torch.cuda.synchronize()`` after the whole loop
#    only, and divides by ``n``. What is still wrong?
#
#    .. dropdown:: Answer
#
#       The first step and the spread. The mean covers all work, which is
#       right for a long job. But it is a single sample, so we cannot tell
#       whether two programs differ.
#
# 3. Open the trace in Perfetto. Why does the first pass take so much longer?
#
#    .. dropdown:: Answer
#
#       For about ninety percent of the extra time the GPU waits.
#       ``nsightkit gaps`` with ``--within warmup`` gives the causes: start-up
#       work, because a kernel's code is loaded at its first launch, and CPU
#       work. The remaining ten percent are longer kernels.

# %%
# Measured here
# -------------
# .. own-run::
#
# A language model's training step from its very first run, then after a
# warm-up, then with one thing changed at a time. By FLOPs, forward and
# backward take three forward passes; we expect between 2.6 and 2.9, because
# the loss, the norms and the launches of a forward pass do not triple.

# 4,096 tokens: 10.2 TFLOP a step. In bf16 that takes 23 to 30 ms, and its
# 24 layers x 125 launches x 5 µs = 15 ms are hidden behind it. In fp32,
# without tensor cores, it takes 0.2 s at 50 TFLOP/s.
SIZES = dict(batch=8, context=512, d_model=1024, layers=24, d_ff=4096)
SIZES |= dict(heads=16, vocabulary=10_000, mode="train", precision="bf16")
SMALL = dict(batch=4, context=64, d_model=128, layers=2, d_ff=384)
SMALL |= dict(heads=4, vocabulary=512, mode="train", precision="bf16")
CHANGED = {  # what differs from the first row
    "training step": {},
    "forward only": dict(mode="fwd"),
    "forward and backward": dict(mode="fwd_bwd"),
    "half the batch, twice the context": dict(batch=4, context=1024),
    "larger model": dict(d_model=1280, layers=36, d_ff=5120, heads=20),
    "fp32": dict(precision="fp32"),
}
CHANGED_SMALL = CHANGED | {
    "half the batch, twice the context": dict(batch=2, context=128),
    "larger model": dict(d_model=160, layers=3, d_ff=480, heads=5),
}
PARTS = {
    "training step": "after",
    "forward only": "forward",
    "forward and backward": "no-optimizer",
    "half the batch, twice the context": "context",
    "larger model": "size",
    "fp32": "precision",
}
before = measure(
    "bench/before", lm.run, gpu=SIZES, small=SMALL, steps=30, warmup=0
)
runs = {}
for name, part in PARTS.items():
    runs[name] = measure(
        f"bench/{part}",
        lm.run,
        gpu=SIZES | CHANGED[name],
        small=SMALL | CHANGED_SMALL[name],
        steps=30,
    )
before

# %%
# The columns after the median are its interval; *floor* is the time for the
# FLOPs and the optimizer's bytes at the datasheet's peaks.

# fold: How the figure and the table are made
complete = bool(before and all(runs.values()))
if complete:
    plots.step_times(
        {
            "no warm-up": before.values("step_ns")[1:],
            "after a warm-up": runs["training step"].values("step_ns")[1:],
        },
        title=f"Steps after the first ({before.mode})",
    )
bench = rows_of_bench.table(runs) if complete else pd.DataFrame()
shown = {"tokens/s": "{:,.0f}", "MFU": "{:.1%}"}
plots.table(bench, shown, missing="not known") if complete else None

# %%

# fold: How the answer is put together
k = first.iloc[0] / first.iloc[1:].median()
typical = first.iloc[1:].median()
findings = headline(
    rows_of_bench.answer(before, runs) if complete else "",
    before,
    *runs.values(),
    otherwise=(
        f"Report the median after a warm-up, with its interval. The first "
        f"pass of a model on an A100 took {k:.2f}x as long as the others. It "
        f"makes the mean of four passes "
        f"{first.mean() / typical - 1:.0%} too long and their standard "
        f"deviation {first.std() / typical:.0%} of the median. Without it, "
        f"the deviation is {first[1:].std() / typical:.2%}."
    ),
    badge=cold.label,
    differ=first.mean() / later.mean() - 1,
    needed=float(np.ceil((k - 1) / 0.01)),
    k=float(k),
    rule=1 + (k - 1) / len(first),
    mean=first.mean() / typical,
)
