"""
How far can the context grow before memory runs out?
====================================================

A longer context is the surest way to run out of memory. What grows with it,
what does not, and at which length will a GPU be full?

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
# head, until the backward pass has used it.

# %%
# Predict: how much does a doubled context cost?
# ----------------------------------------------
# Weights, AdamW's moments, the activations kept for the backward pass, and the
# scores: how does each change when the context doubles, and what does that do
# to the total?
#
# .. dropdown:: Answer
#
#    Weights and moments stay the same. Activations double with the number of
#    tokens. Scores grow fourfold. So the total barely grows while the context
#    is short, and nearly fourfold when it is long: the last doubling costs
#    more than everything before it.

# %%
# Evidence: where does each curve meet the limit?
# -----------------------------------------------
# We walk through a step on paper: every operator allocates its result,
# autograd keeps the tensors that derivatives need, and the peak is the highest
# moment. No measurement is involved.

# sphinx_gallery_thumbnail_number = 1
# record: 120 s
import dataclasses

from _lib import figures

from nsightkit import hardware, plots
from nsightkit.analysis.memory import ledger
from nsightkit.configurations import find

model = find("medium")
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
import pandas as pd

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
plots.memory_stacks(
    stacks, title="What the peak is made of, by context (predicted)"
)

# %%
# In naive attention the scores overtake everything else between the first and
# the last context. Here is the effect of each switch at 4,096 tokens:

# fold: How the table is made
worth = pd.DataFrame({"run": list(RUNS)})
worth["peak (GB)"] = [
    peaks(model, [4096], **how)[0] / 1e9 for how in RUNS.values()
]
worth["share of the first"] = worth["peak (GB)"] / worth["peak (GB)"][0]
plots.table(worth, {"peak (GB)": "{:,.1f}"})

# %%
# bf16 saves less than we might hope, because weights and moments stay fp32
# under autocast: :doc:`13_memory_ledger` lists each item.

# %%
# Verdict
# -------
# Attention decides. With naive attention memory runs out several times
# earlier, and no precision makes up for a square. With fused attention the
# peak grows with the number of tokens, so a context twice as long fits with
# half the batch.

# %%
# Limits
# ------
# * We predict tensors. Near the limit a real allocator fails earlier: it holds
#   free memory in pieces, none of them large enough. The CUDA context takes a
#   part of the card, too.
# * The model is this guide's, in eager mode. A compiler fuses operators and
#   keeps other tensors; checkpointing keeps fewer and recomputes them.
# * Causal attention needs half of the scores. Naive attention still allocates
#   all of them, because the mask is applied afterwards.

# %%
# Run it yourself
# ---------------
# To run this page's script (without a GPU it runs a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/11_memory_against_context.py
#
# For your own model:
#
# .. code-block:: python
#
#    from nsightkit.analysis.memory import ledger
#    from nsightkit.configurations import Configuration
#
#    mine = Configuration("mine", batch=8, context=2048, d_model=2048,
#                         layers=16, d_ff=5632, heads=16,
#                         vocabulary=32_000, intent="")
#    ledger.largest_context(mine, limit_bytes=80e9)
#
# A memory limit also bounds the batch, and with it the time per sample of runs
# such as the worked example (:doc:`02_starved_input_pipeline`). The chapter
# :doc:`/guide/memory` has the whole method.

# %%
# Exercises
# ---------
# 1. The table above is for a batch of four. How long may the context be on an
#    H200 with a batch of one, with naive attention and with SDPA? Guess the
#    two factors first.
#
#    .. dropdown:: Answer
#
#       :measured:`11_memory_against_context.naive_1:,.0f` tokens with naive
#       attention, a factor of
#       :measured:`11_memory_against_context.naive_gain:.1f`, and
#       :measured:`11_memory_against_context.sdpa_1:,.0f` with SDPA, a factor
#       of :measured:`11_memory_against_context.sdpa_gain:.1f`. With a quarter
#       of the batch, a quantity that grows with the square allows twice the
#       context, and a linear one four times.
#
# 2. At which context do the scores of the naive step take as much memory as
#    weights and moments together? The ledger counts six bytes for each score:
#    use 16 heads, 24 layers, a batch of four and 423 million parameters.
#
#    .. dropdown:: Answer
#
#       At about 740. Weights and moments are twelve bytes per parameter. The
#       scores are the product of 6, 4, 16, 24 and the square of the context.
#       So that square is twelve times 423 million, divided by 9,216.
#
# 3. A run needs twice the context with the same batch. Which of the switches
#    on this page would you try first, and what beyond them?
#
#    .. dropdown:: Answer
#
#       Fused attention, if it is not used yet. After that activations are most
#       of the peak, and checkpointing removes them. Smaller moments help
#       little: their share shrinks as the context grows.

# fold: How the answers are worked out
single = dataclasses.replace(model, batch=1)
naive_1 = ledger.largest_context(single, H200, attention="naive")
sdpa_1 = ledger.largest_context(single, H200)
naive_4, sdpa_4, fp32_4, _ = forecast["H200"]
answers = {"naive_1": naive_1, "naive_gain": naive_1 / naive_4}
answers |= {"sdpa_1": sdpa_1, "sdpa_gain": sdpa_1 / sdpa_4}

# %%
# Measured here
# -------------
# .. own-run::
#
# One model at contexts that double until memory runs out: two steps at each
# context, because AdamW's moments appear in the first step. The peak is read
# from PyTorch's allocator in the second step. A CPU has no such counter, so
# there the script only shows that the steps run.

from _lib import memory_steps

from nsightkit.guide import headline, measure

# 423 M parameters: weights and moments take 5.1 GB at any context. The naive
# scores take 6 B x 4 x 16 x 24 x context²: 39 GB at 2,048 and 155 GB at
# 4,096, which ends naive attention on a card of 80 GB or 141 GB. With SDPA
# a token keeps about 1.8 MB: out of memory after 8,192 or 16,384 tokens.
sizes = dict(batch=4, d_model=1024, layers=24, d_ff=4096, heads=16)
sizes |= dict(vocabulary=10_000)
small = dict(batch=2, d_model=64, layers=2, d_ff=192, heads=4)
small |= dict(vocabulary=512)


def grow(part, **how):
    """Measure the model at contexts that double until one does not fit."""
    return measure(
        f"memory-context/{part}",
        memory_steps.contexts,
        gpu=dict(**sizes, **how, context=LENGTHS),
        small=dict(**small, **how, context=[32, 64, 128]),
    )


before = grow("before", mode="train", precision="bf16", attention="naive")
after = grow("after", mode="train", precision="bf16", attention="sdpa")
runs = {
    "naive": before,
    "SDPA": after,
    "SDPA, fp32": grow(
        "fp32", mode="train", precision="fp32", attention="sdpa"
    ),
    "SDPA, forward only": grow(
        "forward", mode="fwd", precision="bf16", attention="sdpa"
    ),
}
on_gpu = all(run.gpu for run in runs.values())
before

# %%
# Predictions as lines, measurements as points; a cross is where memory ran
# out.


# fold: How predicted and measured are compared
def ran(run):
    """The model and the way that ran, as the prediction has them."""
    how = {k: run.parameters[k] for k in ("precision", "attention", "mode")}
    how["capability"] = run.provenance["gpu"]["compute_capability"]
    cell = {name: run.parameters[name] for name in sizes}
    return dataclasses.replace(model, **cell), how


def compared(run):
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
        title=f"Peak of a step against context ({after.mode})",
    )


if on_gpu:
    tables = {name: compared(run) for name, run in runs.items()}
    limit = min(table["limit_bytes"].min() for table in tables.values())
    curves(tables, limit)
after

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
said = "the steps ran; a CPU has no allocator statistics to compare."
if on_gpu:
    errors = pd.concat(table["error"] for table in tables.values())
    held = int(outcome["holds"].sum())
    said = (
        f"{outcome['fitted'][0]:,} tokens fitted with naive attention and "
        f"{outcome['fitted'][1]:,} with fused attention. "
        f"{errors.count()} peaks were predicted within "
        f"{max(errors.abs().max(), 1e-3):.1%}, and {held} of {len(outcome)} "
        f"forecasts of the longest context hold."
    )
findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"with a batch of four, a step of the medium model should fit an H200 "
        f"up to {naive_4:,} tokens with naive attention and up to "
        f"{sdpa_4:,} with fused attention, {sdpa_4 / naive_4:.1f}x longer. "
        f"Fused attention in fp32 would reach {fp32_4:,}."
    ),
    badge="predicted for an H200",
    **answers,
)
