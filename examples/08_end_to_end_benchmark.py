"""
How long does a step take, and how sure is that?
================================================

A benchmark prints one number per row. How much of that number is the first
step, how many of its digits can we trust, and could we have predicted it?

.. in-short::
"""

# %%
# The symptom
# -----------
# Many programs time themselves like this:
#
# .. code-block:: python
#
#    start = time.perf_counter()
#    for _ in range(n):
#        step()
#    print((time.perf_counter() - start) / n)
#
# This has three faults. The first step is counted like the others. The clock
# stops when the work is launched, before it is done. And the result is a mean,
# which hides how much steps differ.

# %%
# Predict: how much does the first step distort?
# ----------------------------------------------
# The first step loads code, chooses kernels and allocates. Let it take
# ``k`` medians of the others, in a sample of ``n``:


def first_step(k, n):
    """Mean and standard deviation in medians, if only the first differs."""
    return 1 + (k - 1) / n, (k - 1) / n**0.5


# %%
# A first step takes ten medians, in a sample of thirty. By how much are
# mean, standard deviation and median wrong?
#
# .. dropdown:: Answer
#
#    The mean is 1.3 medians and the standard deviation 1.6 medians, although
#    all other steps are equal. The median does not move. "Mean ± standard
#    deviation" of such a sample mostly reports its first step.

# %%
# Evidence: how slow is the first pass on an A100?
# ------------------------------------------------
# The forward pass of a language model was recorded on an A100 twice. One
# capture starts with the very first pass, the other after a warm-up. We split
# both into passes by counting kernels:

# sphinx_gallery_thumbnail_number = 1
# record: 120 s
import numpy as np
import pandas as pd

from nsightkit import plots
from nsightkit.guide import case

cold = case("a100-cuda-graphs", "eager-nvtx")
warm = case("a100-cuda-graphs", "eager")
ranges = cold.trace.ranges().set_index("name")
kernels_a_pass = ranges.loc["warmup", "kernel_count"]


def passes(trace):
    """Time of each pass, from its first kernel to its last."""
    kernels = trace["kernels"].sort_values("start_ns")
    of_pass = kernels.groupby(np.arange(len(kernels)) // kernels_a_pass)
    return of_pass["end_ns"].max() - of_pass["start_ns"].min()


series = {
    "after a warm-up": passes(warm.trace),
    "from the first pass on": passes(cold.trace),
}
plots.step_times(series, title="Passes of a model on an A100 (case file)")
cold

# %%
# The first pass takes much longer: :measured:`08_end_to_end_benchmark.k:.2f`
# medians of the others. Even the capture after a warm-up starts with a slower
# one. The effect on three summaries:


# fold: How the table is made
def summary(name, values):
    """Mean, standard deviation and median of some steps."""
    ms = np.asarray(values) / 1e6
    return {
        "which": name,
        "passes": len(ms),
        "mean (ms)": ms.mean(),
        "std (ms)": ms.std(ddof=1),
        "median (ms)": np.median(ms),
    }


later, first = series.values()
rows = [
    summary("from the first pass on", first),
    summary("the same, without the first", first[1:]),
    summary("after a warm-up", later),
    summary("the same, without the first", later[1:]),
]
table = pd.DataFrame(rows)
plots.table(table, dict.fromkeys(table.columns[2:], "{:.2f}"))

# %%
# And the rule above, with the ``k`` of that first pass:

k = first.iloc[0] / first.iloc[1:].median()
typical = rows[1]["median (ms)"]
mean, std = first_step(k, len(first))
print(f"the first pass took {k:.2f} medians of the others")
print(f"mean: {rows[0]['mean (ms)'] / typical:.3f} medians, rule {mean:.3f}")
print(f"std:  {rows[0]['std (ms)'] / typical:.3f} medians, rule {std:.3f}")

# %%
# The rule explains the whole difference. Without their first passes the
# captures agree to three digits and more. With them, a comparison of the two
# means would report a speedup that no change caused.

# %%
# Change one thing: which steps count
# -----------------------------------
# Warm up, wait for the GPU, and keep the samples:
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
#
# How sure is a comparison? ``nsightkit`` uses one rule everywhere, the
# interval in :doc:`/definitions`, "Noise". It takes the median of all ratios
# between two series and computes how far chance may move it. We apply it to
# two changes: loader workers for ResNet-50 on a V100
# (:ref:`step 5 <example-changed>` of the worked example), and compiling the
# model above:

# fold: How the table is made
from nsightkit.analysis.core import noise

loaders = [
    case("v100-starved-loader", f"workers-{n}").trace.steps()["wall_ns"]
    for n in (0, 4)
]
graphs = case("a100-cuda-graphs", "graphs").trace["graphs"]
changes = {
    "four loader workers": loaders,
    "compiled": (later, graphs["end_ns"] - graphs["start_ns"]),
}
rows = []
for change, (before, after) in changes.items():
    sure = noise.ratio(after, before)
    rows.append(
        {
            "change": change,
            "by means": before.mean() / after.mean(),
            "by medians": before.median() / after.median(),
            "all pairs": sure.value,
            "interval": f"{sure.low:.3f} to {sure.high:.3f}",
        }
    )
gains = pd.DataFrame(rows)
plots.table(gains, dict.fromkeys(gains.columns[1:4], "{:.3f}"))

# %%
# Six steps with two stalls among them leave a wide interval: the first change
# helped, but we can trust barely one digit of its size. Ten nearly equal
# passes leave a narrow one. (``nsightkit diff`` first sets outlying steps
# apart and reports them, so its interval for the first pair is narrower:
# :doc:`20_one_change_at_a_time`.)

# %%
# Is a row of a benchmark plausible?
# ----------------------------------
# A step cannot be faster than its FLOPs at the peak rate. The optimizer does
# almost no arithmetic, so its floor is its bytes at the peak bandwidth: AdamW
# reads a weight, its gradient and two moments, and writes all but the
# gradient, in fp32. These are the rows of this page's own benchmark:

SIZES = dict(batch=8, context=512, d_model=1024, layers=24, d_ff=4096)
SIZES |= dict(heads=16, vocabulary=10_000)
ROWS = {  # what differs from the first row
    "training step": dict(),
    "forward only": dict(mode="fwd"),
    "forward and backward": dict(mode="fwd_bwd"),
    "half the batch, twice the context": dict(batch=4, context=1024),
    "larger model": dict(d_model=1280, layers=36, d_ff=5120, heads=20),
    "fp32": dict(precision="fp32"),
}
how = dict(mode="train", precision="bf16")
cells = {name: SIZES | how | change for name, change in ROWS.items()}

# %%
# Predicted for an H200:

# fold: How the floors are worked out
from nsightkit import hardware
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import Configuration


def cost(cell):
    """FLOPs of a step, and bytes that its optimizer moves."""
    sizes = {name: cell[name] for name in SIZES}
    model = envelope(Configuration(name="cell", intent="", **sizes))
    flops = model.fwd_flops if cell["mode"] == "fwd" else model.train_flops
    return flops, 7 * 4 * model.params if cell["mode"] == "train" else 0


gpu = hardware.find("H200")
rows = []
for name, cell in cells.items():
    flops, moved = cost(cell)
    peak = gpu.peak(cell["precision"]).tflops
    floor_ms = flops / peak / 1e9 + moved / gpu.gb_per_s / 1e6
    rows.append((name, flops / 1e12, moved / 1e9, floor_ms))
names = ["row", "TFLOP", "optimizer (GB)", "floor (ms)"]
floors = pd.DataFrame(rows, columns=names)
plots.table(floors, dict.fromkeys(names[1:], "{:.1f}"))

# %%
# We can also predict ratios before anything has run. The backward pass has two
# matmuls for each of the forward's, so by FLOPs forward and backward take
# three forward passes. Expect less, between 2.6 and 2.9: the loss, the norms
# and the launches of a forward pass do not triple. The optimizer comes on top;
# it grows with the number of parameters and ignores the number of tokens. A
# result below its floor is a bug in the benchmark.

# %%
# Verdict
# -------
# Counting one slow first pass moves a mean by more than most changes do, and
# leaves the median alone. A number without its interval does not tell us
# whether its second digit means anything.

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
# To run this page's script (without a GPU it runs a tiny CPU version):
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
#       The mean is off by (k - 1) / n medians. With this ``k`` that takes
#       :measured:`08_end_to_end_benchmark.needed:.0f` passes. One pass of
#       warm-up does the same.
#
# 2. The benchmark waits with ``torch.cuda.synchronize()`` after the whole loop
#    only, and divides by ``n``. What is still wrong?
#
#    .. dropdown:: Answer
#
#       The first step, and the spread. The mean covers all work, which is
#       right for a long job. But there is a single sample, so we cannot tell
#       whether two programs differ.
#
# 3. Open the trace in Perfetto. Why does the first pass take so much longer?
#
#    .. dropdown:: Answer
#
#       For nine tenths of the extra time the GPU waits. ``nsightkit gaps``
#       with ``--within warmup`` gives the causes: ``start-up``, because a
#       kernel's code is loaded at its first launch, and CPU work. For the last
#       tenth, its kernels took longer.

# %%
# Measured here
# -------------
# .. own-run::
#
# A language model's training step from its very first run, then after a
# warm-up, then with one thing changed at a time.

from nsightkit.guide import headline, measure
from nsightkit.workloads import lm

# 4,096 tokens: 10.2 TFLOP a step. In bf16 that takes 23 to 30 ms, and its
# 24 layers x 125 launches x 5 µs = 15 ms are hidden behind it. In fp32,
# without tensor cores, it takes 0.2 s at 50 TFLOP/s.
SMALL = dict(batch=4, context=64, d_model=128, layers=2, d_ff=384)
SMALL |= dict(heads=4, vocabulary=512)
SMALL_ROWS = ROWS | {
    "half the batch, twice the context": dict(batch=2, context=128),
    "larger model": dict(d_model=160, layers=3, d_ff=480, heads=5),
}
small_cells = {name: SMALL | how | more for name, more in SMALL_ROWS.items()}
PARTS = {
    "training step": "after",
    "forward only": "forward",
    "forward and backward": "no-optimizer",
    "half the batch, twice the context": "context",
    "larger model": "size",
    "fp32": "precision",
}

before = measure(
    "bench/before",
    lm.run,
    gpu=SIZES | how,
    small=SMALL | how,
    steps=30,
    warmup=0,
)
runs = {}
for name, part in PARTS.items():
    runs[name] = measure(
        f"bench/{part}",
        lm.run,
        gpu=cells[name],
        small=small_cells[name],
        steps=30,
    )
before

# %%
# Steps from the very first one on, and after a warm-up, both without their
# first step; then the benchmark. The columns after the median are its
# interval. MFU is FLOPs per second divided by the datasheet's dense peak for
# the precision.


# fold: How the figures and the table are made
from nsightkit.errors import UsageError


def peak_tflops(run):
    """Peak of the GPU that was measured; None where it is unknown."""
    try:
        peak = hardware.find(run.gpu or "").peak(run.parameters["precision"])
    except UsageError:
        return None
    return None if peak is None else peak.tflops


def row(name, run):
    """One row of the benchmark."""
    cell, median_ns = run.parameters, run.median("step_ns")
    flops, _ = cost(cell)
    peak = peak_tflops(run)
    spread = noise.median(run.values("step_ns"))
    peak_bytes = run.median("peak_bytes")
    return {
        "row": name,
        "median (ms)": median_ns / 1e6,
        "from (ms)": None if spread.low is None else spread.low / 1e6,
        "to (ms)": None if spread.high is None else spread.high / 1e6,
        "tokens/s": cell["batch"] * cell["context"] / median_ns * 1e9,
        "peak (GB)": None if peak_bytes is None else peak_bytes / 1e9,
        "MFU": None if peak is None else flops / median_ns / peak / 1e3,
    }


last_run = runs["training step"]
complete = before and all(runs.values())
bench = pd.DataFrame()
if complete:
    plots.step_times(
        {
            "no warm-up": before.values("step_ns")[1:],
            "after a warm-up": last_run.values("step_ns")[1:],
        },
        title=f"Steps after the first ({before.mode})",
    )
    bench = pd.DataFrame([row(name, run) for name, run in runs.items()])
shown = {"tokens/s": "{:,.0f}", "MFU": "{:.1%}"}
plots.table(bench, shown, missing="not known") if complete else None

# %%
# Each row's time beside its FLOPs, both in forward passes. A time above its
# FLOPs includes other work: the optimizer's bytes, norms and softmax,
# launches.

# fold: How the table is made
beside = pd.DataFrame()
if complete:
    forward = runs["forward only"]
    forward_ns = forward.median("step_ns")
    forward_flops, _ = cost(forward.parameters)
    rows = []
    for name, run in runs.items():
        flops, _ = cost(run.parameters)
        times = run.median("step_ns") / forward_ns
        rows.append((name, times, flops / forward_flops))
    names = ["row", "time (forward passes)", "FLOPs (forward passes)"]
    beside = pd.DataFrame(rows, columns=names)
two_digits = dict.fromkeys(beside.columns[1:], "{:.2f}")
plots.table(beside, two_digits) if complete else None

# %%

last_run

# %%
# The answer from the runs:

# fold: How the answer is put together
said = ""
if complete:
    own = before.values("step_ns")
    others = np.median(own[1:])
    ratio = noise.ratio(
        forward.values("step_ns"),
        runs["forward and backward"].values("step_ns"),
    )
    interval = "too few steps for an interval"
    if ratio.low is not None:
        interval = f"{ratio.low:.2f} to {ratio.high:.2f}"
    said = (
        f"the first step took {own[0] / others:.1f} medians of the others, "
        f"and the mean of all steps is {own.mean() / others:.2f} medians. "
        f"Forward and backward took {ratio.value:.2f} forward passes "
        f"({interval}); expected were 2.6 to 2.9."
    )
findings = headline(
    said,
    before,
    *runs.values(),
    otherwise=(
        f"the first pass of a model on an A100 took {k:.2f}x as long as the "
        f"others. It makes the mean of four passes "
        f"{table['mean (ms)'].iloc[0] / typical - 1:.0%} too long and their "
        "standard deviation "
        f"{table['std (ms)'].iloc[0] / typical:.0%} of the median. Without "
        f"it, the deviation is {table['std (ms)'].iloc[1] / typical:.2%}."
    ),
    badge=cold.label,
    needed=float(np.ceil((k - 1) / 0.01)),
    k=float(k),
)
