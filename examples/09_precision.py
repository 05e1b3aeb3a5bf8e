"""
Why isn't bf16 sixteen times faster?
====================================

On an A100, tensor cores multiply bf16 matrices sixteen times faster than
CUDA cores multiply fp32 ones. A whole step gains less. Which part of it
gains?

.. in-short::
"""

# %%
# The symptom: matmuls on the wrong unit
# --------------------------------------
# Where a program names no precision, PyTorch computes in fp32. TF32, in which
# tensor cores multiply fp32 matrices with shortened mantissas, is off by
# default. So which unit do real programs use? Here are four that others
# recorded. The name of a kernel from one of the common libraries reveals its
# unit:

# sphinx_gallery_thumbnail_number = 1
# record: 90 s
# fold: How the kernels are told apart
from _lib import precisions

from nsightkit import hardware, plots
from nsightkit.guide import case, headline, measure
from nsightkit.workloads import lm

CASES = {
    "2.7 B model, A100": ("a100-cuda-graphs", "eager"),
    "ResNet-50, V100": ("v100-starved-loader", "workers-4"),
    "TimeSformer, H100": ("odd-tokens", "timesformer-h100"),
    "Qwen, H100": ("two-cards", "qwen-h100"),
}
bars = {}
for program, which in CASES.items():
    kernels = case(*which).trace.kernels()
    units = map(precisions.unit, kernels["name"], kernels["category"])
    shares = kernels.groupby(list(units))["share"].sum()
    bars[program] = shares.sort_index(ascending=False)
plots.stacks(bars, title="Kernel time by unit (case file)")

# %%
# Two of the four multiply in fp32 on the CUDA cores: the language model in
# its matmuls, ResNet-50 mostly in its convolutions. The A100's tensor cores
# support TF32 and bf16; those of a V100 support only fp16. A GPU can be full
# of work on the wrong unit, and no utilization shows it.

# %%
# Predict: how much faster is a step?
# -----------------------------------
# Only matmuls, convolutions and attention run on tensor cores. If they are a
# share ``g`` of the time and get ``r`` times faster, Amdahl's law gives the
# speedup of the step: 1 / (g / r + (1 - g)). The rest moves bytes, and bf16
# halves them at most.
#
# Half of a step is matmuls. How much faster can TF32 make it, which multiplies
# eight times faster? And bf16, with sixteen?
#
# .. dropdown:: Answer
#
#    1 / (0.5 / 8 + 0.5) is 1.8. With bf16 the rest may halve, too: 1 / (0.5 /
#    16 + 0.5 / 2) is 3.6. The rest of the step sets the limit.
#
# bf16 and fp16 have the same peak. Which of them is faster, and by how much?
#
# .. dropdown:: Answer
#
#    Neither, per the datasheet. A gradient scaler costs fp16 a pass over the
#    gradients. Any other difference has to be measured, and repeated.

# %%
# Evidence: what could the first program gain?
# --------------------------------------------
# The language model on the A100 has 2.7 billion parameters. All of its GEMMs
# have "sgemm" in their names, single precision:

model = case("a100-cuda-graphs", "eager")
named = model.trace.kernels().query("category == 'GEMM'")
plots.table(named[["name", "count", "share"]], {"share": "{:.1%}"})

# %%
# This is our ``g``. Next to Amdahl's law we replay the trace
# with its matmuls sped up by the ratio of the peaks and everything else
# unchanged. The replay also knows whether launches can keep up.

# fold: How the table is made
card = hardware.find(model.source["gpu"])
g = bars["2.7 B model, A100"]["CUDA cores, fp32"]
bounds = precisions.bounds(model.trace, card, g)
looks = dict.fromkeys(bounds.columns, "{:.1f}x")
plots.table(bounds.reset_index(), looks)

# %%
# The matmul speedup is the ratio of the peaks in the card's datasheet. The
# other columns are speedups of the whole pass. TF32 has no entry in the last
# one, because its tensors stay fp32.

model

# %%
# Change one thing: the precision
# -------------------------------
# One line for TF32, one for bf16:
#
# .. code-block:: diff
#
#    +torch.set_float32_matmul_precision("high")   # TF32
#
#    +with torch.autocast("cuda", torch.bfloat16):
#         logits = model(tokens)
#
# fp16 has a small range, and its training needs a
# ``torch.amp.GradScaler("cuda")``; bf16 does not.
#
# And memory? Autocast keeps weights, gradients and the optimizer's moments in
# fp32, and adds copies of the weights: :doc:`06_what_autocast_casts` counts
# what is left to save.

# %%
# Verdict
# -------
# Only part of a step is matmuls, so the step gains less from bf16 than they
# do. It can still become several times faster, and one line decides whether
# the matmuls use the tensor cores. Look for ``sgemm`` in the names of your
# kernels before anything else.

# %%
# Limits
# ------
# * We did not try the change on this model: the speedups are predicted, and
#   they are bounds. They assume that matmuls keep their share of the peak, but
#   a faster unit is harder to feed. A real bf16 pass also runs casts.
# * One capture of each program. A kernel's unit is read from its name, and
#   libraries are free to change their names.
# * We do not judge numerical quality here. TF32 keeps ten bits of each input's
#   mantissa and bf16 seven; :doc:`05_mixed_precision_accumulation` adds such
#   numbers up.
# * The peaks assume a boost clock that a power limit does not allow for long;
#   bf16 and fp16 matmuls draw the most power.

# %%
# Run it yourself
# ---------------
# On your own trace: which unit the matmuls run on, and how much TF32 could
# gain on an A100:
#
# .. code-block:: console
#
#    $ nsightkit kernels trace.sqlite
#    $ nsightkit whatif trace.sqlite --scale 'sgemm=0.125'
#    $ nsightkit bench --size medium --precision fp32 --precision bf16
#    $ nsightkit peaks
#
# On a GPU, this page's script also measures a training step in fp32, TF32,
# bf16 and fp16. Without a GPU it runs a tiny CPU version:
#
# .. code-block:: console
#
#    $ python examples/09_precision.py

downloads = {"the model in fp32, case file": model.trace}

# %%
# Exercises
# ---------
# 1. Which unit do these run on: ``volta_sgemm_128x64_nn``,
#    ``cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1``,
#    ``sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x256x8_..._ffma_...``?
#
#    .. dropdown:: Answer
#
#       CUDA cores in fp32; tensor cores in bf16; CUDA cores again,
#       because ``ffma`` is the fp32 multiply-add. In the second name
#       ``align1`` means that the kernel cannot assume any alignment beyond one
#       element, so it loads one element at a time:
#       :doc:`15_ceilings_and_rooflines`.
#
# 2. In TimeSformer's trace the matmuls already run in bf16. How much can a
#    faster precision still gain there?
#
#    .. dropdown:: Answer
#
#       Matmuls take :measured:`09_precision.timesformer:.0%` of its kernel
#       time. If they took no time, the kernels would run
#       :measured:`09_precision.without:.1f`\ x faster. The rest is softmax
#       and copies, which fewer passes over memory would shrink.
#
# 3. Does the model gain from cheaper launches, now and with faster matmuls?
#
#    .. dropdown:: Answer
#
#       Run ``nsightkit whatif TRACE free-launches --scale 'sgemm=0.01'``. Now
#       the launches gain nothing. With matmuls that take one percent of their
#       time they gain ten percent more: the faster the kernels, the more
#       launches count.

# %%
# Measured here
# -------------
# .. own-run::
#
# The same training step in fp32, TF32, bf16 and fp16, and bf16 twice: the
# difference between the two bf16 runs is chance.

# 4,096 tokens: 10.2 TFLOP a step. fp32 on CUDA cores: 0.2 s at
# 50 TFLOP/s. TF32: 35 to 45 ms. bf16: 23 to 30 ms, against
# 24 layers x 125 launches x 5 µs = 15 ms for the CPU: the GPU is the slower.
SIZES = dict(batch=8, context=512, d_model=1024, layers=24, d_ff=4096)
SIZES |= dict(heads=16, vocabulary=10_000)
SMALL = dict(batch=4, context=64, d_model=64, layers=2, d_ff=384)
SMALL |= dict(heads=4, vocabulary=512)
RUNS = {
    "fp32": ("before", dict(precision="fp32")),
    "tf32": ("tf32", dict(precision="tf32")),
    "bf16": ("after", dict(precision="bf16")),
    "fp16": ("fp16", dict(precision="fp16")),
    "bf16, again": ("again", dict(precision="bf16", seed=1)),
}

runs = {}
for name, (part, how) in RUNS.items():
    runs[name] = measure(
        f"precision/{part}",
        lm.run,
        gpu=dict(**SIZES, mode="train", **how),
        small=dict(**SMALL, mode="train", **how),
    )
runs["fp32"]

# %%
# The interval of fp16 against bf16 is widened by the difference between the
# two bf16 runs.

# fold: How the table and the figure are made
complete = all(runs.values())
on_gpu = complete and all(run.gpu for run in runs.values())
if complete:
    title = f"A step by kind of work ({runs['fp32'].mode})"
    kind_ns = {n: precisions.by_kind(run) for n, run in runs.items()}
    plots.stacks(kind_ns, title=title)
plots.table(precisions.table(runs)) if on_gpu else None

# %%

# fold: How the answer is put together
said = "A CPU has no tensor cores; times are not compared."
if on_gpu:
    said = precisions.answer(runs)
tf32, bf16 = bounds.loc["tf32"], bounds.loc["bf16"]
fast = bars["TimeSformer, H100"]["tensor cores, bf16 or fp16"]
findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"Because only its matmuls are. A language model on an A100 could be "
        f"{bf16['replay']:.1f}x faster in bf16 than in fp32 (replay). Matmuls "
        f"take {g:.0%} of its kernel time and get "
        f"{bf16['matmul speedup']:.0f}x faster. If the rest also halves its "
        f"bytes, the model could be {bf16[precisions.HALVED]:.1f}x faster; in "
        f"TF32, {tf32['replay']:.1f}x."
    ),
    badge=model.label,
    timesformer=fast,
    without=1 / (1 - fast),
)
