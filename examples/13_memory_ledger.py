"""
Where did the memory of a training step go?
===========================================

A GPU is full, and the weights are a fraction of it. What is the rest, and
what would have to shrink for more to fit?

.. in-short::
"""

# %%
# The symptom
# -----------
# We train a language model on an H200, in fp32, with AdamW and PyTorch's fused
# attention. Its weights are a sixth of the memory that a step needs:

# sphinx_gallery_thumbnail_number = 1
# record: 30 s
from nsightkit import plots
from nsightkit.analysis.memory import ledger
from nsightkit.configurations import find

model = find("medium")
HOW = {"precision": "fp32", "attention": "sdpa", "mode": "train"}
print(f"{model.intent}, {model.layers} layers")
print(f"{model.tokens:,} tokens per step")

# %%
# Predict: when is it fullest?
# ----------------------------
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


plots.memory_stacks(
    moments(model, **HOW), title="Moments of an fp32 step (predicted)"
)

# %%
# An item that is large only at another moment than the peak can grow for free,
# and shrinking it gains nothing.

# %%
# Change one thing: the precision
# -------------------------------
# bf16 is the first thing most of us try when memory is short:
#
# .. code-block:: diff
#
#    -logits = model(tokens)
#    +with torch.autocast("cuda", torch.bfloat16):
#    +    logits = model(tokens)
#
# The figure also has two other changes to the bf16 step, one at a time: naive
# attention, and a forward pass alone.

CHANGES = {
    "fp32": HOW,
    "bf16": {**HOW, "precision": "bf16"},
    "bf16, naive attention": {"precision": "bf16", "attention": "naive"},
    "bf16, forward only": {"precision": "bf16", "mode": "fwd"},
}
peaks = {
    name: ledger.predict(model, **how).set_index("item")["predicted_bytes"]
    for name, how in CHANGES.items()
}
plots.memory_stacks(
    {name: items.dropna() for name, items in peaks.items()},
    title="The peak of a step on an H200 (predicted)",
)

# %%
# Under autocast weights and AdamW's moments stay fp32, and copies of the
# weights are added. Only the activations kept for backward shrink, apart
# from the residual path and the norms, which stay fp32
# (:doc:`06_what_autocast_casts`).

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
import pandas as pd

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
from nsightkit import hardware

LENGTHS = [1024, 4096, 16_384, 65_536]
served = pd.concat(
    ledger.serving(find("10B"), hardware.find(gpu), LENGTHS)
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
# Most of the memory is not weights. AdamW holds twice their size, and the
# activations are larger than both. To make room, shrink the items that are
# alive at the fullest moment: activations, by a smaller batch, checkpointing
# or bf16. The chapter :doc:`/guide/memory` checks such a ledger step by
# step. The guide's worked example, :doc:`02_starved_input_pipeline`, does for
# time what we did here for memory.

# %%
# Limits
# ------
# * This is arithmetic for an H200, checked against PyTorch's operators; a
#   cuBLAS workspace is smaller on other cards. *Measured here* replaces it
#   once it has run on a GPU.
# * One micro-batch per step. Gradient accumulation adds the gradients to the
#   peak.
# * The peak of a step is not the peak of a program. A first step may need
#   more, and so may an evaluation or a checkpoint between steps.
# * Eager mode only; a compiler makes other tensors. For ranks and serving, add
#   the layouts and buffers of the framework.

# %%
# Run it yourself
# ---------------
# To run this page's script (without a GPU it runs a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/13_memory_ledger.py
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
# 1. The bf16 step above has a batch of four. How much does a batch of two
#    save, and a batch of one on top of that? Use ``ledger.moments``.
#
#    .. dropdown:: Answer
#
#       From :measured:`13_memory_ledger.batch_4:.2f` GB to
#       :measured:`13_memory_ledger.batch_2:.2f` GB, and then nothing:
#       :measured:`13_memory_ledger.batch_1:.2f` GB. With so few activations
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
#       :measured:`13_memory_ledger.sgd:.2f` GB.
#
# 3. A model has 32 layers, 32 heads of width 128 for queries and 8 for keys
#    and values. How many bytes of cache does a token need in bf16?
#
#    .. dropdown:: Answer
#
#       Two (keys and values) times 32 layers, 8 heads, 128 channels and 2:
#       131,072. ``ledger.kv_bytes_per_token(32, 8, 128)`` agrees.

# fold: How the answers are worked out
import dataclasses


def peak_gb(batch=model.batch, **how):
    """Predicted peak of a bf16 step."""
    other = dataclasses.replace(model, batch=batch)
    return ledger.moments(other, **how)["total_bytes"].max() / 1e9


answers = {f"batch_{batch}": peak_gb(batch) for batch in (4, 2, 1)}
answers["sgd"] = peak_gb(optimizer="sgd")

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
naive = watched("naive", precision="bf16", attention="naive", mode="train")
forward = watched("forward", precision="bf16", attention="sdpa", mode="fwd")
runs = {
    "fp32": before,
    "bf16": after,
    "bf16, naive attention": naive,
    "bf16, forward only": forward,
}
on_gpu = all(run.gpu for run in runs.values())
before

# %%
# Predicted and measured, moment by moment:


# fold: How predicted and measured are compared
def ran(run):
    """The model and the way that ran, as the prediction has them."""
    cell = {name: run.parameters[name] for name in sizes}
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


if on_gpu:
    tables = {name: compared(run) for name, run in runs.items()}
    in_mb(tables["fp32"])

# %%
# The fullest moment of each step, and the two amounts that follow from no
# formula: the allocator's extra memory and the CUDA context:


# fold: How the table is made
def beyond(name):
    """One row: the peak of a step, and what lies outside of it."""
    run, table = runs[name], tables[name]
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


if on_gpu:
    whole = pd.DataFrame(beyond(name) for name in runs)
    plots.table(whole, dict.fromkeys(whole.columns[2:], "{:,.1f}"))
after

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
if all(runs.values()):
    right = sum(as_predicted(run) for run in runs.values())
    said = (
        f"weights, gradients and AdamW's moments are as large as predicted "
        f"in {right} of {len(runs)} runs."
    )
if on_gpu:
    off = pd.concat(tables.values())
    error = (off["predicted"] / off["measured"] - 1).abs().max()
    peaks_mb = whole.set_index("run")["measured (MB)"]
    saved = 1 - peaks_mb["bf16"] / peaks_mb["fp32"]
    said = (
        f"{len(off)} moments were predicted within {max(error, 1e-3):.1%}. "
        f"bf16 autocast saves {saved:.0%} of fp32's peak."
    )
peak = {name: float(items.sum()) / 1e9 for name, items in peaks.items()}
fp32 = peaks["fp32"].astype(float) / 1e9
findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"a step needs {peak['fp32']:.1f} GB in fp32, of which "
        f"{fp32['weights']:.1f} GB are weights, "
        f"{fp32['optimizer states']:.1f} GB AdamW's moments and "
        f"{fp32['activations']:.1f} GB activations. Without gradient "
        "accumulation, gradients add nothing to the peak. bf16 autocast saves "
        f"{1 - peak['bf16'] / peak['fp32']:.0%}."
    ),
    badge="predicted for an H200",
    **answers,
)
