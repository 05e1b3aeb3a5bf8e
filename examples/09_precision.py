"""
Why is a step in 16 bits not many times as fast?
================================================

Tensor cores multiply 16-bit matrices many times as fast as ordinary cores do
fp32 ones. A training step gains far less. Which part of it gains, what does
the rest do, and is bf16 any faster than fp16?

What is measured: the same training step in fp32, TF32, bf16 and fp16, and one
of them twice. What came out: :measured:`09_precision.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# Four rows, because "fp32" can mean two things on recent GPUs. PyTorch leaves
# TF32 off for matrix products unless asked, so fp32 here is fp32. The peaks of
# one GPU, dense, and what they would make of a step if it were GEMMs alone:

# sphinx_gallery_thumbnail_number = 1
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import Configuration
from nsightkit.errors import UsageError
from nsightkit.investigations import parts as investigations

KINDS = ("fp32", "tf32", "bf16", "fp16")
SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads")
SIZES = (*SIZES, "vocabulary")


def reckoned(cell):
    """Envelope of a run's sizes."""
    sizes = {name: cell[name] for name in SIZES}
    return envelope(Configuration(name="cell", intent="", **sizes))


h200 = hardware.find("H200")
model = reckoned(investigations.find("precision", "before").parameters("live"))
peaks = pd.DataFrame(
    {
        "precision": KINDS,
        "peak (TFLOP/s)": [h200.peak(kind).tflops for kind in KINDS],
    }
)
rates = peaks["peak (TFLOP/s)"]
peaks["times fp32"] = rates / rates[0]
peaks["floor (ms)"] = [model.floor_ms(rate) for rate in rates]
plots.table(peaks)

# %%
# Only GEMMs and attention run on tensor cores. If they are a share ``g`` of
# the fp32 step and get ``r`` times as fast, the step gains what Amdahl's law
# leaves over. The rest moves bytes: its 16-bit part moves half as many, its
# fp32 part as many as before. That bounds the rest's gain by two.


def gain(g, r, rest=1):
    """Speed-up of a step whose share g gets r times and the rest times."""
    return 1 / (g / r + (1 - g) / rest)


for kind, r in zip(KINDS, peaks["times fp32"], strict=True):
    halved = 2 if kind in ("bf16", "fp16") else 1
    bounds = [f"g = {g}: {gain(g, r, halved):4.1f}" for g in (0.5, 0.8, 0.95)]
    print(f"{kind}, peak {r:4.1f} times: {', '.join(bounds)}")

# %%
# bf16 and fp16 have the same peak, and a gradient scaler costs a pass over the
# gradients. A difference between them should be small, or noise.
#
# Memory: autocast casts what goes into matrix products, and keeps weights,
# gradients and the optimizer's moments in fp32. It even adds copies of the
# weights. Only what the forward pass keeps for the backward can shrink:

ledger = {
    "weights, gradients, AdamW: fp32 in all rows": model.state_bytes,
    "16-bit copies of weights: added": model.cache_bytes,
    "activations in 16 bits": model.activation_bytes,
    "logits and loss": model.logits_bytes,
}
rows = [(name, size / 1e9) for name, size in ledger.items()]
plots.table(pd.DataFrame(rows, columns=["bytes with 16-bit autocast", "GB"]))

# %%
# Measure
# -------
# The fp32 run comes first.

from nsightkit.investigations import measure

before = measure("precision", "before")
before

# %%
# Read
# ----
# By kind of work. On a GPU these are kernels, sorted by their names; on a
# CPU operators, each without the time of those it called.

from nsightkit.analysis.timeline import kernels, operators, steps


def categories(run):
    """Time a step by kind of work: GPU kernels, else operators on the CPU."""
    of = kernels if run.trace.recorded("kernels") else operators
    table = of.summary(run.trace, by="category").set_index("category")
    return table["total_ns"] / len(steps.find(run.trace))


kind_ns = {"fp32": categories(before)}
kinds = kind_ns["fp32"].rename_axis("kind of work").reset_index(name="step_ns")
kinds["share"] = kinds["step_ns"] / kinds["step_ns"].sum()
plots.table(kinds)

# %%
# With that, the bounds for this machine, from the fp32 run alone. A step is
# its unprofiled median; what is neither GEMM nor attention, idle time with it,
# is the rest.


def known_gpu(run):
    """Peaks of the GPU that a run was measured on, None without them."""
    try:
        return hardware.find((run.provenance["gpu"] or {})["name"])
    except (KeyError, UsageError):
        return None


was_ns = before.median("step_ns")
on_tensor_cores = kind_ns["fp32"].reindex(["GEMM", "attention"]).sum()
g = min(on_tensor_cores / was_ns, 1)
gpu, predicted = known_gpu(before), {}
for kind in KINDS[1:]:
    peak = gpu and gpu.peak(kind)
    if peak:
        halved = 2 if kind in ("bf16", "fp16") else 1
        r = peak.tflops / gpu.peak("fp32").tflops
        predicted[kind] = gain(g, r, halved)
print(f"GEMM and attention: {g:.0%} of the step")
for kind, most in predicted.items():
    print(f"{kind}: at most {most:.1f} times as fast")
if not predicted:
    print("no peaks are listed for this device, hence no bounds")

# %%
# A bound is not a prediction: what the CPU has to launch may hold up a step
# whose kernels are short. So the trace is played again, once with products and
# attention as much faster as their peak in bf16, all else as it was. A real
# bf16 step runs other kernels, and casts; nothing can play those beforehand. A
# smoke run has no GPU work to play.

from nsightkit.analysis.replay import whatif

PRODUCTS = "gemm|gemv|nvjet|cutlass|cublas|attention|flash|fmha"
known = gpu and gpu.peak("bf16")
factor = gpu.peak("fp32").tflops / known.tflops if known else 1
(replay,) = whatif.summary(before.trace, scale=f"{PRODUCTS}={factor:.3f}")
names = {"speedup": "times as fast", "replay_error": "share off, unchanged"}
shown = pd.DataFrame([replay]).rename(columns=names)
shown["change"] = f"products take {factor:.2f} of their time"
plots.table(shown, missing="not known")

# %%
# Change one thing
# ----------------
# The precision. In a program of your own:
#
# .. code-block:: python
#
#    torch.set_float32_matmul_precision("high")  # TF32
#
#    with torch.autocast("cuda", torch.bfloat16):  # or torch.float16
#        logits = model(tokens)
#
#    scaler = torch.amp.GradScaler("cuda")  # fp16 needs one

# %%
# Measure again
# -------------
# A process for each, the bf16 one twice.

after = measure("precision", "after")
runs = {
    "fp32": before,
    "tf32": measure("precision", "tf32"),
    "bf16": after,
    "fp16": measure("precision", "fp16"),
    "bf16, again": measure("precision", "again"),
}
after

# %%
# The fifth row is the yardstick: it does the same work as the third, from
# another seed. What the two differ by is chance. TF32 is a mode of tensor
# cores; on a CPU that row may be fp32 once more.

import numpy as np

kind_ns |= {name: categories(run) for name, run in runs.items()}


def row(name, run):
    """One row of the table."""
    cell, ns = run.parameters, kind_ns[name]
    low, median, high = np.percentile(run.values("step_ns"), [25, 50, 75])
    allocated = run.median("peak_allocated_bytes")
    reserved = run.median("peak_reserved_bytes")
    return {
        "precision": name,
        "median_ns": median,
        "share spread": (high - low) / median,
        "tokens/s": cell["batch"] * cell["context"] / median * 1e9,
        "times fp32": was_ns / median,
        "share in GEMMs": ns.get("GEMM", 0) / ns.sum(),
        "allocated (GB)": allocated and allocated / 1e9,
        "reserved (GB)": reserved and reserved / 1e9,
    }


table = pd.DataFrame([row(name, run) for name, run in runs.items()])
table = table.astype(dict.fromkeys(table.columns[-2:], float))
missing = "not on a CPU" if after.mode == "smoke" else "not known"
plots.table(table, {"tokens/s": "{:,.0f}"}, missing=missing)

# %%
# Spread is the width of the middle half of the steps. Memory is what PyTorch's
# allocator gave out and held at most; it keeps no account of a CPU's.
#
# Where the time went, kind by kind:

import matplotlib.pyplot as plt

COLOURS = {  # in the order of the bars
    "GEMM": "#2f7fc1",
    "attention": "#d9690f",
    "elementwise": "#17936b",
    "memory-like": "#b565a7",
    "optimizer": "#a87a10",
}
by_kind = pd.DataFrame(kind_ns).fillna(0)
named = [kind for kind in COLOURS if kind in by_kind.index]
others = by_kind.drop(index=named).sum().to_frame("(others)").T
by_kind = pd.concat([by_kind.loc[named], others])
figure, axes = plt.subplots(figsize=(7.6, 3.2), layout="constrained")
left = np.zeros(len(runs))
for kind, ns in by_kind.iterrows():
    width = ns[list(runs)].to_numpy(dtype=float) / 1e6
    colour = COLOURS.get(kind, "#7d8590")
    axes.barh(list(runs), width, left=left, color=colour, label=kind)
    left += width
axes.invert_yaxis()
axes.set_xlabel("profiled time of a step (ms)")
axes.set_title(f"A step by kind of work ({after.mode})", loc="left")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(
    frameon=False, fontsize=9, ncols=3, loc="upper center",
    bbox_to_anchor=(0.45, -0.2),
)  # fmt: skip
said = [f"{name} {ms:.1f} ms" for name, ms in zip(runs, left, strict=True)]
figure.set_label(
    f"Profiled time of a step by kind of work, stacked bars ({after.mode}): "
    f"{', '.join(said)}; GEMMs take "
    + ", ".join(f"{s:.0%}" for s in table["share in GEMMs"])
    + "."
)

# %%
# What each kind of work gave to the difference between fp32 and bf16. A kind
# that saves nothing, or costs more (the casts are elementwise kernels), is
# what keeps the gain below the ratio of the peaks.

saved = pd.DataFrame(
    {"fp32": kind_ns["fp32"], "bf16": kind_ns["bf16"]}
).fillna(0)
saved["saved (ms)"] = (saved["fp32"] - saved["bf16"]) / 1e6
saved["times"] = saved["fp32"] / saved["bf16"].where(saved["bf16"] > 0)
saved = saved.rename(columns={"fp32": "fp32_ns", "bf16": "bf16_ns"})
plots.table(saved.rename_axis("kind of work").reset_index())

# %%
# Verdict
# -------
# Computed from the runs. Noise is the larger of two things: how far the two
# bf16 runs are apart, and the spread of the steps within the runs compared.

import textwrap

median = table.set_index("precision")["median_ns"]
spread = table.set_index("precision")["share spread"]
repeat = abs(median["bf16, again"] / median["bf16"] - 1)
noise = max(repeat, spread["bf16"], spread["fp16"])
apart = median["fp16"] / median["bf16"] - 1
same = abs(apart) <= noise
gpus = {(run.provenance["gpu"] or {}).get("name") for run in runs.values()}
modes = {run.mode for run in runs.values()}
comparable = len(gpus) == 1 == len(modes)
where = "in a smoke run on a CPU" if after.mode == "smoke" else "on a GPU"
share = table.set_index("precision")["share in GEMMs"]
times = table.set_index("precision")["times fp32"]
bound = f"at most {predicted['bf16']:.1f}" if predicted else "no bound known"
if predicted and replay["speedup"]:
    bound += f", {replay['speedup']:.1f} by replay"
verdict = (
    f"{where}, a step in TF32, bf16 and fp16 is {times['tf32']:.2f}, "
    f"{times['bf16']:.2f} and {times['fp16']:.2f} times as fast as in fp32 "
    f"(bf16 expected: {bound}). GEMMs are {share['fp32']:.0%} of the time in "
    f"fp32 and {share['bf16']:.0%} in bf16. fp16 takes {abs(apart):.1%} "
    f"{'more' if apart > 0 else 'less'} time than bf16, "
    f"{'inside' if same else 'outside'} a noise of {noise:.1%}."
)
if not comparable:
    verdict = "the runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "bf16": times["bf16"],
    "noise": noise,
    "gemm_fp32": share["fp32"],
}
print(textwrap.fill(verdict))

# %%
# A difference inside the noise does not count. It takes more repetitions, not
# more digits, to find a smaller one.

# %%
# Limits
# ------
# The table by kind of work is from profiled steps, the times are not: a
# profiler makes the CPU's part longer. One repetition is a poor estimate of
# noise; it can show that a difference is not to be believed, hardly that one
# is. Numerical quality is not judged here: the losses of a few steps on random
# tokens say nothing about training.
#
# On a CPU the peaks, the kernels and the memory of this page do not exist, and
# which precision is fast depends on the instructions of that CPU. PyTorch may
# have no fast kernel for fp16 there at all.
#
# The peaks assume a boost clock that a power limit does not allow for long;
# 16-bit GEMMs are what draws the most power. A kernel's kind is read from its
# name.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{name}, {run.mode}, as a timeline": run.trace
    for name, run in runs.items()
    if name != "bf16, again"
}

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/09_precision.py
#
# Any size, and the kernels behind a row:
#
# .. code-block:: console
#
#    $ nsightkit bench --size medium --precision fp32 --precision bf16
#    $ nsightkit kernels trace.sqlite --by category
#    $ nsightkit peaks
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only precision
