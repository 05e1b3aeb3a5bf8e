"""
How long does a step take, and how sure is that?
================================================

A benchmark's table has one number a row. How much of that number is the first
step, how many of its digits mean something, and could it be predicted?

.. in-short::
"""

# %%
# The symptom
# -----------
# This is how many programs time themselves:
#
# .. code-block:: python
#
#    start = time.perf_counter()
#    for _ in range(n):
#        step()
#    print((time.perf_counter() - start) / n)
#
# Three things are wrong with it. The first step is among the others. The clock
# stops when the work is launched, and not when it is done. And the result is a
# mean, which says nothing of how steps differ.

# %%
# Predict: what does the first step do?
# -------------------------------------
# The first step loads code, chooses kernels and allocates. Let it take ``k``
# times as long as each of the others, in a sample of ``n``:


def first_step(k, n):
    """Mean and standard deviation in medians, if only the first differs."""
    return 1 + (k - 1) / n, (k - 1) / n**0.5


# %%
# A first step takes ten times as long, in a sample of thirty. By how much are
# mean, standard deviation and median wrong?
#
# .. dropdown:: Answer
#
#    The mean is 1.3 medians, and the standard deviation 1.6 medians, though
#    all other steps are equal. The median does not move. "Mean ± standard
#    deviation" of such a sample reports mostly its first step.

# %%
# Evidence: passes of one model
# -----------------------------
# Somebody recorded the forward pass of a language model on an A100, twice. One
# capture begins with the very first pass, the other one after a warm-up. The
# kernels say where a pass begins and ends:

# sphinx_gallery_thumbnail_number = 1
import numpy as np
import pandas as pd

from nsightkit import plots
from nsightkit.investigations import case

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
# The first pass takes much longer. Even the capture after a warm-up begins
# with a slower one. What that does to three summaries:


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
# The rule explains all of it. Without their first passes the captures agree to
# three digits and more. With them, comparing the two means would show a
# speed-up that nobody made.

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
# That waits once a step, which costs what :doc:`03_hidden_synchronisation`
# says. CUDA events around the step cost less; ``nsightkit bench`` uses them.
#
# How sure is a comparison? ``nsightkit`` has one rule for that everywhere, the
# interval in :doc:`/definitions`, "Noise". It takes the median of all ratios
# between two series, and says how far chance may move it. Here is what a
# change gained by three summaries: loader workers for ResNet-50 on a V100, and
# compiling the model above:

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
# helped, and hardly one digit of its size is known. Ten nearly equal passes
# leave a narrow one. (``nsightkit diff`` sets steps that stand out apart first
# and says so, so its interval for the first pair is narrower:
# :doc:`20_one_change_at_a_time`.)

# %%
# A floor for each row, predicted
# -------------------------------
# The time of a step has a floor: its FLOPs at the peak rate, and for the
# optimizer, which does next to no arithmetic, its bytes at the peak bandwidth.
# AdamW reads a weight, its gradient and two moments, and writes all but the
# gradient, in fp32. Predicted for the rows of this page's own benchmark, on an
# H200:

# fold: How the floors are worked out
from nsightkit import hardware
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import Configuration
from nsightkit.investigations import parts

SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads")
SIZES = (*SIZES, "vocabulary")
CELLS = {  # what differs from the first row, and the part's name
    "training step": "after",
    "forward only": "forward",
    "forward and backward": "no-optimizer",
    "half the batch, twice the context": "context",
    "larger model": "size",
    "fp32": "precision",
}


def cost(cell):
    """FLOPs of a step, and bytes that its optimizer moves."""
    sizes = {name: cell[name] for name in SIZES}
    one = envelope(Configuration(name="cell", intent="", **sizes))
    flops = one.fwd_flops if cell["mode"] == "fwd" else one.train_flops
    return flops, 7 * 4 * one.params if cell["mode"] == "train" else 0


gpu = hardware.find("H200")
rows = []
for name, part in CELLS.items():
    cell = parts.find("bench", part).parameters("live")
    flops, moved = cost(cell)
    peak = gpu.peak(cell["precision"]).tflops
    floor_ms = flops / peak / 1e9 + moved / gpu.gb_per_s / 1e6
    rows.append((name, flops / 1e12, moved / 1e9, floor_ms))
names = ["row", "TFLOP", "optimizer (GB)", "floor (ms)"]
floors = pd.DataFrame(rows, columns=names)
plots.table(floors, dict.fromkeys(names[1:], "{:.1f}"))

# %%
# Ratios follow before anything has run. The backward pass has two matrix
# products for each of the forward's. The optimizer comes on top, and grows
# with the parameters and not with the tokens. A result below its floor is a
# mistake of the benchmark.

# %%
# Verdict
# -------
# One slow first pass, counted in, moves a mean by more than most changes do,
# and leaves the median alone. A number without its interval does not say
# whether its second digit means anything.

# %%
# Limits
# ------
# * Two captures of one program agree better here than runs usually do: matrix
#   products fill the GPU, and nothing else can vary. Other runs get another
#   placement in memory, and another clock. Repeat the whole measurement before
#   you believe a small difference.
# * A pass is timed from its first kernel to its last. What the CPU did before
#   is not in it.
# * The cost of the first step is real, and for a short job it matters. It
#   belongs in a row of its own.
# * The clock of a warm GPU falls under its power limit, and the share of a
#   datasheet's peak falls with it.

# %%
# Run it yourself
# ---------------
# A table of your own, every combination a row:
#
# .. code-block:: console
#
#    $ nsightkit bench --size small --size medium --mode fwd --mode train
#    $ nsightkit bench --size medium --warmup 0 --out-json cold.json
#
# This page, which measures with a GPU and else runs small on the CPU:
#
# .. code-block:: console
#
#    $ python examples/08_end_to_end_benchmark.py

downloads = {"from the first pass on, case file": cold.trace}

# %%
# Exercises
# ---------
# 1. How many passes would the first capture have needed for its mean to be
#    within a hundredth of its median?
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
#       The first step, and the spread. The mean is that of all work, which is
#       right for a long job. There is one sample, so nothing says whether two
#       programs differ.
#
# 3. Open the trace in Perfetto. What does the GPU do in the first pass for so
#    much longer?
#
#    .. dropdown:: Answer
#
#       For nine tenths of the extra time it waits. ``nsightkit gaps`` with
#       ``--within warmup`` gives the causes: ``start-up``, because a kernel's
#       code is loaded when it is launched for the first time, and work of the
#       CPU. For the last tenth, its kernels took longer.

# %%
# Measured here
# -------------
# .. own-run::
#
# A language model's training step from its very first run, then after a
# warm-up, then with one thing changed at a time; a process for each.

from nsightkit.errors import UsageError
from nsightkit.investigations import headline, measure

before = measure("bench", "before")
after = measure("bench", "after")
cells = {name: measure("bench", part) for name, part in CELLS.items()}
before

# %%
# Steps from the very first one on, and after a warm-up, both without their
# first step; then the benchmark. The columns after the median are its
# interval. MFU is FLOPs in a second against the datasheet's dense peak of the
# precision.


# fold: How the figures and the table are made
def known_gpu(run):
    """Peaks of the GPU that a run was measured on, None without them."""
    try:
        return hardware.find((run.provenance["gpu"] or {})["name"])
    except (KeyError, UsageError):
        return None


def row(name, run):
    """One row of the benchmark."""
    cell, own = run.parameters, known_gpu(run)
    median_ns = run.median("step_ns")
    spread = noise.median(run.values("step_ns"))
    peak = own and own.peak(cell["precision"])
    held = run.median("peak_allocated_bytes")
    return {
        "row": name,
        "median (ms)": median_ns / 1e6,
        "from (ms)": spread.low / 1e6 if spread.low else np.nan,
        "to (ms)": spread.high / 1e6 if spread.high else np.nan,
        "tokens/s": cell["batch"] * cell["context"] / median_ns * 1e9,
        "allocated (GB)": held / 1e9 if held else np.nan,
        "MFU": cost(cell)[0] / median_ns / peak.tflops / 1e3
        if peak
        else np.nan,
    }


started = {"no warm-up": before, "after a warm-up": after}
plots.step_times(
    {name: run.values("step_ns")[1:] for name, run in started.items()},
    title=f"Steps after the first ({after.mode})",
)
bench = pd.DataFrame([row(name, run) for name, run in cells.items()])
missing = "not on a CPU" if after.mode == "smoke" else "not known"
shown = {"tokens/s": "{:,.0f}", "MFU": "{:.1%}"}
plots.table(bench, shown, missing=missing)

# %%
# Each row's time beside its FLOPs, both in forward passes. What lies above its
# FLOPs did something that is not in them: the optimizer's bytes, norms and
# softmax, launching.

# fold: How the table is made
forward = cells["forward only"]
beside = pd.DataFrame(
    {
        "row": list(cells),
        "time (forward passes)": [
            run.median("step_ns") / forward.median("step_ns")
            for run in cells.values()
        ],
        "FLOPs (forward passes)": [
            cost(run.parameters)[0] / cost(forward.parameters)[0]
            for run in cells.values()
        ],
    }
)
plots.table(beside, dict.fromkeys(beside.columns[1:], "{:.2f}"))

# %%

after

# %%
# What the runs say:

# fold: How the answer is put together
runs = [before, *cells.values()]
own = before.values("step_ns")
own_k = own[0] / np.median(own[1:])
both = cells["forward and backward"]
ratio = noise.ratio(forward.values("step_ns"), both.values("step_ns"))
wanted = beside.set_index("row")["FLOPs (forward passes)"]
wanted = wanted["forward and backward"]
within = "; there are too few steps for an interval"
if ratio.low is not None:
    agrees = "does not agree" if ratio.excludes(wanted) else "agrees"
    within = f", which {agrees} within {ratio.low:.2f} to {ratio.high:.2f}"
said = (
    f"the first step took {own_k:.1f} times the median of the others, and the "
    f"mean of all is {own.mean() / np.median(own[1:]):.2f} medians. Forward "
    f"and backward took {ratio.value:.2f} forward passes. By FLOPs it is "
    f"{wanted:.0f}{within}."
)
findings = headline(
    said,
    *runs,
    otherwise=(
        f"the first pass of a model on an A100 took {k:.2f} times as long as "
        f"the others. Counted in, it makes the mean of four passes "
        f"{table['mean (ms)'].iloc[0] / typical - 1:.0%} too long, and the "
        "standard deviation "
        f"{table['std (ms)'].iloc[0] / typical:.0%} of the median. Without "
        f"it, the deviation is {table['std (ms)'].iloc[1] / typical:.2%}."
    ),
    badge=cold.label,
    needed=float(np.ceil((k - 1) / 0.01)),
)
