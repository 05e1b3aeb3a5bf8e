"""
Ten models: what limits each one?
=================================

Two models with the same number of parameters can take different times, and
for different reasons: one is short of arithmetic, one of bandwidth, one
waits for its own launches. We chose ten models to be limited by ten
different things. What can we predict from their sizes, and what needs a GPU?

.. in-short::
"""

# %%
# The symptom
# -----------
# Each model is a line of sizes. These two have about the same number of
# parameters, and one has six times the layers:
#
# .. code-block:: python
#
#    #             batch, context, d_model, layers, d_ff, heads, vocabulary
#    model_a = Configuration("model_a", 32, 256, 768, 2, 2048, 12, 10_000)
#    model_b = Configuration("model_b", 32, 256, 384, 12, 1024, 12, 10_000)
#
# None of the ten has run on a GPU yet, so this page separates predictions
# (which follow from the sizes) from expectations (which a run has to confirm).

# %%
# Predict: which of them wait for their launches?
# -----------------------------------------------
# A faster GPU needs less time for the same FLOPs, but the CPU still takes the
# same time to launch them. Assume a hundred launches for each layer of a
# training step, five microseconds each. For how many of the ten models is the
# CPU the limit on an H200, and which of their sizes decides that?
#
# .. dropdown:: Answer
#
#    For :measured:`10_ten_configurations.launch_bound:.0f` of the ten: the
#    models above the line in the figure below. Launches grow with the number
#    of layers. FLOPs grow with the layers too, and also with the tokens of a
#    batch and the square of the width. So depth cancels out, and narrow models
#    and small batches wait. ``latency_bound`` has a single short sequence, and
#    its launches take :measured:`10_ten_configurations.worst:.0f` times the
#    time of its FLOPs.

# %%
# Evidence: what must each step cost?
# -----------------------------------
# The sizes alone determine the FLOPs of a training step:

# sphinx_gallery_thumbnail_number = 1
# record: 150 s
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import envelope
from nsightkit.configurations import MATRIX, VARIANTS

LAUNCHES, LAUNCH_US = 100, 5  # assumed: of a layer, and what each costs

h200 = hardware.find("H200").peak("bf16")
costs = envelope.summary(MATRIX)
costs["FLOPs (ms)"] = costs["train_flops"] / h200.tflops / 1e9
launched = pd.Series([model.layers * LAUNCHES for model in MATRIX])
costs["launches (ms)"] = launched * LAUNCH_US / 1e3
costs["breaks even (µs)"] = costs["FLOPs (ms)"] * 1e3 / launched
late = costs["launches (ms)"] > costs["FLOPs (ms)"]

# %%
# All ten, on logarithmic axes:

# fold: How the figure is drawn
import matplotlib.pyplot as plt

TITLE = "Ten training steps on an H200 (predicted)"
PLACES = {  # of a label, where its right side is not free
    "misaligned_dims": (-8, 0, "right"),
    "bad_head_size": (0, 12, "center"),
    "bandwidth_bound": (8, 2, "left"),
    "vocab_bottleneck": (0, -13, "center"),
    "deep_sequential": (-8, 0, "right"),
}
figure, axes = plt.subplots(figsize=(7.6, 4.2), layout="constrained")
worked, waited = costs["FLOPs (ms)"], costs["launches (ms)"]
axes.plot([0.01, 100], [0.01, 100], color="#6b7280", linewidth=1)
for label, which, colour, marker in (
    ("launching takes longer", late, "#d9690f", "s"),
    ("the FLOPs take longer", ~late, "#2f7fc1", "o"),
):
    look = {"color": colour, "marker": marker, "label": label}
    axes.scatter(worked[which], waited[which], s=46, zorder=3, **look)
places = list(zip(costs["config"], worked, waited, strict=True))
for name, x, y in places:
    right, up, side = PLACES.get(name, (8, 3, "left"))
    look = {"ha": side, "va": "center", "fontsize": 9}
    offset = {"xytext": (right, up), "textcoords": "offset points"}
    axes.annotate(name, (x, y), **offset, **look)
axes.text(0.62, 0.72, "equal", fontsize=9, rotation=32, color="#6b7280")
axes.set(xscale="log", yscale="log", xlim=(0.025, 40), ylim=(0.6, 30))
axes.set(xlabel="FLOPs at the datasheet's rate (ms)", ylabel="launches (ms)")
ticks = {"xaxis": [0.05, 0.2, 1, 5, 20], "yaxis": [1, 2, 5, 10, 20]}
for axis, at in ticks.items():
    getattr(axes, axis).set_ticks(at, [f"{value:g}" for value in at])
    getattr(axes, axis).set_ticks([], minor=True)
axes.spines[["top", "right"]].set_visible(False)
axes.set_title(TITLE, loc="left")
figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
said = ", ".join(f"{n} {y:.1f} ms for {x:.2f} ms" for n, x, y in places)
figure.set_label(f"{TITLE}, launches against FLOPs: {said}.")

# %%
# Every model above the line is predicted to wait for the CPU. The same in
# numbers: *breaks even* is the launch cost at which a model's launches take as
# long as its FLOPs. No step reaches the datasheet's rate, so a real step
# breaks even later:

# fold: How the table is made
table = pd.DataFrame({"model": costs["config"]})
table["parameters (M)"] = costs["params"] / 1e6
table["memory (GB)"] = costs["peak_bytes"] / 1e9
table["aligned"] = costs["aligned"]
columns = ["FLOPs (ms)", "launches (ms)", "breaks even (µs)"]
table[columns] = costs[columns]
plots.table(
    table,
    dict.fromkeys(["memory (GB)", *columns], "{:.2f}")
    | {
        "parameters (M)": "{:.0f}",
        "breaks even (µs)": "{:.2f}",
        "aligned": lambda yes: "yes" if yes else "no",
    },
)

# %%
# ``model_a`` and ``model_b`` have the same number of parameters and about the
# same FLOPs, yet one breaks even at a fifth of the other's launch cost.
# ``aligned`` means that all dimensions are multiples of eight. In bf16 that
# makes every row a multiple of sixteen bytes, the size of the widest vector,
# asynchronous and TMA loads; a kernel that cannot use them has to load element
# by element.

# %%
# Evidence: how long does a real launch take?
# -------------------------------------------
# We assumed five microseconds. Here is a transformer in eager mode on an A100,
# with a batch so small that its GPU waits for every launch:

from nsightkit.guide import case

small = case("a100-batch-size", "batch-2")
calls = small.trace["calls"]
begun = calls.loc[calls["name"].str.contains("Launch"), "start_ns"]
real_us = begun.sort_values().diff().median() / 1e3
even = costs["breaks even (µs)"]
waits = {at: int((even < at).sum()) for at in (2, 5, 10, 20, real_us)}
print(f"from launch to launch: {real_us:.0f} µs in the median")
for at, count in waits.items():
    print(f"launches of {at:2.0f} µs: {count:2} of the ten models would wait")
small

# %%
# This number is too high for an unprofiled run, because the profiler slowed
# every call, and it depends on the CPU. So the count of waiting models is only
# as good as its assumption. The sizes do settle the order: which models wait
# first, and which last.

# %%
# Change one thing: a control for each suspect
# --------------------------------------------
# Odd sizes are another suspicion: :doc:`15_ceilings_and_rooflines` has a model
# whose attention reads rows of 3,137 elements, one element at a time. But
# three of the ten models change more than their names suggest.
# ``misaligned_dims`` has odd widths, and also heads of 257, which flash
# attention does not support:
#
# .. code-block:: diff
#
#    -Configuration("misaligned_dims", 34, 257, 514, 6, 1538, 2, 10_000)
#    +Configuration("aligned_dims", 32, 256, 512, 6, 1536, 4, 10_000)
#
# A single control could not tell the two apart. So there are several, and each
# keeps one of the suspects:

# fold: How the table is made
flops = envelope.summary((*MATRIX, *VARIANTS)).set_index("config")
flops = flops["train_flops"]
rows = []
for model in VARIANTS:
    row = {"model": model.control_of, "control": model.name}
    row["changed"] = model.intent
    row["share of FLOPs added"] = (
        flops[model.name] / flops[model.control_of] - 1
    )
    rows.append(row)
plots.table(pd.DataFrame(rows))

# %%
# FLOPs differ a little, so we compare models and controls by their rates.

# %%
# Verdict
# -------
# The sizes decide how much a step must cost and which models cannot keep a
# fast GPU busy. For the others we need a trace. These are our expectations,
# none of them confirmed yet; the section *Measured here* judges them when it
# runs on a GPU:

# fold: How the table is made
from _lib import matrix

expected = matrix.EXPECTED.items()
plots.table(pd.DataFrame(expected, columns=["model", "expected"]))

# %%
# Limits
# ------
# * Everything derived from sizes is a prediction. A case file of another
#   program supports one of the suspicions, launches.
# * The number of launches is assumed, and the cost of one depends on the CPU,
#   on PyTorch and on the profiler. A compiler or a CUDA graph merges many
#   launches into one.
# * FLOPs are those of the formulas, with attention as a full square. They
#   compare models, not kernels.

# %%
# Run it yourself
# ---------------
# To run this page's script (without a GPU it runs a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/10_ten_configurations.py
#
# The plan, one model, and the same questions for your own trace:
#
# .. code-block:: console
#
#    $ nsightkit envelope --config deep_sequential
#    $ nsightkit bench --size deep_sequential --mode train
#    $ nsightkit sol trace.json.gz
#    $ nsightkit kernels trace.json.gz --by category
#
# The guide's :ref:`worked example <worked-example>` shows the next step: a
# trace that names the bottleneck.

downloads = {"a transformer with a batch of two, on an A100": small.trace}

# %%
# Exercises
# ---------
# 1. ``deep_sequential`` has layers as wide as ``vocab_bottleneck``, eight
#    times more layers, and half the batch. Why does it break even earlier?
#
#    .. dropdown:: Answer
#
#       Depth alone would change nothing: launches and FLOPs both grow with the
#       layers. Half the batch halves its FLOPs per launch. The other model has
#       an output head that is large for so few layers, which adds FLOPs and
#       almost no launches. So it breaks even at
#       :measured:`10_ten_configurations.deep_us:.1f` µs, and the other at
#       :measured:`10_ten_configurations.vocab_us:.1f` µs.
#
# 2. Heads of 56 are said to be bad. Why do we expect no difference for
#    ``bad_head_size``?
#
#    .. dropdown:: Answer
#
#       56 is a multiple of eight. Only fused attention pads it, to 64, and at
#       a context of 256 attention is a small part of the model. A head size
#       matters where attention does.

# fold: How the answers are worked out
of = costs.set_index("config")["breaks even (µs)"]
answers = {
    "launch_bound": int(late.sum()),
    "worst": float(LAUNCH_US / of["latency_bound"]),
    "deep_us": float(of["deep_sequential"]),
    "vocab_us": float(of["vocab_bottleneck"]),
}

# %%
# Measured here
# -------------
# .. own-run::
#
# A training step of each model and each control, with the same code: bf16
# autocast, AdamW, PyTorch's fused attention, a batch copied from the host
# every step. On a CPU the script runs tiny versions, whose times tell us
# nothing about a GPU.

from nsightkit.guide import headline, measure
from nsightkit.workloads import lm

# The sizes are those of the tables above. At half of the datasheet's rate the
# largest step, of compute_bound, takes 25 ms, and 32 layers of 100 launches
# take 16 ms: each model takes a second or two.
runs = {}
for size in (*MATRIX, *VARIANTS):
    runs[size.name] = measure(
        f"matrix/{size.name}",
        lm.run,
        gpu=matrix.sizes(size),
        small=matrix.sizes(size, divisor=16),
        steps=30,
    )
ten = {size.name: runs[size.name] for size in MATRIX}
complete = all(runs.values())
on_gpu = complete and all(run.gpu for run in runs.values())
mode = runs["model_a"].mode
runs["model_a"]

# %%
# One row per run:

# fold: How the runs are summed up
summary = pd.DataFrame()
if complete:
    summary = pd.DataFrame(
        {name: matrix.row(run) for name, run in ten.items()}
    )
    summary = summary.T.astype(float).rename_axis("model")
shown = summary.dropna(axis="columns", how="all").reset_index()
if complete:
    shown.insert(1, "step (ms)", shown.pop("step_ns") / 1e6)
plots.table(shown, {"operations per step": "{:,.0f}"}) if complete else None

# %%
# By kind of work:

# fold: How the figure is drawn
from nsightkit.analysis.timeline import memops

kinds = pd.DataFrame()
if complete:
    kinds = matrix.by_kind({name: run.trace for name, run in ten.items()})
    plots.share_bars(
        dict(kinds.items()), title=f"Where the time goes ({mode})"
    )
moved = pd.DataFrame()
if on_gpu:
    moved = {name: memops.summary(run.trace) for name, run in ten.items()}
    moved = pd.concat(moved, names=["model"]).reset_index(level=0)
plots.table(moved) if on_gpu else None

# %%
# The controls. A ratio differs if its interval excludes one, as on all pages
# (see *Noise* in :doc:`../definitions`):

# fold: How models and controls are compared
from nsightkit.analysis.core import noise


def rate_of(model, other):
    """Ratio of the FLOP/s of two models, with its interval."""
    per_flop = []
    for name in (model, other):
        flops = matrix.cost(runs[name]).train_flops
        per_flop.append(runs[name].values("step_ns") / flops)
    return noise.ratio(*per_flop)


controls = pd.DataFrame()
if on_gpu:
    rows = []
    for control in VARIANTS:
        ratio = rate_of(control.control_of, control.name)
        row = {"model": control.control_of, "control": control.name}
        row |= {"ratio of FLOP/s": ratio.value, "from": ratio.low}
        row |= {"to": ratio.high, "differs": ratio.excludes(1)}
        rows.append(row)
    controls = pd.DataFrame(rows)
plots.table(controls) if on_gpu else None

# %%
# The run of the aligned control:

runs["aligned_dims"]

# %%
# The outcome of the expectations:

# fold: How the answer is put together
PAIRS = {"model_b": "model_a", "misaligned_dims": "aligned_dims"}
PAIRS["bad_head_size"] = "head_size_96"
said = f"{len(runs)} programs ran; a CPU decides none of the questions."
outcome = pd.DataFrame()
if on_gpu:
    tail = matrix.tail_share(runs["vocab_bottleneck"].trace)
    ratios = {model: rate_of(model, other) for model, other in PAIRS.items()}
    outcome = matrix.judged(summary, kinds, tail, ratios)
    counted = outcome["outcome"].value_counts()
    order = summary["TFLOP/s"].sort_values()
    said = (
        f"of {len(outcome)} expectations {counted.get('holds', 0)} held and "
        f"{counted.get('does not hold', 0)} failed; not shown either way: "
        f"{counted.get('not shown', 0)}. Between the slowest for its FLOPs, "
        f"{order.index[0]}, and the quickest, {order.index[-1]}, lies a "
        f"factor of {order.iloc[-1] / order.iloc[0]:.0f}."
    )

findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"on an H200, launching a step should cost more than its FLOPs for "
        f"{waits[5]} of the ten models if a launch takes 5 µs, and for "
        f"{waits[20]} if it takes 20 µs. In a profiled program on an A100 "
        f"(case file) a launch took {real_us:.0f} µs. What limits the others "
        "is still to be measured."
    ),
    badge="predicted for an H200",
    **answers,
)
plots.table(outcome) if on_gpu else None
