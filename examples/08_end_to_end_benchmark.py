"""
How long does a step take, and how sure is that?
================================================

A benchmark's table has one number a row: model, context, mode and precision,
and a time. How much of that number was there before the measurement began,
and how far should its digits be trusted?

What is measured: a language model's training step from its very first run,
then after a warm-up, then with one thing changed at a time. What came out:
:measured:`08_end_to_end_benchmark.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# The time of a step has a floor: its FLOPs at the peak rate, and for the
# optimizer, which does next to no arithmetic, its bytes at the peak bandwidth.
# AdamW reads a weight, its gradient and two moments, and writes all but the
# gradient, in fp32. For the recorded sizes on one GPU:

# sphinx_gallery_thumbnail_number = -1
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import Configuration
from nsightkit.investigations import parts as investigations

SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads")
SIZES = (*SIZES, "vocabulary")


def cost(cell):
    """FLOPs of a step, and bytes that its optimizer moves."""
    sizes = {name: cell[name] for name in SIZES}
    one = envelope(Configuration(name="cell", intent="", **sizes))
    flops = one.fwd_flops if cell["mode"] == "fwd" else one.train_flops
    return flops, 7 * 4 * one.params if cell["mode"] == "train" else 0


def floor_ms(cell, gpu):
    """Least time of a step: arithmetic at its peak, then the optimizer."""
    flops, moved = cost(cell)
    peak = gpu.peak(cell["precision"])
    if peak is None:
        return float("nan")
    return flops / peak.tflops / 1e9 + moved / gpu.gb_per_s / 1e6


gpu = hardware.find("H200")
WORDS = ("mode", "precision", "context", "d_model", "layers")
rows = []
for part in investigations.INVESTIGATIONS["bench"].values():
    cell = part.parameters("live")
    flops, moved = cost(cell)
    row = {"cell": part.name, **{name: cell[name] for name in WORDS}}
    row |= {"TFLOP": flops / 1e12, "optimizer GB": moved / 1e9}
    rows.append(row | {"floor (ms)": floor_ms(cell, gpu)})
plan = pd.DataFrame(rows)
plots.table(plan)

# %%
# Three ratios follow before anything has run. The backward pass has two GEMMs
# for each of the forward's, so both together cost three forwards; the
# optimizer comes on top and grows with the parameters, not with the tokens.
# Doubling the context at the same number of tokens adds attention only.

floors = plan.set_index("cell")["floor (ms)"]
ratios = floors[["forward", "no-optimizer", "after"]] / floors["forward"]
print("fwd : fwd_bwd : train = " + " : ".join(f"{r:.2f}" for r in ratios))

# %%
# And the first step? It loads code, chooses kernels and allocates. Let it take
# ``k`` times as long as the others, in a sample of ``n``. The mean then rises
# by (k - 1) / n, the standard deviation by more, and the median not at all:


def first_step(k, n):
    """Mean and standard deviation in medians, if only the first differs."""
    return 1 + (k - 1) / n, (k - 1) / n**0.5


for k in (1, 3, 10, 30):
    mean, std = first_step(k, n=30)
    print(f"k = {k:2}, n = 30: mean {mean:.2f}, std {std:.2f}, median 1")

# %%
# Measure
# -------
# With no warm-up at all. The clock starts before the first step of a fresh
# process, whose model and data lie on the device already.

from nsightkit.investigations import measure

before = measure("bench", "before")
before

# %%
# Read
# ----
# The first step alone, and what it does to three summaries of the same steps:


def summaries(values):
    """Mean, standard deviation and median of some steps."""
    return {
        "steps": len(values),
        "mean_ns": values.mean(),
        "std_ns": values.std(ddof=1),
        "median_ns": float(pd.Series(values).median()),
    }


cold = before.values("step_ns")
rows = [
    {"which": "all steps", **summaries(cold)},
    {"which": "without the first", **summaries(cold[1:])},
]
k = cold[0] / rows[1]["median_ns"]
print(f"first step: {cold[0] / 1e6:.1f} ms, {k:.1f} medians of the others")
plots.table(pd.DataFrame(rows))

# %%
# The rule above, with the measured ``k``. Where the measured values lie above
# it, the first step was not the only slow one, and a warm-up of one would have
# been too short.

mean, std = first_step(k, len(cold))
typical = rows[0]["median_ns"]
print(f"mean: {rows[0]['mean_ns'] / typical:.2f} medians, rule {mean:.2f}")
print(f"std:  {rows[0]['std_ns'] / typical:.2f} medians, rule {std:.2f}")
plots.step_times(
    {"no warm-up": cold}, title=f"From the very first step ({before.mode})"
)

# %%
# Where ``k`` is large, "mean ± std" of such a sample reports mostly its first
# step. The cost of that step is real, and belongs in a row of its own.

# %%
# Change one thing
# ----------------
# Run some steps before the clock starts. Nothing else is different: the same
# sizes, the same seed, a process of its own again. In a loop of your own:
#
# .. code-block:: python
#
#    for _ in range(warmup):
#        step()
#    torch.cuda.synchronize()
#    ...  # the clock starts here

# %%
# Measure again
# -------------

after = measure("bench", "after")
after

# %%
# Beside each other, both without their first step, which would flatten the
# picture that is about the others.

warm = after.values("step_ns")
by_start = {"no warm-up": cold[1:], "after warm-up": warm[1:]}
both = pd.DataFrame(
    [{"which": name, **summaries(values)} for name, values in by_start.items()]
)
both["share std of median"] = both["std_ns"] / both["median_ns"]
plots.step_times(by_start, title=f"Steps after the first ({after.mode})")
plots.table(both)

# %%
# Mode, context, size and precision
# ---------------------------------
# Now the benchmark: each cell differs from the first, ``after``, in what its
# name says, and each ran in a process of its own.

cells = {
    "after": after,
    "forward": measure("bench", "forward"),
    "no-optimizer": measure("bench", "no-optimizer"),
    "context": measure("bench", "context"),
    "size": measure("bench", "size"),
    "precision": measure("bench", "precision"),
}
cells["precision"]

# %%
# Medians, and as their spread the range that holds the middle half of the
# steps. Memory is the highest that PyTorch's allocator gave out, and the
# highest that it held; it counts on a GPU only. MFU is FLOPs in a second
# against the datasheet's dense peak of the precision.

import numpy as np

from nsightkit.errors import UsageError


def known_gpu(run):
    """Peaks of the GPU that a run was measured on, None without them."""
    try:
        return hardware.find((run.provenance["gpu"] or {})["name"])
    except (KeyError, UsageError):
        return None


def row(name, run):
    """One row of the benchmark."""
    cell, gpu = run.parameters, known_gpu(run)
    low, median, high = np.percentile(run.values("step_ns"), [25, 50, 75])
    peak = gpu and gpu.peak(cell["precision"])
    held = (
        run.median("peak_allocated_bytes"),
        run.median("peak_reserved_bytes"),
    )
    return {
        "cell": name,
        **{word: cell[word] for word in WORDS},
        "median_ns": median,
        "share spread": (high - low) / median,
        "tokens/s": cell["batch"] * cell["context"] / median * 1e9,
        "allocated (GB)": held[0] and held[0] / 1e9,
        "reserved (GB)": held[1] and held[1] / 1e9,
        "MFU": cost(cell)[0] / median / peak.tflops / 1e3 if peak else None,
    }


bench = pd.DataFrame([row(name, run) for name, run in cells.items()])
bench = bench.astype(dict.fromkeys(bench.columns[-3:], float))
whole = {"tokens/s": "{:,.0f}", "MFU": "{:.1%}"}
missing = "not on a CPU" if after.mode == "smoke" else "not known"
plots.table(bench, whole, missing=missing)

# %%
# Times are hard to compare with a table of FLOPs, ratios are not. Each cell's
# time in forward passes, beside the ratio of FLOPs of these very sizes. Bars
# go from the tenth to the ninetieth percentile.

import matplotlib.pyplot as plt

base = cells["forward"]
tenths = {
    name: np.percentile(run.values("step_ns"), [10, 50, 90])
    / base.median("step_ns")
    for name, run in cells.items()
}
expected = {
    name: cost(run.parameters)[0] / cost(base.parameters)[0]
    for name, run in cells.items()
}
figure, axes = plt.subplots(figsize=(7.6, 3.4), layout="constrained")
low, median, high = np.array(list(tenths.values())).T
where = np.arange(len(tenths))
axes.errorbar(
    median,
    where,
    xerr=[median - low, high - median],
    fmt="o",
    color="#2f7fc1",
    capsize=5,
    label="measured time",
)
axes.plot(
    list(expected.values()), where, "D", mfc="none", color="#d9690f", ms=9,
    label="FLOPs",
)  # fmt: skip
axes.set_yticks(where, list(tenths))
axes.invert_yaxis()
axes.set_xlim(0)
axes.set_xlabel("forward passes")
axes.set_title(f"Time and FLOPs of each cell ({base.mode})", loc="left")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, fontsize=9)
said = [
    f"{name} {tenths[name][1]:.2f}, FLOPs {expected[name]:.2f}"
    for name in tenths
]
figure.set_label(
    f"Time of each cell in forward passes ({base.mode}): {'; '.join(said)}."
)

# %%
# A measured point right of its diamond did something that is not in the
# FLOPs: the optimizer's bytes, norms and softmax, launching. A point left of
# it got more out of the machine than the forward pass did. The cell with
# another precision has the same FLOPs, at another price each.

# %%
# Verdict
# -------
# Computed from the runs. An expected ratio is met when it lies between the
# smallest and the largest that tenth and ninetieth percentile allow:

import textwrap

runs = [before, *cells.values()]
gpus = {(run.provenance["gpu"] or {}).get("name") for run in runs}
comparable = len({run.mode for run in runs}) == 1 == len(gpus)


def interval(name):
    """Smallest and largest ratio to the forward pass."""
    low, _, high = tenths[name]
    return low / tenths["forward"][2], high / tenths["forward"][0]


low, high = interval("no-optimizer")
met = low <= expected["no-optimizer"] <= high
all_ns, warm_ns = summaries(cold), summaries(warm)
ratio = {name: tenths[name][1] for name in ("no-optimizer", "after")}
where = "in a smoke run on a CPU" if after.mode == "smoke" else "on a GPU"
verdict = (
    f"{where}, the first step took {k:.1f} times the median of the others. "
    f"With it the standard deviation is "
    f"{all_ns['std_ns'] / all_ns['median_ns']:.0%} of the median "
    f"({warm_ns['std_ns'] / warm_ns['median_ns']:.0%} after warm-up), the "
    f"mean {all_ns['mean_ns'] / all_ns['median_ns']:.2f} times the median. "
    f"fwd : fwd_bwd : train took 1 : {ratio['no-optimizer']:.2f} : "
    f"{ratio['after']:.2f}. The FLOPs, which leave out the optimizer's bytes, "
    f"are 1 : {expected['no-optimizer']:.0f} : {expected['after']:.0f}, and "
    f"fwd_bwd {'agrees' if met else 'does not agree'} with that within its "
    f"spread ({low:.2f} to {high:.2f})."
)
if not comparable:
    verdict = "the runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "first": k,
    "fwd_bwd": ratio["no-optimizer"],
    "train": ratio["after"],
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# The spread is that of the steps of one process. Two processes differ by more:
# another placement in memory, another clock of the GPU. Repeat the whole
# measurement to learn by how much, before a small difference is believed.
#
# Samples are the times between two marks on the GPU's own time line, or wall
# time on a CPU. The clock of a warm GPU falls under its power limit, and MFU
# against a datasheet's boost clock falls with it. A causal attention kernel
# may skip nearly half of the FLOPs that are counted for it.
#
# Each axis has two values here. ``nsightkit bench`` takes any number of them;
# the precisions have a page of their own.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{run.part}, {run.mode}, as a timeline": run.trace
    for run in (after, cells["forward"])
}

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/08_end_to_end_benchmark.py
#
# A table of your own, every combination a row:
#
# .. code-block:: console
#
#    $ nsightkit bench --size small --size medium --mode fwd --mode train
#    $ nsightkit bench --size medium --warmup 0 --out-json cold.json
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only bench
