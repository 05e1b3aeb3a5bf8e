"""
Would a faster GPU speed up my model?
=====================================

A job moves to a card with three times the FLOP/s, and the step takes as long
as before. Which programs gain from a faster GPU, and can we tell before we
rent one?

.. in-short::
"""

# %%
# The symptom: a busy GPU, and no gain
# ------------------------------------
# Here are seven programs, each from a published trace
# (:doc:`/case_sources` has their authors). The left panel has the number that
# people check before they upgrade, the share of time in which the GPU is busy.
# For the right panel we replay each trace with kernels
# :measured:`10_ten_configurations.faster:.1f` times faster, the ratio of an
# H200's bf16 rate to an A100's:

# record: 150 s
# sphinx_gallery_thumbnail_number = 1
# fold: How the traces are replayed
import pandas as pd
from _lib import matrix

from nsightkit import hardware, plots
from nsightkit.configurations import MATRIX, VARIANTS
from nsightkit.guide import case, headline, measure
from nsightkit.workloads import lm

slow, fast = (hardware.find(card).peak("bf16") for card in ("A100", "H200"))
FASTER = fast.tflops / slow.tflops
CASES = {
    "gpt-oss eager, B200": ("b200-eager", "gpt-oss-eager"),
    "transformer x2, A100": ("a100-batch-size", "batch-2"),
    "transformer x128, A100": ("a100-batch-size", "batch-128"),
    "ResNet-50, V100": ("v100-starved-loader", "workers-4"),
    "Qwen, H100": ("two-cards", "qwen-h100"),
    "gpt-oss graphs, MI300X": ("vllm-graphs", "decode"),
    "2.7 B model, A100": ("a100-cuda-graphs", "eager"),
}
traces = {name: case(*which).trace for name, which in CASES.items()}
replayed = pd.DataFrame(
    [matrix.on_a_faster_card(trace, FASTER) for trace in traces.values()],
    index=list(traces),
)
plots.panels(
    replayed,
    ["share busy", "speedup"],
    title="Seven programs on a faster card (case file)",
)

# %%
# Qwen keeps its H100 :measured:`10_ten_configurations.qwen_busy:.0%` busy and
# would gain :measured:`10_ten_configurations.qwen_gain:.2f`\ x. The last two
# programs are a few percent busier and gain nearly all of it. Utilization does
# not tell them apart.

# %%
# Predict: what else has to become faster?
# ----------------------------------------
# While the GPU works, the CPU launches the next kernels. A step takes as long
# as all launches or all kernels, whichever is longer. Suppose that the kernels
# of a step take 26 units of time and its launches 30. How busy is the GPU, and
# how long is the step with kernels that take a third?
#
# .. dropdown:: Answer
#
#    The GPU is busy for 26 of 30 units and looks like the limit. The step
#    still takes 30, with any card. That is about the transformer with 128
#    samples in the figure.

# %%
# Evidence: what limits each program?
# -----------------------------------
# Where the verdict names launches, a faster card only waits longer for the
# next one:

# fold: How the table is made
shown = replayed.rename_axis("program").reset_index()
plots.table(
    shown,
    {
        "share busy": "{:.0%}",
        "speedup": "{:.2f}x",
        "from launch to launch (µs)": "{:.0f}",
    },
)

# %%
# Qwen is the trap. Its verdict is right, because kernels fill the step, but
# the CPU needs nearly as long to launch them. With faster kernels the launches
# are the limit at once.
#
# The last column is the median time from one launch to the next. It is a time
# of the CPU, of Python and of the profiler that recorded the trace, so it
# stays the same on another card. In the last two rows it does not matter: a
# graph launches hundreds of kernels at once, and the other model has kernels
# of milliseconds.

# %%
# Can we tell from the sizes of a model?
# --------------------------------------
# Then the answer needs no trace. The FLOPs of a training step follow from its
# sizes, and so does the number of launches: we assume a hundred for each layer
# and five microseconds for each launch. These are ten models of this guide, on
# an A100 and on an H200. They are predictions, and none has run yet. A model
# waits where the orange mark is right of the dot:

# fold: How the figure is drawn
costs = matrix.plan(MATRIX, slow.tflops, fast.tflops)
matrix.figure(costs, title="Ten training steps, A100 to H200 (predicted)")

# %%
# The move shifts every dot to the left and no orange mark. On the A100,
# :measured:`10_ten_configurations.above_slow` of the ten models wait for their
# launches, and on the H200 :measured:`10_ten_configurations.above_fast` do.
# ``model_a`` and ``model_b`` have about the same parameters and FLOPs. The
# second has six times the layers, and it gains nothing:

# fold: How the table is made
SHOWN = ["model", "parameters (M)", "batch", "speedup"]
SHOWN.append("batch to fill an H200")
numbers = {"parameters (M)": "{:.0f}", "speedup": "{:.1f}x"}
plots.table(costs[SHOWN], numbers)

# %%
# The answer depends on what a launch costs:

for launch_us in (2, 5, 10, 20):
    late = costs["breaks even (µs)"] < launch_us
    print(f"launches of {launch_us:2} µs: {late.sum():2} of ten would wait")

# %%
# Change one thing: the batch
# ---------------------------
# A larger batch has more FLOPs per launch. The last column of the table has
# the batch whose FLOPs take as long as its launches, on an H200.
# ``latency_bound`` would need :measured:`10_ten_configurations.fill:,.0f`
# sequences instead of one:
#
# .. code-block:: diff
#
#    -loader = DataLoader(dataset, batch_size=1)
#    +loader = DataLoader(dataset, batch_size=enough)
#
# The first transformer of the figure shows that this works: with 128 samples
# its pass took :measured:`10_ten_configurations.longer:.2f`\ x as long as with
# two (:doc:`04_tiny_kernels`). Where the batch must stay small, launch less:
# ``torch.compile(mode="reduce-overhead")`` or a CUDA graph.

# %%
# Verdict
# -------
# Only if kernels take longer than all that the CPU does in a step.
# Utilization does not show that, and a replay with faster kernels does. Before
# you rent the new card, ask a trace from the old one. If it promises little, a
# larger batch, a compiler or a better data loader gain more, and cost less.
# The guide's :ref:`worked example <worked-example>` is the ResNet-50 of the
# figure: even with its loader fixed, a faster card would gain
# :measured:`10_ten_configurations.resnet:.2f`\ x.

# %%
# Limits
# ------
# * The replay scales every kernel alike. On a real card, kernels limited by
#   memory gain by its bandwidth, and small kernels gain little.
# * Six of the seven traces are from PyTorch's profiler, which slows the CPU.
#   Unprofiled programs wait less, and gain more than the figure shows.
# * A new machine usually has a faster CPU, too.
# * The ten models are arithmetic at the datasheet's rates, which no training
#   step reaches: real steps cross the line later.

# %%
# Run it yourself
# ---------------
# On a trace from the card you have, for kernels that take a third of the time:
#
# .. code-block:: console
#
#    $ nsightkit whatif trace.json.gz --scale '.=0.33'
#    $ nsightkit verdict trace.json.gz
#
# Without a trace, from the sizes:
#
# .. code-block:: console
#
#    $ nsightkit envelope --config deep_sequential
#
# To run this page's script (without a GPU it runs a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/10_ten_configurations.py

downloads = {
    "a transformer with 128 samples, on an A100": traces[
        "transformer x128, A100"
    ],
    "Qwen, on an H100": traces["Qwen, H100"],
}

# %%
# Exercises
# ---------
# 1. Replay the A100's transformer with kernels that take ten times as long.
#    How much slower is the pass, and why not ten times?
#
#    .. dropdown:: Answer
#
#       :measured:`10_ten_configurations.slower:.1f` times. The kernels were
#       busy for :measured:`10_ten_configurations.big_busy:.0%` of the pass.
#       Ten times that is the new pass, and the launches hide behind it.
#
# 2. ``deep_sequential`` has layers as wide as ``vocab_bottleneck``, eight
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

# fold: The numbers of the answers
even_us = costs.set_index("model")["breaks even (µs)"]
big = traces["transformer x128, A100"]
spans = [
    traces[f"transformer x{batch}, A100"].summary()["span_ns"]
    for batch in (2, 128)
]

# %%
# Measured here
# -------------
# .. own-run::
#
# A training step of each of the ten models, in bf16 with AdamW, fused
# attention, and a batch copied from the host every step. Three of them change
# more than their names suggest: ``misaligned_dims`` has odd widths, and also
# heads too wide for flash attention. So five more models keep one of the
# suspects each:

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
on_gpu = all(run.gpu for run in runs.values())
runs["model_a"]

# %%
controls = [(m.control_of, m.name, m.intent) for m in VARIANTS]
plots.table(pd.DataFrame(controls, columns=["model", "control", "changed"]))

# %%
# One row per run, and where the time goes:

summary = matrix.summary(runs) if all(runs.values()) else pd.DataFrame()
if len(summary):
    kinds = matrix.by_kind({m.name: runs[m.name].trace for m in MATRIX})
    title = f"Where the time goes ({runs['model_a'].mode})"
    plots.stacks(dict(kinds.items()), title=title)
shown = summary.dropna(axis="columns", how="all").reset_index()
plots.table(shown) if len(summary) else None

# %%
# Models and controls, compared by FLOP/s. A ratio differs if its interval
# excludes one (see *Noise* in :doc:`../definitions`):

plots.table(matrix.controls(runs)) if on_gpu else None

# %%
# What we expected of each model, and the outcome:

# fold: How the answer is put together
outcome = matrix.outcomes(runs, summary, kinds) if on_gpu else None
expected = pd.DataFrame(matrix.EXPECTED.items(), columns=["model", "expected"])
gain = replayed["speedup"]
findings = headline(
    matrix.answer(outcome, summary) if on_gpu else "a CPU decides nothing.",
    *runs.values(),
    otherwise=(
        f"only if kernels are the limit, and a busy GPU does not prove it. "
        f"With kernels {FASTER:.1f}x faster, replays of seven traces give "
        f"{gain.min():.2f}x to {gain.max():.2f}x; Qwen, which keeps its H100 "
        f"{replayed.loc['Qwen, H100', 'share busy']:.0%} busy, gains "
        f"{gain['Qwen, H100']:.2f}x, because launching takes nearly as long."
    ),
    badge="case files, from NVIDIA V100 to B200",
    faster=FASTER,
    qwen_busy=replayed.loc["Qwen, H100", "share busy"],
    qwen_gain=gain["Qwen, H100"],
    resnet=gain["ResNet-50, V100"],
    above_slow=int((costs["launches (ms)"] > costs["A100 (ms)"]).sum()),
    above_fast=int((costs["launches (ms)"] > costs["H200 (ms)"]).sum()),
    fill=costs.set_index("model").loc[
        "latency_bound", "batch to fill an H200"
    ],
    longer=spans[1] / spans[0],
    slower=1 / big.whatif(scale=".=10")["speedup"].iloc[0],
    big_busy=replayed.loc["transformer x128, A100", "share busy"],
    deep_us=even_us["deep_sequential"],
    vocab_us=even_us["vocab_bottleneck"],
)
plots.table(expected if outcome is None else outcome)
