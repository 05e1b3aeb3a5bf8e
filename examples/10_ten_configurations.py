"""
Ten models: what holds each of them up?
=======================================

Two models with as many parameters can take different times, and for different
reasons: one is short of arithmetic, one of bandwidth, one waits for its own
launches. Ten models were chosen to be held up by ten different things. Are
they?

What is measured: a training step of each, alike in all but its sizes, and of
a control for those whose sizes change more than they say. What came out:
:measured:`10_ten_configurations.verdict`

What one needs: nothing to read this page, two minutes and a CPU to run its
small version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# What each must cost follows from its sizes: parameters, memory, FLOPs, and
# whether its dimensions suit tensor cores. Those load sixteen bytes at a time,
# eight numbers of 16 bits: a dimension should be a multiple of eight, and need
# not be one of a larger power of two.

# sphinx_gallery_thumbnail_number = 1
import pandas as pd

from nsightkit import plots
from nsightkit.analysis.roofline import envelope
from nsightkit.configurations import MATRIX, VARIANTS

costs = envelope.summary((*MATRIX, *VARIANTS))
gigabytes = ["state", "activation", "logits", "peak"]
table = costs[["config", "params"]].copy()
for name in gigabytes:
    table[f"{name} (GB)"] = costs[f"{name}_bytes"] / 1e9
table["step (TFLOP)"] = costs["train_flops"] / 1e12
table["aligned"] = costs["aligned"]
plots.table(table)

# %%
# In words, with what follows from the sizes alone:

words = costs[["config"]].assign(notes=costs["notes"].map("; ".join))
plots.table(words)

# %%
# Such models are often chosen with one GPU in mind and run on another. A GPU
# with more arithmetic needs less time for the same FLOPs, and the CPU as long
# as ever to launch them. The floor of a step on two GPUs, beside an assumed
# cost of launching it in eager mode. Where the launches cost more than the
# floor, the CPU is the limit, whatever the sizes were to show.

from nsightkit import hardware

LAUNCHES, LAUNCH_US = 100, 5  # assumed: of a layer, and the cost of each

floors = pd.DataFrame({"config": [model.name for model in MATRIX]})
for name in ("RTX 4090", "H200"):
    peak = hardware.find(name).peak("bf16")
    floors[f"floor, {name} (ms)"] = [
        envelope.envelope(model).floor_ms(peak.tflops) for model in MATRIX
    ]
floors["launches, assumed (ms)"] = [
    model.layers * LAUNCHES * LAUNCH_US / 1e3 for model in MATRIX
]
late = floors["launches, assumed (ms)"] > floors["floor, H200 (ms)"]
floors["limit on the H200"] = late.map({True: "launches", False: "GPU"})
plots.table(floors)

# %%
# One hypothesis each, to be judged below by its data. One of them expects to
# see nothing: a head of 56 is aligned, only attention pads it, and attention
# is a small part of that model.

HYPOTHESES = {
    "model_a": "matrix products are most of the work",
    "model_b": "a FLOP takes longer than in model_a, which is less deep",
    "latency_bound": "a FLOP takes longer than in any other",
    "misaligned_dims": "a FLOP takes longer than in aligned_dims",
    "bad_head_size": "no difference to head_size_96",
    "vocab_bottleneck": "output head and loss are most of the forward pass",
    "wide_ffn": "a larger share in matrix products than model_a",
    "bandwidth_bound": "most of the work is not in matrix products",
    "compute_bound": "a FLOP takes less time than in any other",
    "deep_sequential": "idle for a larger share than compute_bound",
}
plots.table(pd.DataFrame(HYPOTHESES.items(), columns=["model", "expected"]))

# %%
# Measure
# -------
# Each in a process of its own, with the same code: bf16 autocast, AdamW,
# PyTorch's fused attention, a batch copied from the host every step.

from nsightkit.investigations import measure

runs = {model.name: measure("matrix", model.name) for model in MATRIX}
runs["model_a"]

# %%
# Read
# ----
# A row each. Times of steps come from runs without a profiler, the rest from
# two profiled steps. The share with kernels, a trace's density, is that of the
# span in which at least one kernel ran; streams that overlap count once, so it
# never exceeds one. The share in copies is the time of copies and memsets
# against that of kernels. A dash is what a run on a CPU has not.

import numpy as np

from nsightkit.analysis.timeline import overview, steps
from nsightkit.configurations import Configuration

SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads")
SIZES = (*SIZES, "vocabulary")


def reckoned(run):
    """Envelope of the sizes that ran, which are small in a smoke run."""
    sizes = {name: run.parameters[name] for name in SIZES}
    return envelope.envelope(Configuration(run.part, intent="", **sizes))


def recorded_in(run):
    """Where a run's work is recorded: kernels, or a CPU's operators."""
    return "kernels" if run.trace.recorded("kernels") else "ops"


def figures(run):
    """What one run amounts to."""
    low, median, high = np.percentile(run.values("step_ns"), [25, 50, 75])
    seen = overview.summary(run.trace)
    count = len(steps.find(run.trace))
    operations = len(run.trace.table(recorded_in(run), ["start_ns"]))
    idle = seen["span_ns"] and seen["idle_ns"] / seen["span_ns"]
    memory, cost = run.median("peak_allocated_bytes"), reckoned(run)
    wide = cost.configuration.d_head > 256  # no flash attention
    return {
        "step_ns": median,
        "share spread": (high - low) / median,
        "TFLOP/s": cost.train_flops / median / 1e3,
        "share with kernels": seen["density"],
        "share idle": idle,
        "share in copies": seen["memory_overhead"],
        "operations a step": operations / count,
        "peak (GB)": memory and memory / 1e9,
        "peak, reckoned (GB)": cost.peak_bytes(scores=wide) / 1e9,
    }


def summarised(runs):
    """A row for each run."""
    rows = {name: figures(run) for name, run in runs.items()}
    return pd.DataFrame(rows).T.astype(float).rename_axis("model")


seen = summarised(runs)
plots.table(seen.reset_index(), {"operations a step": "{:,.0f}"})

# %%
# The same side by side. Operations are kernels where there was a GPU, else
# the CPU's operators.

first = runs["model_a"]
on_gpu = recorded_in(first) == "kernels"
drawn = ["step_ns", "TFLOP/s", "operations a step"]
if on_gpu:
    drawn = ["step_ns", "TFLOP/s", "share with kernels", "share in copies"]
plots.panels(
    seen, drawn, title=f"Ten models, a training step each ({first.mode})"
)

# %%
# By kind of work. What is not blue in a bar is time that went to something
# else than matrix products.

from nsightkit.analysis.timeline import kernels, operators


def work(run, **how):
    """Kernels of a run, or, without a GPU, operators of the CPU."""
    of = kernels if recorded_in(run) == "kernels" else operators
    return of.summary(run.trace, **how)


ORDER = ["GEMM", "attention", "elementwise", "memory-like", "optimizer"]


def by_kind(runs):
    """Time by kind of work, a column for each run."""
    tables = {name: work(run, by="category") for name, run in runs.items()}
    totals = {n: t.set_index("name")["total_ns"] for n, t in tables.items()}
    kinds = pd.DataFrame(totals).reindex(list(totals), axis=1).fillna(0)
    known = [kind for kind in ORDER if kind in kinds.index]
    rest = kinds.drop(index=known).sum().to_frame("(others)").T
    return pd.concat([kinds.loc[known], rest])


kinds = by_kind(runs)
plots.share_bars(
    dict(kinds.items()), title=f"Where the time goes ({first.mode})"
)

# %%
# The first in each ranking, by time and by count. They are rarely the same:
# what runs most often is short.

rows = []
for name, run in runs.items():
    for sort in ("time", "count"):
        top = work(run, sort=sort, top=1).iloc[0]
        row = {"model": name, "by": sort}
        shown = ("share", "median_ns", "count", "category", "name")
        rows.append(row | {k: top[k] for k in shown})
plots.table(pd.DataFrame(rows))

# %%
# The five that take longest in each model, in shares of its time:

plots.small_multiples(
    {name: work(run) for name, run in runs.items()},
    title=f"The five longest of each model ({first.mode})",
)

# %%
# How long single operations last. Launching one from PyTorch takes the CPU
# some microseconds: in a GPU run, a model whose box lies below that cannot
# keep the GPU busy.


def durations(run):
    """Time of each operation: kernels, else operators without inner ones."""
    if recorded_in(run) == "kernels":
        return run.trace.table("kernels", ["duration_ns"])["duration_ns"]
    return operators.own(run.trace)["duration_ns"]


plots.box_plots(
    {name: durations(run) for name, run in runs.items()},
    title=f"Operations by model ({first.mode})",
    axis="duration of an operation",
)

# %%
# Copies and memsets. A batch of tokens is all that has to cross the bus in a
# step; logits never leave the GPU, however large the vocabulary. A small copy
# takes as long as its latency, so its bytes a second say nothing of the bus.

from nsightkit.analysis.timeline import gaps, memops

moved = {name: memops.summary(run.trace) for name, run in runs.items()}
if on_gpu:
    moved = pd.concat(moved, names=["model"]).reset_index(level=0)
else:
    moved = pd.DataFrame({"copies": ["a CPU has nothing to copy to"]})
plots.table(moved)

# %%
# Why a GPU was idle, in those models where it was for the largest shares:

if on_gpu:
    idlest = seen["share idle"].nlargest(3).index
    for name in idlest:
        plots.gap_bars(
            gaps.summary(runs[name].trace),
            title=f"GPU idle time by cause, {name} ({first.mode})",
        )
else:
    print("this run had no GPU that could be idle")

# %%
# Over time: one step, raw or rolled up by kind of work. Three that look like
# others here are left out; their traces are among the downloads.

from nsightkit.analysis.timeline import selection

ALIKE = ("bad_head_size", "wide_ffn", "model_b")
last = {
    name: selection.select(run.trace, last_steps=1)
    for name, run in runs.items()
    if name not in ALIKE
}
plots.interactive_timeline(
    last,
    levels=1,
    most_bytes=50_000,
    title=f"A step of each model ({first.mode})",
)

# %%
# Change one thing
# ----------------
# Three of the ten change more than they say, and each has a control.
# ``misaligned_dims`` has heads of 257: too wide for flash attention, and odd,
# so that rotary embedding leaves a channel over. Is it slow for its alignment
# or for its attention? One control is as unaligned with heads that flash
# attention takes, one has an even head that it does not take, one is aligned.
# ``bad_head_size`` is repeated in heads that need no padding, and
# ``vocab_bottleneck`` with a vocabulary a little larger that is aligned.

CONTROLS = {model.name: model.control_of for model in VARIANTS}
plots.table(pd.DataFrame(CONTROLS.items(), columns=["control", "of"]))

# %%
# Measure again
# -------------

controls = {name: measure("matrix", name) for name in CONTROLS}
controls["aligned_dims"]

# %%
# By the rate, since their FLOPs differ a little. Noise is the larger spread of
# the two runs: the middle half of their steps.

again = summarised(controls)
rate, spread = (
    pd.concat([seen[name], again[name]])
    for name in ("TFLOP/s", "share spread")
)
rows = []
for control, of in CONTROLS.items():
    change = rate[control] / rate[of] - 1
    noise = max(spread[control], spread[of])
    row = {"model": of, "TFLOP/s": rate[of], "control": control}
    row |= {"of control": rate[control], "share gained": change}
    rows.append(row | {"share noise": noise, "differs": abs(change) > noise})
compared = pd.DataFrame(rows)
plots.table(compared)

# %%
# And where the difference lies. Attention that writes its scores out shows up
# as softmax and matrix products instead.

pairs = {}
for of in dict.fromkeys(CONTROLS.values()):
    pairs[of] = runs[of]
    pairs |= {c: controls[c] for c in CONTROLS if CONTROLS[c] == of}
plots.share_bars(
    dict(by_kind(pairs).items()),
    title=f"Models and their controls ({first.mode})",
)

# %%
# Verdict
# -------
# Each hypothesis by its data. A comparison that lies within the noise of its
# two runs shows nothing, for or against. Equality is shown only where the
# noise is small, here less than a twentieth.

import textwrap

from nsightkit.analysis.timeline import ranges

share = kinds / kinds.sum()
products = share.loc["GEMM"]
matrix_work = share.reindex(["GEMM", "attention"]).sum()
gained = compared.set_index("control")["share gained"]
noisy = compared.set_index("control")["share noise"]


def forward_share(run):
    """Share of the forward pass in the output head and the loss."""
    found = ranges.summary(run.trace, match="^(forward|head|loss)$")
    clock = "gpu_ns" if recorded_in(run) == "kernels" else "total_ns"
    ns = found.set_index("name")[clock].reindex(["forward", "head", "loss"])
    forward, *parts = ns.astype(float).fillna(0)
    return sum(parts) / forward if forward else 0.0


def alike(control):
    """Whether a rate is its control's, None if noise could hide that."""
    change, noise = abs(gained[control]), noisy[control]
    return change <= noise if noise < 0.05 or change > noise else None


def beyond(name, other):
    """How far a rate is above another's, None within their noise."""
    change = rate[name] / rate[other] - 1
    noise = max(spread[name], spread[other])
    return change if abs(change) > noise else None


deeper = beyond("model_b", "model_a")
tail = forward_share(runs["vocab_bottleneck"])
aligned = gained["aligned_dims"]
idle = seen["share idle"]
judged = {
    "model_a": (products["model_a"] > 0.5, f"{products['model_a']:.0%}"),
    "model_b": (
        deeper and deeper < 0,
        f"{rate['model_b'] / rate['model_a']:.2f} times its rate",
    ),
    "latency_bound": (
        seen["TFLOP/s"].idxmin() == "latency_bound",
        f"the slowest is {seen['TFLOP/s'].idxmin()}",
    ),
    "misaligned_dims": (
        None if abs(aligned) <= noisy["aligned_dims"] else aligned > 0,
        f"{aligned:+.1%}, noise {noisy['aligned_dims']:.1%}",
    ),
    "bad_head_size": (
        alike("head_size_96"),
        f"{gained['head_size_96']:+.1%}, noise {noisy['head_size_96']:.1%}",
    ),
    "vocab_bottleneck": (tail > 0.5, f"{tail:.0%}"),
    "wide_ffn": (
        products["wide_ffn"] > products["model_a"],
        f"{products['wide_ffn']:.0%} against {products['model_a']:.0%}",
    ),
    "bandwidth_bound": (
        matrix_work["bandwidth_bound"] < 0.5,
        f"{1 - matrix_work['bandwidth_bound']:.0%}",
    ),
    "compute_bound": (
        seen["TFLOP/s"].idxmax() == "compute_bound",
        f"the quickest is {seen['TFLOP/s'].idxmax()}",
    ),
    "deep_sequential": (
        idle["deep_sequential"] > idle["compute_bound"] if on_gpu else None,
        f"{idle['deep_sequential']:.0%} against {idle['compute_bound']:.0%}"
        if on_gpu
        else "only a GPU can tell",
    ),
}
SAID = {True: "holds", False: "does not hold", None: "not shown"}
outcome = pd.DataFrame(
    [
        {
            "model": name,
            "expected": HYPOTHESES[name],
            "verdict": SAID[holds if holds is None else bool(holds)],
            "by": evidence,
        }
        for name, (holds, evidence) in judged.items()
    ]
)
plots.table(outcome)

# %%
# In a sentence:

everything = [*runs.values(), *controls.values()]
gpus = {(run.provenance["gpu"] or {}).get("name") for run in everything}
modes = {run.mode for run in everything}
comparable = len(gpus) == 1 == len(modes)
where = "in a smoke run on a CPU" if first.mode == "smoke" else "on a GPU"
counted = outcome["verdict"].value_counts()
held, failed, open_ = (counted.get(said, 0) for said in SAID.values())
order = seen["TFLOP/s"].sort_values()
verdict = (
    f"{where}, of {len(outcome)} expectations {held} held and {failed} "
    f"failed; not shown either way: {open_}. Between the slowest for its "
    f"FLOPs, {order.index[0]}, and the quickest, {order.index[-1]}, lies a "
    f"factor of {order.iloc[-1] / order.iloc[0]:.0f}."
)
if not comparable:
    verdict = "the runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "held": int(held),
    "failed": int(failed),
    "apart": float(order.iloc[-1] / order.iloc[0]),
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# The kind of a kernel is read from its name, and a share of time is not a
# share of a limit: that a kernel is memory-like does not show that it reaches
# the bandwidth of the memory. For that its bytes have to be known.
#
# FLOPs are those of the formulas, with attention as a full square, so rates
# compare models and not kernels. What a step needs beyond them, in optimizer,
# norms and loss, makes the rate smaller, as it should.
#
# Eager mode decides much of what is seen here. A compiler fuses the small
# operations that hold half of these models up; so these are findings about
# these programs, not about models of these sizes.
#
# In a smoke run all sizes but depth and number of heads are an eighth, there
# is nothing to launch and no alignment to lose. What it shows is that the page
# works.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{name}, {run.mode}, as a timeline": run.trace
    for name, run in (runs | controls).items()
}

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
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
#    $ nsightkit summary trace.sqlite
#    $ nsightkit kernels trace.sqlite --by category
#    $ nsightkit memops trace.sqlite
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only matrix
