"""
Will the training step fit in memory?
=====================================

A run ends with ``torch.OutOfMemoryError``, and the weights are a fraction of
the card. What is the rest, how does it grow with the context, and what has to
shrink for more to fit?

.. in-short::
"""

# %%
# The symptom: weights are a small part
# -------------------------------------
# Here is a step of a language model with 129 million parameters, as its author
# recorded it on a GPU: in fp32, 32 sequences of 256 tokens, forward and
# backward. Beside it is a *ledger*, what we predict for the same step from
# seven numbers, the sizes of the model and its batch:

# record: 120 s
# sphinx_gallery_thumbnail_number = 1
# fold: How the prediction and the recording are compared
import dataclasses

import pandas as pd
from _lib import figures, ledger, ledgers, memory_steps

from nsightkit import hardware, plots
from nsightkit.configurations import find
from nsightkit.guide import case, headline, measure

step = case("memory-snapshot", "step")
small = dataclasses.replace(find("small"), batch=32, context=256)
both = ledgers.against_snapshot(small, step.snapshot)
plots.stacks(
    dict(both.items()),
    quantity="memory",
    title="A step at its peak, predicted and recorded (case file)",
)
step

# %%
# Predict: when is a step fullest?
# --------------------------------
# A ledger has three columns: an item, its size, and when it is alive. The last
# one decides, because the peak is a maximum over moments, not a sum over
# everything that ever exists. Weights, gradients, AdamW's two moments, and the
# activations kept for backward: which of them are fully allocated at the
# fullest moment of a step without gradient accumulation?
#
# .. dropdown:: Answer
#
#    All but the gradients. The fullest moment is the start of the backward
#    pass: all activations still exist, and no weight has its gradient yet.
#    From then on gradients are added while activations are freed. With
#    gradient accumulation, or without ``zero_grad``, the old gradients are
#    there from the start and add to the peak. That is so in the recording
#    above.
#
# And when the context doubles: how does each item change, with naive
# attention?
#
# .. dropdown:: Answer
#
#    Weights and moments stay the same. Activations double with the number of
#    tokens. Scores, one for each pair of tokens, grow fourfold. So the total
#    barely grows while the context is short, and nearly fourfold when it is
#    long.

# %%
# Evidence: can a ledger be trusted?
# ----------------------------------
# In gigabytes, item by item:

# fold: How the table is made
shown = (both / 1e9).rename_axis("item").reset_index()
plots.table(shown, dict.fromkeys(both, "{:.2f}"))

# %%
# Weights and gradients agree within
# :measured:`11_memory_ledger.states_off:.0%`. The activations are
# :measured:`11_memory_ledger.missing_gb:.1f` GB larger than predicted, and the
# recording shows why: it has the line of each block. The author wrote softmax
# and SiLU by hand, and each keeps a tensor per layer that PyTorch's own
# function does not: the exponentials, and the sigmoid. Both have
# :measured:`11_memory_ledger.kept_mb:.0f` MB in each of twelve layers. (The
# loss is hand-written, too, and keeps less than we count.) With the two
# tensors the ledger's activations are
# :measured:`11_memory_ledger.still_off:.0%` short. And it has found something
# to change: ``F.softmax`` and ``F.silu`` would save
# :measured:`11_memory_ledger.saved_gb:.1f` GB of
# :measured:`11_memory_ledger.peak_gb:.1f`.

# %%
# Evidence: which context fills a GPU?
# ------------------------------------
# Now we can ask about steps that have not run. A model of 423 million
# parameters, with AdamW and a batch of four, at contexts that double. These
# are predictions for an H200:

RUNS = {
    "training, bf16, naive": {"attention": "naive"},
    "training, bf16, SDPA": {},
    "training, fp32, SDPA": {"precision": "fp32"},
    "forward only, bf16, SDPA": {"mode": "fwd"},
}

# %%

# fold: How the figure is made
model = find("medium")
LENGTHS = [2**power for power in range(7, 16)]
H200 = max(hardware.find("H200").memory_gb) * 1e9
curves = {
    name: (LENGTHS, ledgers.peaks(model, LENGTHS, **how))
    for name, how in RUNS.items()
}
TITLE = "Peak of a step, 423 M parameters on an H200 (predicted)"
figures.memory_curves(curves, {}, H200, title=TITLE)

# %%
# At short contexts weights and moments dominate, so each curve starts flat.
# Beyond, memory grows linearly with fused attention (SDPA) and quadratically
# with naive attention. The longest context that fits, rounded down to a
# multiple of 64:

# fold: How the table is made
forecast = pd.DataFrame({"run": list(RUNS)})
for card in ("RTX 4090", "A100 80 GB SXM", "H200"):
    room = max(hardware.find(card).memory_gb) * 1e9
    longest = [ledger.largest_context(model, room, **h) for h in RUNS.values()]
    forecast[card] = longest
plots.table(forecast)

# %%
# Change one thing: the attention
# -------------------------------
# PyTorch's fused attention never materializes the matrix of scores:
#
# .. code-block:: diff
#
#    -scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
#    -weights = F.softmax(scores.masked_fill(future, -math.inf), dim=-1)
#    -attended = weights @ v
#    +attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
#
# This lengthens the context that fits by a factor of
# :measured:`11_memory_ledger.longer:.1f` on an H200, of
# :measured:`11_memory_ledger.longer_a100:.1f` on the A100, and of
# :measured:`11_memory_ledger.longer_4090:.1f` on the RTX 4090: the more
# memory, the larger the gain. The usual first attempt is bf16, and it saves
# less than we might hope: under autocast, weights and AdamW's moments stay
# fp32, and copies of the weights are added (:doc:`06_what_autocast_casts`). At
# :measured:`11_memory_ledger.worth_context:,.0f` tokens:

# fold: How the table is made
WORTH_CONTEXT = 4096
worth = pd.DataFrame({"run": list(RUNS)})
peaks = [ledgers.peaks(model, [WORTH_CONTEXT], **h)[0] for h in RUNS.values()]
worth["peak (GB)"] = [peak / 1e9 for peak in peaks]
worth["vs naive"] = worth["peak (GB)"] / worth["peak (GB)"][0]
plots.table(worth, {"peak (GB)": "{:,.1f}", "vs naive": "{:.0%}"})

# %%
# How much do several GPUs save?
# ------------------------------
# Each rank can hold a part of the states. Stage 1 of ZeRO divides the
# optimizer's states among the ranks, stage 2 also the gradients, stage 3 also
# the weights. On eight ranks, in bf16 with SDPA, at 512 tokens:

# fold: How the table is made
stages = ledgers.by_stage(model, ranks=8)
plots.table(stages, dict.fromkeys(stages.columns[1:], "{:.2f}"))

# %%
# Stage 1 also shrinks the communication buckets: without ZeRO,
# DistributedDataParallel copies every gradient into them. Stage 2 gains
# nothing here, because the peak comes before the gradients exist. ZeRO leaves
# the activations of each rank alone. To divide those, use a smaller batch per
# rank, tensor, sequence or context parallelism, or pipeline stages (ZeRO-R
# partitions activation checkpoints too).

# %%
# Verdict
# -------
# List every tensor before the run: its size, and whether it exists at the
# peak. Only those count. Activations exist then; gradients and the optimizer's
# temporary buffers usually do not yet. With naive attention they grow
# with the square of the context, which no dtype can offset. With fused
# attention a context twice as long fits with half the batch. If a recorded
# step is larger than its ledger, look for lines that keep more than they need.
# The chapter :doc:`/guide/memory` explains each item.

# %%
# Limits
# ------
# * One recorded step of a program that we did not write. Its snapshot does not
#   name the GPU. The sizes of the model follow from its blocks, and weights
#   and gradients were there before the recording began.
# * All other numbers are arithmetic, checked against PyTorch's operators.
# * We predict tensors. Near the limit a real allocator fails earlier: it holds
#   free memory in pieces, none of them large enough. The CUDA context takes a
#   part of the card, too.
# * The peak of a step is not the peak of a program: a first step may need
#   more, and so may an evaluation or a checkpoint between steps.
# * A compiler fuses operators and keeps other tensors; checkpointing keeps
#   fewer and recomputes them.

# %%
# Run it yourself
# ---------------
# The ledger of your own model, in Python from the ``examples`` folder of your
# clone:
#
# .. code-block:: python
#
#    from _lib import ledger
#
#    from nsightkit.configurations import Configuration
#
#    mine = Configuration("mine", batch=8, context=2048, d_model=2048,
#                         layers=16, d_ff=5632, heads=16,
#                         vocabulary=32_000, intent="")
#    ledger.predict(mine, precision="bf16", optimizer="sgd")
#    ledger.moments(mine, stage=3, ranks=8)
#    ledger.largest_context(mine, limit_bytes=80e9)
#
# A recorded step, and a measured peak:
#
# .. code-block:: console
#
#    $ nsightkit memory snapshot.pickle
#    $ nsightkit bench --size medium --mode train --precision bf16
#
# On a GPU, this page's script also measures the moments of two steps, and the
# longest context that fits. Without a GPU it runs a tiny CPU version:
#
# .. code-block:: console
#
#    $ python examples/11_memory_ledger.py

downloads = {"the recorded step": step.path}

# %%
# Exercises
# ---------
# 1. A bf16 step of the larger model has a batch of four, at 512 tokens. How
#    much does a batch of two save, and a batch of one on top of that?
#
#    .. dropdown:: Answer
#
#       From :measured:`11_memory_ledger.batch_4:.2f` GB to
#       :measured:`11_memory_ledger.batch_2:.2f` GB, and then nothing:
#       :measured:`11_memory_ledger.batch_1:.2f` GB. With so few activations
#       the fullest moment is the optimizer's step, which does not depend on
#       the batch.
#
# 2. Which of these lowers the peak of that step: fused AdamW, or SGD without
#    momentum?
#
#    .. dropdown:: Answer
#
#       Fused AdamW saves a temporary buffer in the optimizer's step, which is
#       not the fullest moment, so the peak stays the same. SGD holds no states
#       at any moment, and the peak falls to
#       :measured:`11_memory_ledger.sgd:.2f` GB.
#
# 3. Serving keeps keys and values instead of gradients. A model has 32 layers
#    and 8 heads of width 128 for keys and values. How many bytes does a token
#    need in bf16? And how many sequences of 4,096 tokens of this guide's
#    largest model fit on an H100 with bf16 weights?
#
#    .. dropdown:: Answer
#
#       Two (keys and values) by 32 layers, 8 heads, 128 channels and two
#       bytes: 131,072. ``ledger.serving`` counts
#       :measured:`11_memory_ledger.served:.0f` sequences.

# fold: How the answers are worked out
GPU = hardware.find("H100 SXM5")
fits = ledger.serving(find("10B"), GPU, [4096])["largest_batch"].iloc[0]
answers = {"served": int(fits)}
for batch in (4, 2, 1):
    other = dataclasses.replace(model, batch=batch)
    answers[f"batch_{batch}"] = ledgers.peak_gb(other)
answers["sgd"] = ledgers.peak_gb(model, optimizer="sgd")

# %%
# Measured here
# -------------
# .. own-run::
#
# The ledger of two steps beside the bytes that the allocator counts at the
# same moments. A CPU has no such counter; there we only count weights,
# gradients and AdamW's moments.

# 423 M parameters, whose weights and moments take 12 B each, 5.1 GB. Every run
# of these fits a GPU of 16 GB.
sizes = dict(batch=4, context=512, d_model=1024, layers=24, d_ff=4096)
sizes |= dict(heads=16, vocabulary=10_000)
little = dict(batch=4, context=64, d_model=128, layers=2, d_ff=384)
little |= dict(heads=4, vocabulary=512)


def watched(part, **how):
    """Measure the moments of one step."""
    return measure(
        f"ledger/{part}",
        memory_steps.run,
        gpu=dict(**sizes, **how),
        small=dict(**little, **how),
        steps=3,
        warmup=1,
        profile=None,
    )


before = watched("before", precision="fp32", attention="sdpa", mode="train")
after = watched("after", precision="bf16", attention="sdpa", mode="train")
steps = {"fp32": before, "bf16": after}
before

# %%
# The fp32 step, moment by moment; then the fullest moment of each step, with
# the allocator's extra memory and the CUDA context, which no formula predicts:

counted = bool(before.gpu and after.gpu)
plots.table(ledgers.compared(before, megabytes=True)) if counted else None

# %%
plots.table(ledgers.fullest(steps)) if counted else None

# %%
# One model at contexts that double until memory runs out: two steps at each,
# because AdamW's moments appear in the first step.

# 423 M parameters: weights and moments take 5.1 GB at any context. The naive
# scores take 6 B x 4 x 16 x 24 x context²: 39 GB at 2,048 and 155 GB at
# 4,096, which ends naive attention on a card of 80 GB or 141 GB. With SDPA
# a token keeps about 1.8 MB: out of memory after 8,192 or 16,384 tokens.
grown = {name: size for name, size in sizes.items() if name != "context"}
tiny = dict(batch=2, d_model=64, layers=2, d_ff=192, heads=4)
tiny |= dict(vocabulary=512)


def grow(part, **how):
    """Measure the model at contexts that double until one does not fit."""
    return measure(
        f"memory-context/{part}",
        memory_steps.contexts,
        gpu=dict(**grown, **how, context=LENGTHS),
        small=dict(**tiny, **how, context=[32, 64, 128]),
    )


naive = grow("before", mode="train", precision="bf16", attention="naive")
fused = grow("after", mode="train", precision="bf16", attention="sdpa")
runs = {"naive": naive, "SDPA": fused}
on_gpu = all(run.gpu for run in runs.values())
naive

# %%
# A forecast is right if it is between the last context that fitted and the
# first that did not:

outcome = ledgers.forecasts(runs) if on_gpu else pd.DataFrame()
if on_gpu:
    title = f"Peak of a step against context ({fused.mode})"
    figures.memory_curves(*ledgers.curves(runs), title=title)
plots.table(outcome) if on_gpu else None

# %%

# fold: How the answer is put together
said = ""
if before and after:
    said = ledgers.answer(steps, runs if on_gpu else {})
predicted, recorded = both["predicted"], both["recorded"]
missing = recorded["activations"] - predicted["activations"]
kept = ledgers.kept_by_hand(small)
naive_4, sdpa_4 = forecast["H200"][:2]
findings = headline(
    said,
    before,
    after,
    naive,
    fused,
    otherwise=(
        f"add up its tensors before you run it. For a recorded step they add "
        f"up to {predicted.sum() / 1e9:.1f} GB, and two hand-written "
        f"functions kept {2 * kept / 1e9:.1f} GB more: it peaked at "
        f"{recorded.sum() / 1e9:.1f} GB. By the same arithmetic, a larger "
        f"model on an H200 fits {naive_4:,} tokens with naive attention and "
        f"{sdpa_4:,} with fused attention (predicted)."
    ),
    badge=f"{step.label}; predicted for an H200",
    states_off=recorded.iloc[0] / predicted.iloc[0] - 1,
    missing_gb=missing / 1e9,
    kept_mb=kept / small.layers / 1e6,
    still_off=(missing - 2 * kept) / recorded["activations"],
    saved_gb=2 * kept / 1e9,
    peak_gb=recorded.sum() / 1e9,
    longer=sdpa_4 / naive_4,
    longer_a100=forecast["A100 80 GB SXM"][1] / forecast["A100 80 GB SXM"][0],
    longer_4090=forecast["RTX 4090"][1] / forecast["RTX 4090"][0],
    worth_context=WORTH_CONTEXT,
    **answers,
)
