"""
Ten models: what limits each one?
=================================

Two models with as many parameters can take different times, and for different
reasons: one is short of arithmetic, one of bandwidth, one waits for its own
launches. Ten models were chosen to be limited by ten different things. What
can be said before they run, and what can only a GPU tell?

.. in-short::
"""

# %%
# The symptom
# -----------
# Each model is a line of sizes. These two have about as many parameters, but
# they need not take the same time:
#
# .. code-block:: python
#
#    #             batch, context, d_model, layers, d_ff, heads, vocabulary
#    model_a = Configuration("model_a", 32, 256, 768, 2, 2048, 12, 10_000)
#    model_b = Configuration("model_b", 32, 256, 384, 12, 1024, 12, 10_000)

# %%
# Predict: which of them wait for their launches?
# -----------------------------------------------
# A fast GPU needs less time for the same FLOPs, and the CPU takes as long as
# ever to launch them. Assume a hundred launches for each layer of a training
# step, of five microseconds each. For how many of the ten models is the CPU
# the limit on an H200, and which shape is the worst?
#
# .. dropdown:: Answer
#
#    For :measured:`10_ten_configurations.launch_bound:.0f` of the ten, the
#    squares in the figure below. Launches go with the number of layers, FLOPs
#    with the square of the width: deep and narrow is the worst shape.

# %%
# Evidence: what follows from the sizes
# -------------------------------------
# The sizes alone give what a training step must cost:

# sphinx_gallery_thumbnail_number = 1
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import envelope
from nsightkit.configurations import MATRIX, VARIANTS

LAUNCHES, LAUNCH_US = 100, 5  # assumed: of a layer, and what each costs

h200 = hardware.find("H200").peak("bf16")
costs = envelope.summary(MATRIX)
costs["FLOPs (ms)"] = costs["train_flops"] / h200.tflops / 1e9
costs["launches (ms)"] = [
    model.layers * LAUNCHES * LAUNCH_US / 1e3 for model in MATRIX
]
late = costs["launches (ms)"] > costs["FLOPs (ms)"]

# %%
# All ten, on logarithmic axes:

# fold: How the figure is drawn
import matplotlib.pyplot as plt

TITLE = "Ten training steps on an H200 (predicted)"
PLACES = {  # of a label, where its right side is not free
    "model_b": (-8, 4, "right"),
    "misaligned_dims": (6, -8, "left"),
    "vocab_bottleneck": (-8, 0, "right"),
    "deep_sequential": (-8, 0, "right"),
    "compute_bound": (0, -15, "center"),
}
figure, axes = plt.subplots(figsize=(7.6, 4.2), layout="constrained")
tflop, gigabytes = costs["train_flops"] / 1e12, costs["peak_bytes"] / 1e9
for label, which, colour, marker in (
    ("launches cost more than the FLOPs", late, "#d9690f", "s"),
    ("FLOPs cost more than the launches", ~late, "#2f7fc1", "o"),
):
    look = {"color": colour, "marker": marker, "label": label}
    axes.scatter(tflop[which], gigabytes[which], s=46, **look)
places = list(zip(costs["config"], tflop, gigabytes, strict=True))
for name, x, y in places:
    right, up, side = PLACES.get(name, (8, 0, "left"))
    look = {"ha": side, "va": "center", "fontsize": 9}
    offset = {"xytext": (right, up), "textcoords": "offset points"}
    axes.annotate(name, (x, y), **offset, **look)
axes.set(xscale="log", yscale="log", xlim=(0.02, 40), ylim=(0.7, 30))
axes.set(xlabel="TFLOP of a training step", ylabel="memory (GB)")
ticks = {"xaxis": [0.05, 0.2, 1, 5, 20], "yaxis": [1, 2, 5, 10, 20]}
for axis, at in ticks.items():
    getattr(axes, axis).set_ticks(at, [f"{value:g}" for value in at])
    getattr(axes, axis).set_ticks([], minor=True)
axes.spines[["top", "right"]].set_visible(False)
axes.set_title(TITLE, loc="left")
figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
said = ", ".join(f"{n} {x:.2f} TFLOP and {y:.1f} GB" for n, x, y in places)
figure.set_label(f"{TITLE}, memory against FLOPs: {said}.")

# %%
# The same in numbers. ``FLOPs`` is their time at the peak of the datasheet,
# which no step reaches:

# fold: How the table is made
table = pd.DataFrame({"model": costs["config"]})
table["parameters (M)"] = costs["params"] / 1e6
table["memory (GB)"] = gigabytes
table["step (TFLOP)"] = tflop
table["aligned"] = costs["aligned"]
table[["FLOPs (ms)", "launches (ms)"]] = costs[["FLOPs (ms)", "launches (ms)"]]
plots.table(
    table,
    dict.fromkeys(table.columns[2:], "{:.2f}")
    | {
        "parameters (M)": "{:.0f}",
        "aligned": lambda yes: "yes" if yes else "no",
    },
)

# %%
# ``aligned`` means that all dimensions are multiples of eight: tensor cores
# load eight numbers of 16 bits at a time. NVIDIA's guide to matrix
# multiplication adds that an A100 is most efficient with multiples of 64.

# %%
# Odd sizes on a real GPU
# -----------------------
# What do unaligned sizes cost? Here is somebody else's model: TimeSformer on
# an H100, with 3,137 tokens, an odd number, and its attention written out.

from nsightkit.investigations import case

odd = case("odd-tokens", "timesformer-h100")
reached = odd.trace.sol().head(6)
odd

# %%
# Its six longest operations, against the time that the H100's datasheet allows
# for their FLOPs and bytes:

# fold: How the figure is drawn
TITLE = "What 3,137 tokens reach on an H100 (case file)"
named = reached["name"].str.removeprefix("aten::").str.removesuffix(" bf16")
share = reached["sol_datasheet"]
figure, axes = plt.subplots(figsize=(7.6, 3.2), layout="constrained")
COLOURS = {"memory": ("#2f7fc1", None), "compute": ("#d9690f", "//")}
for bound, (colour, hatch) in COLOURS.items():
    rows = (reached["bound"] == bound).to_numpy()
    look = {"color": colour, "hatch": hatch, "edgecolor": "white"}
    label = f"limited by {bound}"
    place = rows.nonzero()[0]
    bars = axes.barh(place, share[rows], 0.66, label=label, **look)
    shown = [
        f"{part:.0%}, {ns / 1e6:.1f} ms"
        for part, ns in zip(share[rows], reached["time_ns"][rows], strict=True)
    ]
    axes.bar_label(bars, shown, padding=4, fontsize=9)
axes.set_yticks(range(len(named)), list(named), fontsize=9)
axes.invert_yaxis()
axes.set(xlim=(0, 1.2), xlabel="share of what the datasheet allows")
axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
axes.spines[["top", "right"]].set_visible(False)
figure.suptitle(TITLE, x=0.01, ha="left", fontsize="large")
figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
said = ", ".join(f"{n} {v:.0%}" for n, v in zip(named, share, strict=True))
figure.set_label(f"{TITLE}, bars: {said}.")

# %%
# Which kernels ran says more:

# fold: How the table is made
top = odd.trace.kernels().head(4)
short = top["name"].str.extract(r"(cutlass_\w+|sm90_\w+|cunn_\w+|\w+kernel)")
ran = pd.DataFrame({"kernel": short[0].str[:60], "count": top["count"]})
ran["time (ms)"] = top["total_ns"] / 1e6
ran["share"] = top["share"]
plots.table(ran, {"time (ms)": "{:.1f}"})

# %%
# ``align1`` in a kernel's name: the rows of the scores have 3,137 numbers, so
# no load of eight fits, and a kernel for an older GPU runs. The ``addmm`` have
# 25,089 rows, which is odd as well, and reach twice the share: their inner
# dimensions are multiples of 64, and Hopper's own kernels run. What has to be
# aligned is the dimension that is contiguous in memory.

# %%
# Change one thing: a control for each suspect
# --------------------------------------------
# Three of the ten change more than they say. ``misaligned_dims`` has odd
# widths, but also heads of 257, which flash attention does not take:
#
# .. code-block:: diff
#
#    -Configuration("misaligned_dims", 34, 257, 514, 6, 1538, 2, 10_000)
#    +Configuration("aligned_dims", 32, 256, 512, 6, 1536, 4, 10_000)
#
# One control would leave open which of the two it is. So there are several,
# and each keeps one of the suspects:

# fold: How the table is made
flops = envelope.summary((*MATRIX, *VARIANTS)).set_index("config")
flops = flops["train_flops"]
rows = []
for model in VARIANTS:
    row = {"model": model.control_of, "control": model.name}
    row["what it is"] = model.intent
    row["share of FLOPs added"] = (
        flops[model.name] / flops[model.control_of] - 1
    )
    rows.append(row)
plots.table(pd.DataFrame(rows))

# %%
# FLOPs differ a little, so models and controls are compared by their rates.

# %%
# Verdict
# -------
# The sizes decide what a step must cost, and which models cannot keep a fast
# GPU busy. What limits the others is a question for a trace. This is what is
# expected; a GPU's run, under *Measured here*, decides:

# fold: How the table is made
from nsightkit.investigations.pages import matrix

expected = matrix.EXPECTED.items()
plots.table(pd.DataFrame(expected, columns=["model", "expected"]))

# %%
# Limits
# ------
# * The cost of a launch is assumed. It depends on the CPU and on PyTorch, and
#   a compiler or a CUDA graph makes one launch of many.
# * The H100 trace is one capture, without an aligned control. Fused attention
#   would remove its softmax and its scores altogether.
# * FLOPs are those of the formulas, with attention as a full square. They
#   compare models, not kernels.

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs small on the CPU:
#
# .. code-block:: console
#
#    $ python examples/10_ten_configurations.py
#
# The plan, one model, and the same questions to a trace of your own:
#
# .. code-block:: console
#
#    $ nsightkit envelope --config deep_sequential
#    $ nsightkit bench --size deep_sequential --mode train
#    $ nsightkit sol trace.json.gz
#    $ nsightkit kernels trace.json.gz --by category

downloads = {"TimeSformer with 3,137 tokens on an H100": odd.trace}

# %%
# Exercises
# ---------
# 1. In the trace of TimeSformer, which share of all kernel time is attention
#    that is written out: softmax, the two ``bmm`` and the ``mul``? How much
#    faster could the kernels be, at most, with fused attention?
#
#    .. dropdown:: Answer
#
#       ``nsightkit sol`` has the times. It is
#       :measured:`10_ten_configurations.attention:.0%`, so at most
#       :measured:`10_ten_configurations.at_most:.1f` times as fast, if fused
#       attention took no time. It takes some: its products stay.
#
# 2. At which cost of a launch would ``wide_ffn`` begin to wait for launches on
#    an H200?
#
#    .. dropdown:: Answer
#
#       At :measured:`10_ten_configurations.launch_us:.1f` µs: the time of its
#       FLOPs, divided by a hundred launches for each of six layers. No step
#       runs at the peak, so in practice it would be more.
#
# 3. Heads of 56 are said to be bad. Why is no difference expected of
#    ``bad_head_size``?
#
#    .. dropdown:: Answer
#
#       56 is a multiple of eight. Only fused attention pads it, to 64, and at
#       a context of 256 attention is a small part of the model. A head size
#       matters where attention does.

# fold: How the answers are worked out
attention = reached["name"].str.contains("_softmax|bmm|aten::mul ")
attention = float(reached.loc[attention, "time_ns"].sum())
attention /= odd.trace.summary()["kernel_ns"]
wide_ms = costs.set_index("config")["FLOPs (ms)"]["wide_ffn"]
wide = next(model for model in MATRIX if model.name == "wide_ffn")
answers = {
    "launch_bound": int(late.sum()),
    "attention": attention,
    "at_most": 1 / (1 - attention),
    "launch_us": float(wide_ms) * 1e3 / (LAUNCHES * wide.layers),
}

# %%
# Measured here
# -------------
# .. own-run::
#
# A training step of each model and each control, with the same code: bf16
# autocast, AdamW, PyTorch's fused attention, a batch copied from the host
# every step. On a CPU the models are small, and nothing of this says what
# would limit them on a GPU.

# fold: How the runs are summed up
from nsightkit.investigations import headline, measure

runs = {model.name: measure("matrix", model.name) for model in MATRIX}
first = runs["model_a"]
on_gpu = first.trace.recorded("kernels")
seen = pd.DataFrame({name: matrix.row(run) for name, run in runs.items()}).T
seen = seen.astype(float).rename_axis("model")
shown = seen.dropna(axis="columns", how="all").reset_index()
shown.insert(1, "step (ms)", shown.pop("step_ns") / 1e6)
plots.table(shown, {"operations a step": "{:,.0f}"})

# %%
# By kind of work:

# fold: How the figure is drawn
kinds = matrix.by_kind({name: run.trace for name, run in runs.items()})
plots.share_bars(
    dict(kinds.items()), title=f"Where the time goes ({first.mode})"
)
first

# %%
# The five that take longest in each model, and how long single ones last:

# fold: How the figures are drawn
from nsightkit.analysis.timeline import memops, operators


def durations(run):
    """Time of each kernel, else of each operator without inner ones."""
    if on_gpu:
        return run.trace.table("kernels", ["duration_ns"])["duration_ns"]
    return operators.own(run.trace)["duration_ns"]


plots.small_multiples(
    {name: matrix.work(run.trace) for name, run in runs.items()},
    title=f"The five longest of each model ({first.mode})",
)
plots.box_plots(
    {name: durations(run) for name, run in runs.items()},
    title=f"Operations by model ({first.mode})",
    axis="duration of an operation",
)
moved = {name: memops.summary(run.trace) for name, run in runs.items()}
moved = pd.concat(moved, names=["model"]).reset_index(level=0)
plots.table(moved) if on_gpu else None

# %%
# The controls. A ratio differs where its interval does not contain one, which
# is the rule of all pages (see *Noise* in :doc:`../definitions`):

# fold: How models and controls are compared
from nsightkit.analysis.core import noise

controls = {m.name: measure("matrix", m.name) for m in VARIANTS}
every = runs | controls


def rate_of(model, other):
    """How many times the FLOP/s of another model one reaches."""
    per_flop = [
        every[name].values("step_ns") / matrix.cost(every[name]).train_flops
        for name in (model, other)
    ]
    return noise.ratio(*per_flop)


PAIRS = {"model_b": "model_a", "misaligned_dims": "aligned_dims"}
PAIRS["bad_head_size"] = "head_size_96"
against = {m: (other, rate_of(m, other)) for m, other in PAIRS.items()}
rows = []
for control in VARIANTS:
    found = rate_of(control.control_of, control.name)
    row = {"model": control.control_of, "control": control.name}
    row |= {"times its FLOP/s": found.value, "from": found.low}
    rows.append(row | {"to": found.high, "differs": found.excludes(1)})
plots.table(pd.DataFrame(rows)) if on_gpu else None

# %%
# The run of the aligned control:

controls["aligned_dims"]

# %%
# What came of the expectations, where there was a GPU to tell:

# fold: How the answer is put together
outcome = matrix.judged(
    seen["TFLOP/s"],
    seen["share idle"],
    kinds,
    matrix.tail_share(runs["vocab_bottleneck"].trace),
    against,
)
counted = outcome["outcome"].value_counts()
order = seen["TFLOP/s"].sort_values()
said = (
    f"of {len(outcome)} expectations {counted.get('holds', 0)} held and "
    f"{counted.get('does not hold', 0)} failed; not shown either way: "
    f"{counted.get('not shown', 0)}. Between the slowest for its FLOPs, "
    f"{order.index[0]}, and the quickest, {order.index[-1]}, lies a factor of "
    f"{order.iloc[-1] / order.iloc[0]:.0f}."
)
if first.mode == "smoke":
    said = f"{len(every)} programs ran; a CPU decides none of the questions."
low, high = share[reached["name"].str.contains("bmm")]
findings = headline(
    said,
    *every.values(),
    otherwise=(
        f"for {int(late.sum())} of ten models, launching a step should cost "
        f"more than its FLOPs on an H200. On an H100 (case file), odd "
        f"sizes held a real model's attention to {low:.0%} and {high:.0%} of "
        f"the datasheet, and its softmax to {share.iloc[0]:.0%}."
    ),
    badge="predicted for an H200",
    **answers,
)
downloads = {
    f"{name}, {run.mode}, as a timeline": run.trace
    for name, run in every.items()
}
plots.table(outcome) if on_gpu else None
