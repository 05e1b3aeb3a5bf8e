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
from nsightkit.configurations import MATRIX, VARIANTS, find
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
    replayed.rename(columns={"speedup": "predicted speedup"}),
    ["share busy", "predicted speedup"],
    title="Seven programs on a faster card (case file)",
)

# %%
# The two programs that keep their GPU busy all the time gain nearly all of it.
# Below that, utilization promises nothing: Qwen is busy
# :measured:`10_ten_configurations.qwen_busy:.0%` of the time and gains
# :measured:`10_ten_configurations.qwen_gain:.2f`\ x.

# %%
# Predict: what else has to become faster?
# ----------------------------------------
# While the GPU works, the CPU launches the next kernels. A step takes as long
# as all launches or all kernels, whichever is longer. Suppose that the kernels
# of a step take 26 milliseconds and its launches 30. How busy is the GPU, and
# how long is the step with kernels that take a third of that?
#
# .. dropdown:: Answer
#
#    The GPU is busy for 26 of 30 milliseconds and looks like the limit. The
#    step still takes 30, on any card. The transformer with 128 samples in the
#    figure is close to this case.

# %%
# Evidence: what limits each program?
# -----------------------------------
# Where the GPU waits for launches (``launch-overhead``), a faster card only
# waits longer for the next one:

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
# Two rows are close calls. The transformer with 128 samples gets its verdict
# with low confidence: its kernels take nearly as long as its launches. Qwen is
# the reverse: kernels fill the step, but the CPU needs nearly as long to
# launch them. With faster kernels, launches limit both at once.
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
# and five microseconds for each launch. Three models of this guide, predicted
# from the datasheets:

# fold: How the table is made
chosen = [find(name) for name in ("model_a", "model_b", "latency_bound")]
costs = matrix.plan(chosen, slow.tflops, fast.tflops)
numbers = dict.fromkeys(["parameters (M)", "batch to fill an H200"], "{:.0f}")
numbers |= dict.fromkeys(["A100 (ms)", "H200 (ms)", "launches (ms)"], "{:.2f}")
plots.table(
    costs.drop(columns="breaks even (µs)"), numbers | {"speedup": "{:.1f}x"}
)

# %%
# A step takes as long as its FLOPs or as its launches, whichever is longer.
# ``model_a`` and ``model_b`` have about the same parameters and FLOPs. The
# second has six times the layers, so its launches take longer than its FLOPs,
# and it gains nothing.

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
#    +loader = DataLoader(dataset, batch_size=163)
#
# The first transformer of the figure shows that this works: with 128 samples
# its pass took no longer than with two (:doc:`04_tiny_kernels`). Where the
# batch must stay small, launch less: ``torch.compile(mode="reduce-overhead")``
# or a CUDA graph.

# %%
# Verdict
# -------
# Only if its kernels take longer than all that the CPU does in a step. The two
# programs that keep the GPU busy all the time gained most. Qwen, which is a
# little less busy, gained almost nothing. Before you rent the new card, replay
# a trace from the old one with faster kernels. If the replay promises little,
# a larger batch, a compiler or a better data loader gain more, and cost less.
#
# The guide's :ref:`worked example <worked-example>` is the ResNet-50 of the
# figure: even with its loader fixed, a faster card would gain
# :measured:`10_ten_configurations.resnet:.2f`\ x.

# %%
# Limits
# ------
# * The replay scales every kernel alike. On a real card, memory-bound
#   kernels gain by the ratio of the bandwidths, and small kernels gain little.
# * Six of the seven traces are from PyTorch's profiler, which slows the CPU.
#   Unprofiled programs wait less, and gain more than the figure shows.
# * A new machine usually has a faster CPU, too.
# * The three models are arithmetic at the datasheet's rates, which no training
#   step reaches, so real steps wait less for launches than predicted. They
#   depend on what a launch costs.

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
# On a GPU, this page's script also measures a training step of ten models.
# Without a GPU it runs a tiny CPU version:
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
# 2. On a machine with a faster CPU, a launch costs two microseconds. Which of
#    the three models still wait for their launches on an H200?
#
#    .. dropdown:: Answer
#
#       ``latency_bound`` and ``model_b``. Divide the H200's time by the
#       launches of a step: ``model_b`` waits if a launch takes more than
#       :measured:`10_ten_configurations.even_us:.1f` µs, and ``model_a`` above
#       :measured:`10_ten_configurations.a_even_us:.1f` µs.

# fold: The numbers of the answers
even_us = costs.set_index("model")["breaks even (µs)"]
big = traces["transformer x128, A100"]

# %%
# Measured here
# -------------
# .. own-run::
#
# A training step of ten models in bf16 with AdamW. Some models change several
# things at once, so five control models each change only one of them.

# Sizes are in nsightkit.configurations. At half of the datasheet's rate the
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

# fold: How the answer is put together
outcome = matrix.outcomes(runs, summary, kinds) if on_gpu else None
expected = pd.DataFrame(matrix.EXPECTED.items(), columns=["model", "expected"])
gain = replayed["speedup"]
findings = headline(
    matrix.answer(outcome, summary) if on_gpu else "a CPU decides nothing.",
    *runs.values(),
    otherwise=(
        f"only if its kernels are the limit. Seven traces become "
        f"{gain.min():.2f}x to {gain.max():.2f}x faster in a replay with "
        f"kernels that are {FASTER:.1f}x faster. A busy GPU proves little: "
        f"Qwen keeps its H100 "
        f"{replayed.loc['Qwen, H100', 'share busy']:.0%} busy and gains "
        f"{gain['Qwen, H100']:.2f}x, because launching its kernels takes "
        f"nearly as long."
    ),
    badge="case files, from NVIDIA V100 to B200",
    faster=FASTER,
    qwen_busy=replayed.loc["Qwen, H100", "share busy"],
    qwen_gain=gain["Qwen, H100"],
    resnet=gain["ResNet-50, V100"],
    fill=costs.set_index("model").loc[
        "latency_bound", "batch to fill an H200"
    ],
    slower=1 / big.whatif(scale=".=10")["speedup"].iloc[0],
    big_busy=replayed.loc["transformer x128, A100", "share busy"],
    even_us=even_us["model_b"],
    a_even_us=even_us["model_a"],
)
plots.table(expected if outcome is None else outcome)
