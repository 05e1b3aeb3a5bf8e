"""
Will the training step fit in memory?
=====================================

A GPU is full, and the weights are a fraction of it. What is the rest, how does
it grow with the context, and what would have to shrink for more to fit?

.. in-short::
"""

# %%
# The symptom
# -----------
# ``torch.OutOfMemoryError`` after a doubled context. The model computes
# attention as in the textbook:
#
# .. code-block:: python
#
#    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
#    weights = F.softmax(scores.masked_fill(future, -math.inf), dim=-1)
#    attended = weights @ v
#
# ``scores`` holds one number for each pair of tokens, in every layer and every
# head, until the backward pass has used it. On this page we work out by
# arithmetic what such a step needs on an H200, with AdamW, in fp32 first:

# sphinx_gallery_thumbnail_number = 2
# record: 120 s
import dataclasses

import pandas as pd
from _lib import figures

from nsightkit import hardware, plots
from nsightkit.analysis.memory import ledger
from nsightkit.configurations import find

model = find("medium")
HOW = {"precision": "fp32", "attention": "sdpa", "mode": "train"}
print(f"{model.intent}, {model.layers} layers")
print(f"{model.tokens:,} tokens per step")

# %%
# Predict: when is it fullest, and what does the context cost?
# ------------------------------------------------------------
# A memory ledger has three columns: an item, its size, and when it is alive.
# The last one decides. The peak is a maximum over moments, not a sum over
# everything that ever exists.
#
# Weights, gradients, AdamW's two moments, and the activations kept for
# backward: which of them are fully allocated at the fullest moment of a step
# without gradient accumulation?
#
# .. dropdown:: Answer
#
#    All but the gradients. The fullest moment is the start of the backward
#    pass: all activations still exist, and no weight has its gradient yet.
#    From then on gradients are added while activations are freed. With
#    gradient accumulation this changes: from the second micro-batch on, the
#    gradients of the earlier ones are there from the start and add to the
#    peak.
#
# And when the context doubles: how does each item change, with naive
# attention?
#
# .. dropdown:: Answer
#
#    Weights and moments stay the same. Activations double with the number of
#    tokens. Scores grow fourfold. So the total barely grows while the context
#    is short, and nearly fourfold when it is long: the last doubling costs
#    more than everything before it.

# %%
# Evidence: which items fill the peak?
# ------------------------------------
# We walk through a step on paper. Every operator allocates its result, and
# autograd keeps the tensors that derivatives need:

# fold: How the table is made
table = ledger.predict(model, **HOW)
sizes = {
    "at the peak (GB)": table["predicted_bytes"] / 1e9,
    "at most (GB)": table["largest_bytes"] / 1e9,
}
GB = dict.fromkeys(sizes, "{:,.2f}")
shown = table.assign(**sizes)[["item", *sizes, "alive"]]
plots.table(shown[table["largest_bytes"].fillna(1) > 0], GB)

# %%
# The last three lines follow from no formula, so they have no size here. The
# allocator holds memory that it has not handed out (slack), some of it in
# pieces between blocks in use (fragmentation). The CUDA context is outside the
# allocator. The same step, moment by moment:


def moments(model, **how):
    """Bytes by item at each moment, as a mapping for stacked bars."""
    table = ledger.moments(model, **how).set_index("moment")
    return {str(m): row[list(ledger.ITEMS)] for m, row in table.iterrows()}


plots.stacks(
    moments(model, **HOW),
    quantity="memory",
    title="Moments of an fp32 step (predicted)",
)

# %%
# An item that is large only at another moment than the peak can grow for free,
# and shrinking it gains nothing.

# %%
# Evidence: which context fills a GPU?
# ------------------------------------
# The same arithmetic at contexts that double, for four ways to run the step:

RUNS = {
    "training, bf16, naive": {"attention": "naive"},
    "training, bf16, SDPA": {},
    "training, fp32, SDPA": {"precision": "fp32"},
    "forward only, bf16, SDPA": {"mode": "fwd"},
}
LENGTHS = [2**power for power in range(7, 16)]


def peaks(model, lengths, **how):
    """Predicted peak at each context."""
    longer = [dataclasses.replace(model, context=c) for c in lengths]
    return [ledger.moments(c, **how)["total_bytes"].max() for c in longer]


H200 = max(hardware.find("H200").memory_gb) * 1e9
print(f"memory of an H200: {H200 / 1e9:.0f} GB")
figures.memory_curves(
    {name: (LENGTHS, peaks(model, LENGTHS, **RUNS[name])) for name in RUNS},
    {},
    H200,
    title="Peak of a step, medium model on an H200 (predicted)",
)

# %%
# On logarithmic axes a line that doubles with the context has slope one, and a
# line that grows with its square has slope two. Each curve starts flat and
# ends in its own slope. It meets the limit at the longest context that fits.
# The table has that context, rounded down to a multiple of 64, for three
# cards:

# fold: How the table is made
CARDS = ("RTX 4090", "A100 80 GB SXM", "H200")
forecast = pd.DataFrame({"run": list(RUNS)})
for card in CARDS:
    room = max(hardware.find(card).memory_gb) * 1e9
    forecast[card] = [
        ledger.largest_context(model, room, **how) for how in RUNS.values()
    ]
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
# The items of the peak, with both, at three contexts:

# fold: How the figure is drawn
stacks = {}
for context in (512, 1024, 2048):
    for name, how in list(RUNS.items())[:2]:
        longer = dataclasses.replace(model, context=context)
        table = ledger.predict(longer, **how).set_index("item")
        items = table["predicted_bytes"].dropna().astype(float)
        stacks[f"{context:,}, {name.rpartition(', ')[2]}"] = items
plots.stacks(
    stacks,
    quantity="memory",
    title="What the peak is made of, by context (predicted)",
)

# %%
# In naive attention the scores overtake everything else between the first and
# the last context. The usual first attempt is bf16, and it saves less than we
# might hope. Under autocast weights and AdamW's moments stay fp32, and copies
# of the weights are added. Only the activations kept for backward shrink,
# apart from the residual path and the norms, which stay fp32
# (:doc:`06_what_autocast_casts`). Each switch at
# :measured:`11_memory_ledger.worth_context:,.0f` tokens:

# fold: How the table is made
WORTH_CONTEXT = 4096
worth = pd.DataFrame({"run": list(RUNS)})
worth["peak (GB)"] = [
    peaks(model, [WORTH_CONTEXT], **how)[0] / 1e9 for how in RUNS.values()
]
worth["share of the first"] = worth["peak (GB)"] / worth["peak (GB)"][0]
plots.table(worth, {"peak (GB)": "{:,.1f}"})

# %%
# How much do several GPUs save?
# ------------------------------
# With many GPUs, each one can hold a part of the states. Stage 1 of ZeRO
# divides the optimizer's states among the ranks, stage 2 also the gradients,
# stage 3 also the weights. ZeRO leaves each rank's activations alone. To
# divide those, use a smaller batch per rank, tensor, sequence or context
# parallelism, or pipeline stages (ZeRO-R partitions activation checkpoints
# too). On eight ranks, in bf16:

# fold: How the table is made
rows = []
for stage in range(4):
    rank = ledger.predict(model, stage=stage, ranks=8)
    rank_gb = rank.set_index("item")["predicted_bytes"].dropna() / 1e9
    row = {"stage": stage, "weights (GB)": rank_gb["weights"]}
    row["AdamW's moments (GB)"] = rank_gb["optimizer states"]
    row["exchange buffers (GB)"] = rank_gb["communication buckets"]
    row["the rest (GB)"] = rank_gb.sum() - sum(list(row.values())[1:])
    row["peak of a rank (GB)"] = rank_gb.sum()
    rows.append(row | {"at": rank["moment"][0]})
ranks = pd.DataFrame(rows)
plots.table(ranks, dict.fromkeys(ranks.columns[1:-1], "{:,.2f}"))

# %%
# Gradients do not appear in the table: in a step without accumulation the peak
# comes before they exist, so stage 2 gains nothing here.

# %%
# And serving instead of training?
# --------------------------------
# Serving has no gradients and no optimizer. Instead it keeps the keys and
# values of every token of every sequence. How many sequences of a given length
# fit at once, for the largest model of this guide with bf16 weights, in nine
# tenths of a GPU?

# fold: How the table is made
SERVED = [1024, 4096, 16_384, 65_536]
served = pd.concat(
    ledger.serving(find("10B"), hardware.find(gpu), SERVED)
    for gpu in ("RTX 4090", "A100 80 GB SXM", "H100 SXM5", "H200 SXM")
)
fits = served.pivot(index="gpu", columns="context", values="largest_batch")
plots.table(
    fits.rename(columns="{:,} tokens".format).rename_axis("GPU").reset_index(),
    missing="weights do not fit",
)

# %%
# Verdict
# -------
# Attention decides how far the context can grow. With naive attention memory
# runs out several times earlier, and no precision makes up for a square. With
# fused attention the peak grows with the number of tokens, so a context twice
# as long fits with half the batch.
#
# Most of the rest is not weights either. AdamW holds twice their size, and the
# activations are larger than both. To make room, shrink the items that are
# alive at the fullest moment: activations, by a smaller batch, checkpointing
# or bf16. The chapter :doc:`/guide/memory` checks such a ledger step by step.
# The guide's :ref:`worked example <example-left>` asks for time what we asked
# here for memory.

# %%
# Limits
# ------
# * This is arithmetic for an H200, checked against PyTorch's operators; a
#   cuBLAS workspace is smaller on other cards. *Measured here* replaces it
#   once it has run on a GPU.
# * We predict tensors. Near the limit a real allocator fails earlier: it holds
#   free memory in pieces, none of them large enough. The CUDA context takes a
#   part of the card, too.
# * One micro-batch per step. Gradient accumulation adds the gradients to the
#   peak. The peak of a step is not the peak of a program: a first step may
#   need more, and so may an evaluation or a checkpoint between steps.
# * The model is this guide's, in eager mode. A compiler fuses operators and
#   keeps other tensors; checkpointing keeps fewer and recomputes them. For
#   ranks and serving, add the layouts and buffers of the framework.
# * Causal attention needs half of the scores. Naive attention still allocates
#   all of them, because the mask is applied afterwards.

# %%
# Run it yourself
# ---------------
# To run this page's script (without a GPU it runs a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/11_memory_ledger.py
#
# The ledger of your own model, and the memory it needs to be served:
#
# .. code-block:: python
#
#    from nsightkit import hardware
#    from nsightkit.analysis.memory import ledger
#    from nsightkit.configurations import Configuration
#
#    mine = Configuration("mine", batch=8, context=2048, d_model=2048,
#                         layers=16, d_ff=5632, heads=16,
#                         vocabulary=32_000, intent="")
#    ledger.predict(mine, precision="bf16", optimizer="sgd")
#    ledger.moments(mine, stage=3, ranks=8)
#    ledger.largest_context(mine, limit_bytes=80e9)
#    ledger.serving(mine, hardware.find("L4"), [4096])
#
# The same as a table on the terminal, and a measured peak:
#
# .. code-block:: console
#
#    $ nsightkit envelope --config medium
#    $ nsightkit bench --size medium --mode train --precision bf16

# %%
# Exercises
# ---------
# 1. A bf16 step of this model has a batch of four. How much does a batch of
#    two save, and a batch of one on top of that? Use ``ledger.moments``.
#
#    .. dropdown:: Answer
#
#       From :measured:`11_memory_ledger.batch_4:.2f` GB to
#       :measured:`11_memory_ledger.batch_2:.2f` GB, and then nothing:
#       :measured:`11_memory_ledger.batch_1:.2f` GB. With so few activations
#       the fullest moment is the optimizer's step, which does not depend on
#       the batch.
#
# 2. Which of these lowers the peak of the bf16 step: fused AdamW, or SGD
#    without momentum?
#
#    .. dropdown:: Answer
#
#       Fused AdamW saves a temporary buffer in the optimizer's step, which is
#       not the fullest moment, so the peak stays the same. SGD holds no states
#       at any moment, and the peak falls to
#       :measured:`11_memory_ledger.sgd:.2f` GB.
#
# 3. A model has 32 layers, 32 heads of width 128 for queries and 8 for keys
#    and values. How many bytes of cache does a token need in bf16?
#
#    .. dropdown:: Answer
#
#       Two (keys and values) times 32 layers, 8 heads, 128 channels and 2:
#       131,072. ``ledger.kv_bytes_per_token(32, 8, 128)`` agrees.
#
# 4. The table of contexts above is for a batch of four. How long may the
#    context be on an H200 with a batch of one, with naive attention and with
#    SDPA? Guess the two factors first.
#
#    .. dropdown:: Answer
#
#       :measured:`11_memory_ledger.naive_1:,.0f` tokens with naive
#       attention, a factor of
#       :measured:`11_memory_ledger.naive_gain:.1f`, and
#       :measured:`11_memory_ledger.sdpa_1:,.0f` with SDPA, a factor
#       of :measured:`11_memory_ledger.sdpa_gain:.1f`. With a quarter
#       of the batch, a quantity that grows with the square allows twice the
#       context, and a linear one four times.
#
# 5. At which context do the scores of the naive step take as much memory as
#    weights and moments together? The ledger counts six bytes for each score:
#    use 16 heads, 24 layers, a batch of four and 423 million parameters.
#
#    .. dropdown:: Answer
#
#       At about 740. Weights and moments are twelve bytes per parameter. The
#       scores are the product of 6, 4, 16, 24 and the square of the context.
#       So that square is twelve times 423 million, divided by 9,216.


# fold: How the answers are worked out
def peak_gb(batch=model.batch, **how):
    """Predicted peak of a bf16 step."""
    other = dataclasses.replace(model, batch=batch)
    return ledger.moments(other, **how)["total_bytes"].max() / 1e9


answers = {f"batch_{batch}": peak_gb(batch) for batch in (4, 2, 1)}
answers["sgd"] = peak_gb(optimizer="sgd")
single = dataclasses.replace(model, batch=1)
naive_1 = ledger.largest_context(single, H200, attention="naive")
sdpa_1 = ledger.largest_context(single, H200)
naive_4, sdpa_4, fp32_4, _ = forecast["H200"]
answers |= {"naive_1": naive_1, "naive_gain": naive_1 / naive_4}
answers |= {"sdpa_1": sdpa_1, "sdpa_gain": sdpa_1 / sdpa_4}
answers["worth_context"] = WORTH_CONTEXT

# %%
# Measured here
# -------------
# .. own-run::
#
# The allocator does not know the purpose of a tensor, but it counts bytes. So
# we measure the peak and the end of each phase and compare them with the same
# moments of the ledger. A CPU has no such counter; there we only count
# weights, gradients and AdamW's moments. The fp32 step:

from _lib import memory_steps

from nsightkit.guide import headline, measure

# The model of the predictions above: 423 M parameters, whose weights and
# moments take 12 B each, 5.1 GB. Every run fits a GPU of 16 GB.
sizes = dict(batch=4, context=512, d_model=1024, layers=24, d_ff=4096)
sizes |= dict(heads=16, vocabulary=10_000)
small = dict(batch=4, context=64, d_model=128, layers=2, d_ff=384)
small |= dict(heads=4, vocabulary=512)


def watched(part, **how):
    """Measure the moments of one step."""
    return measure(
        f"ledger/{part}",
        memory_steps.run,
        gpu=dict(**sizes, **how),
        small=dict(**small, **how),
        steps=3,
        warmup=1,
        profile=None,
    )


before = watched("before", precision="fp32", attention="sdpa", mode="train")
after = watched("after", precision="bf16", attention="sdpa", mode="train")
steps = {"fp32": before, "bf16": after}
before

# %%
# Predicted and measured, moment by moment:


# fold: How predicted and measured are compared
def ran(run):
    """The model and the way that ran, as the prediction has them."""
    cell = {name: run.parameters[name] for name in sizes}
    if isinstance(cell["context"], list):
        del cell["context"]  # a row has its own
    how = {name: run.parameters[name] for name in HOW}
    if run.gpu:
        how["capability"] = run.provenance["gpu"]["compute_capability"]
    else:
        how["device"] = "cpu"
    return dataclasses.replace(model, **cell), how


def compared(run):
    """One row per moment of the step, in bytes."""
    sized, how = ran(run)
    table = ledger.moments(sized, **how)[["moment", "total_bytes"]]
    table = table.rename(columns={"total_bytes": "predicted"})
    metrics = table["moment"].str.replace(" ", "_") + "_bytes"
    table["measured"] = [run.median(metric) for metric in metrics]
    table["difference"] = table["measured"] - table["predicted"]
    return table


def in_mb(table):
    """The same in megabytes, as it is shown."""
    columns = ["predicted", "measured", "difference"]
    shown = {f"{name} (MB)": table[name] / 1e6 for name in columns}
    plots.table(
        table[["moment"]].assign(**shown), dict.fromkeys(shown, "{:,.3f}")
    )


if before.gpu and after.gpu:
    ledgers = {name: compared(run) for name, run in steps.items()}
    in_mb(ledgers["fp32"])

# %%
# The fullest moment of each step, and the two amounts that follow from no
# formula: the allocator's extra memory and the CUDA context:


# fold: How the table is made
def beyond(name):
    """One row: the peak of a step, and what lies outside of it."""
    run, table = steps[name], ledgers[name]
    peak = table.loc[table["measured"].idxmax()]
    return {
        "run": name,
        "fullest": peak["moment"],
        "predicted (MB)": peak["predicted"] / 1e6,
        "measured (MB)": peak["measured"] / 1e6,
        "held beyond (MB)": (run.median("reserved_bytes") - peak["measured"])
        / 1e6,
        "CUDA context (MB)": run.median("context_bytes") / 1e6,
    }


if before.gpu and after.gpu:
    whole = pd.DataFrame(beyond(name) for name in steps)
    plots.table(whole, dict.fromkeys(whole.columns[2:], "{:,.1f}"))
after

# %%
# Then one model at contexts that double until memory runs out: two steps at
# each context, because AdamW's moments appear in the first step. The peak is
# read from PyTorch's allocator in the second step. A CPU has no such counter,
# so there the script only shows that the steps run.

# 423 M parameters: weights and moments take 5.1 GB at any context. The naive
# scores take 6 B x 4 x 16 x 24 x context²: 39 GB at 2,048 and 155 GB at
# 4,096, which ends naive attention on a card of 80 GB or 141 GB. With SDPA
# a token keeps about 1.8 MB: out of memory after 8,192 or 16,384 tokens.
grown = {name: size for name, size in sizes.items() if name != "context"}
small = dict(batch=2, d_model=64, layers=2, d_ff=192, heads=4)
small |= dict(vocabulary=512)


def grow(part, **how):
    """Measure the model at contexts that double until one does not fit."""
    return measure(
        f"memory-context/{part}",
        memory_steps.contexts,
        gpu=dict(**grown, **how, context=LENGTHS),
        small=dict(**small, **how, context=[32, 64, 128]),
    )


naive = grow("before", mode="train", precision="bf16", attention="naive")
fused = grow("after", mode="train", precision="bf16", attention="sdpa")
runs = {"naive": naive, "SDPA": fused}
on_gpu = all(run.gpu for run in runs.values())
naive

# %%
# Predictions as lines, measurements as points; a cross is where memory ran
# out.


# fold: How predicted and measured are compared
def at_contexts(run):
    """One row per context: measured, and predicted."""
    sized, how = ran(run)
    table = run.rows.copy()
    table["predicted_bytes"] = peaks(sized, table["context"], **how)
    table["error"] = table["predicted_bytes"] / table["peak_bytes"] - 1
    return table


def curves(tables, limit):
    """Draw predicted lines, measured points and failures."""
    lines, points, failed = {}, {}, {}
    for name, table in tables.items():
        lines[name] = (table["context"], table["predicted_bytes"])
        fitted = table[table["status"] == "ok"]
        points[name] = (fitted["context"], fitted["peak_bytes"])
        if len(fitted) < len(table):
            failed[name] = table["context"].iloc[-1]
    return figures.memory_curves(
        lines,
        points,
        limit,
        failed,
        title=f"Peak of a step against context ({fused.mode})",
    )


if on_gpu:
    tables = {name: at_contexts(run) for name, run in runs.items()}
    limit = min(table["limit_bytes"].min() for table in tables.values())
    curves(tables, limit)
fused

# %%
# The forecast next to the measurement. Contexts double, so a forecast is right
# if it is between the last context that fitted and the first that did not:


# fold: How the table is made
def forecast_of(name, run):
    """One row: the forecast, the last that fitted, the first that did not."""
    sized, how = ran(run)
    table = tables[name]
    room = table["limit_bytes"].min()
    longest = ledger.largest_context(sized, room, **how)
    fitted = table.loc[table["status"] == "ok", "context"].max()
    failed = table.loc[table["status"] == "oom", "context"].min()
    row = {"run": name, "forecast": longest, "fitted": int(fitted)}
    row["did not fit"] = "none" if pd.isna(failed) else int(failed)
    row["holds"] = longest >= fitted and not longest >= failed
    return row


if on_gpu:
    outcome = pd.DataFrame(forecast_of(n, run) for n, run in runs.items())
    plots.table(outcome)

# %%
# The answer from the runs:


# fold: How the answer is put together
def as_predicted(run):
    """Whether weights, gradients and moments have the predicted sizes."""
    sized, how = ran(run)
    table = ledger.predict(sized, **how).set_index("item")["largest_bytes"]
    for item in ("weights", "gradients", "optimizer states"):
        counted = run.median(f"{item.replace(' ', '_')}_bytes")
        # A GPU's blocks are multiples of 512 bytes.
        if abs(table[item] - counted) > 1e-3 * counted:
            return False
    return True


said = ""
if before and after:
    right = sum(as_predicted(run) for run in steps.values())
    said = (
        f"weights, gradients and AdamW's moments are as large as predicted "
        f"in {right} of {len(steps)} runs."
    )
if before.gpu and after.gpu:
    off = pd.concat(ledgers.values())
    error = (off["predicted"] / off["measured"] - 1).abs().max()
    peaks_mb = whole.set_index("run")["measured (MB)"]
    saved = 1 - peaks_mb["bf16"] / peaks_mb["fp32"]
    said = (
        f"{len(off)} moments were predicted within {max(error, 1e-3):.1%}. "
        f"bf16 autocast saves {saved:.0%} of fp32's peak."
    )
if on_gpu:
    errors = pd.concat(table["error"] for table in tables.values())
    held = int(outcome["holds"].sum())
    said += (
        f" {outcome['fitted'][0]:,} tokens fitted with naive attention and "
        f"{outcome['fitted'][1]:,} with fused attention; {held} of "
        f"{len(outcome)} forecasts hold."
    )
items_gb = (
    ledger.predict(model, **HOW).set_index("item")["predicted_bytes"] / 1e9
)
bf16_gb = peak_gb()
findings = headline(
    said,
    before,
    after,
    naive,
    fused,
    otherwise=(
        f"a step of the medium model needs {items_gb.sum():.1f} GB in fp32, "
        f"{items_gb['weights']:.1f} GB of it weights; bf16 autocast saves "
        f"{1 - bf16_gb / items_gb.sum():.0%}. An H200 should hold contexts up "
        f"to {naive_4:,} tokens with naive attention and up to {sdpa_4:,} "
        f"with fused attention, {sdpa_4 / naive_4:.1f}x longer."
    ),
    badge="predicted for an H200",
    **answers,
)
