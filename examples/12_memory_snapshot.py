"""
Why does a training step need more memory each time?
====================================================

A run fits for an hour, and then it does not. Nothing in its code says what it
keeps. A memory snapshot knows every block, and the line that asked for it.

.. in-short::
"""

# %%
# The symptom
# -----------
# ``torch.OutOfMemoryError``, some steps after the start. Shortly before,
# somebody added a hook that watches how sure the model is of its predictions.
# It keeps one number a step, their entropy:
#
# .. code-block:: python
#
#    entropies = []
#
#    def watch(module, _, logits):
#        logarithms = logits.float().log_softmax(-1)
#        entropy = -(logarithms.exp() * logarithms).sum(-1).mean()
#        entropies.append(entropy)

# %%
# Predict: what does one number hold?
# -----------------------------------
# After a step, memory should be what it was before it. The entropy is one
# number. Is that all that is kept? And if the error comes, will it name this
# line?
#
# .. dropdown:: Answer
#
#    The number was computed with gradients on, so it comes with its graph, and
#    autograd keeps in a graph what the derivatives will need: for ``exp`` its
#    result, for the product both factors. No backward pass begins at this
#    number, so nothing frees them. The error names whichever line asks for a
#    block that no longer fits. That comes down to chance; it is rarely the
#    line at fault.

# %%
# Evidence: a healthy step
# ------------------------
# First a step without a leak, to know what to look for. It was recorded on a
# real GPU with ``torch.cuda.memory._record_memory_history``:

# sphinx_gallery_thumbnail_number = 1
# record: 60 s
from nsightkit import plots
from nsightkit.analysis.memory import snapshot as snapshots
from nsightkit.guide import case

step = case("memory-snapshot", "step")
account = snapshots.summary(step.snapshot)
step

# %%
# Each band is one allocation, as high as it is large, from the event that made
# it to the one that freed it. PyTorch's own viewer draws the same. The axis
# counts the allocator's events: in time, most of it would be thin.

over_time = snapshots.timeline(step.snapshot)
plots.memory_timeline(
    snapshots.bands(step.snapshot),
    over_time,
    title="Memory of one training step (case file)",
)

# %%
# A hill. Activations pile up in the forward pass, and the backward pass takes
# them away again. After the step as much is held as before, to the byte:

begin, end = over_time["allocated_bytes"].iloc[[0, -1]] / 1e6
print(f"before the step {begin:,.3f} MB, after it {end:,.3f} MB")
print(f"at the peak {account['peak_bytes'] / 1e6:,.3f} MB")

# %%
# By kind, the peak is mostly activations. By line, which is what one can act
# on:

plots.bars(
    snapshots.sites(step.snapshot),
    top=9,
    title="Memory at the peak by who allocated it (case file)",
)

# %%
# No line here is a bug, but some are expensive: ``softmax`` and ``silu`` are
# written out, and keep more tensors than PyTorch's own functions would.

# %%
# The leak, on paper
# ------------------
# Now the hook. ``saved_tensors_hooks`` shows what its graph keeps, on any
# machine:

import torch
from torch.autograd.graph import saved_tensors_hooks


def kept(logits):
    """Bytes that the graph of the entropy holds for each logit."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        logarithms = logits.float().log_softmax(-1)
        entropy = -(logarithms.exp() * logarithms).sum(-1).mean()
    del entropy
    return sum(storages.values()) / logits.numel()


logits = torch.randn(512, 4096, dtype=torch.bfloat16, requires_grad=True)
print(f"{kept(logits):.0f} bytes a logit, {kept(logits.detach()):.0f} without")

# %%
# Two fp32 tensors of tokens by vocabulary, every step. For the model that this
# page runs on a GPU, with a limit that is set low, the fullest moment of each
# step is then:

sizes = dict(batch=8, context=1024, d_model=1024, layers=4, d_ff=4096)
sizes |= dict(heads=16, vocabulary=32_000)
limit_bytes = 16_000_000_000

# fold: How the figure is drawn
import dataclasses

import pandas as pd

from nsightkit.analysis.memory import ledger
from nsightkit.configurations import find


def held(sizes):
    """Bytes per step that the graph of the entropy holds."""
    tokens = sizes["batch"] * sizes["context"]
    return kept(logits) * tokens * sizes["vocabulary"]


model = dataclasses.replace(find("medium"), **sizes)
ours = ledger.predict(model, precision="bf16").set_index("item")
ours = ours["predicted_bytes"].dropna().astype(float)
fits = int((limit_bytes - ours.sum()) // held(sizes))
stacks = {}
for number in range(1, fits + 2):
    name = f"step {number}" + (", too much" if number > fits else "")
    stacks[name] = ours.copy()
    stacks[name]["kept by mistake"] = number * held(sizes)
plots.memory_stacks(
    stacks,
    title=f"Peak of a step, limit {limit_bytes / 1e9:.0f} GB (predicted)",
)

# %%
# Change one thing: the number without its graph
# ----------------------------------------------
# .. code-block:: diff
#
#    -entropies.append(entropy)
#    +entropies.append(entropy.detach())
#
# ``entropy.item()`` would do, too, but it waits for the GPU. The loss is the
# better known case and the milder one: a backward pass has begun there and
# freed what its graph had saved. Keeping the loss keeps only an empty graph
# and one small block.

# %%
# Verdict
# -------
# Compare the ends of steps, not the peaks. A line that holds more after every
# step than after the one before is a leak, or a cache that fills. The snapshot
# names it; the error does not.

# %%
# Limits
# ------
# * The recorded step has no leak, and its GPU is not named. The leak is worked
#   out on paper until it is recorded on a GPU, under *Measured here*.
# * A snapshot is of PyTorch's allocator. The CUDA context, NCCL and other
#   libraries take memory that is in none of its amounts.
# * The history is a ring. When it is full it forgets its beginning, and with
#   it who made what is still there: ``before recording``.
# * Categories are read from call stacks and are a reading aid. Three steps
#   show growth, not intent.

# %%
# Run it yourself
# ---------------
# To run this page's script (without a GPU it runs a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/12_memory_snapshot.py
#
# A snapshot of a program of your own, and what it says:
#
# .. code-block:: python
#
#    from nsightkit.capture import memory
#
#    with memory.recording("snapshot.pickle"):
#        train()
#
# It may run until memory is out, an hour later: the snapshot is written then
# as well, with the last two hundred thousand events of the allocator.
#
# .. code-block:: console
#
#    $ nsightkit memory snapshot.pickle --at oom
#    $ nsightkit memory snapshot.pickle --at start
#
# What is in the first list and not in the second has piled up.
#
# A pickle is a program: never load one that you were sent with ``pickle``.
# ``nsightkit`` refuses whatever is more than plain data.

downloads = {"The recorded step": step.path}

# %%
# Exercises
# ---------
# The first two are about the recorded step, which can be downloaded above.
#
# 1. ``nsightkit memory the-recorded-step.pickle`` lists ``nn_utils.py:12`` and
#    ``:13`` as logits. What are they, and how much of the peak do they hold?
#
#    .. dropdown:: Answer
#
#       The loss: a ``log_softmax`` that is written out, over the whole
#       vocabulary. Together :measured:`12_memory_snapshot.logits:.0f` MB,
#       which is :measured:`12_memory_snapshot.logits_share:.1%` of the peak.
#
# 2. ``silu`` holds two blocks for each of the twelve layers: the sigmoid, and
#    its product with the input. How much lower would the peak be with
#    ``F.silu``?
#
#    .. dropdown:: Answer
#
#       ``F.silu`` computes the sigmoid again in the backward pass. The product
#       is still there, for the next operation. So one block a layer goes:
#       :measured:`12_memory_snapshot.silu:,.0f` MB, as long as the fullest
#       moment stays where it is.
#
# 3. A run keeps ``loss`` in a list, without ``detach``. After a thousand steps
#    memory has hardly grown. Why, and when would it?
#
#    .. dropdown:: Answer
#
#       The backward pass has freed what the graph had saved. It would grow if
#       no backward pass ran, as in an evaluation without
#       ``torch.no_grad()``, or with ``retain_graph=True``.

# fold: How the answers are worked out
lines = snapshots.sites(step.snapshot).set_index("site")["bytes"] / 1e6
loss_lines = lines.index.str.match(r"nn_utils.py:1[23] ")
answers = {"logits": float(lines[loss_lines].sum())}
answers["logits_share"] = answers["logits"] * 1e6 / account["peak_bytes"]
answers["silu"] = float(lines[lines.index.str.endswith(" silu")].sum()) / 2

# %%
# Measured here
# -------------
# .. own-run::
#
# Three steps with the fault. The snapshot begins before there is a model, or
# it would know its blocks but not whose they are. A CPU's memory has no
# snapshot, so a small run shows only that the steps run.

from _lib import leak

from nsightkit.guide import headline, measure

# The graph keeps 8 B x 8,192 tokens x 32,000 = 2.1 GB every step. Few layers,
# because each adds events to the file and none to the leak. Weights, moments
# and activations take less than the limit, so some steps fit before the error.
how = dict(mode="train", precision="bf16")
small = dict(batch=4, context=64, d_model=128, layers=2, d_ff=384)
small |= dict(heads=4, vocabulary=2048)

before = measure(
    "memory-snapshot/before",
    leak.run,
    gpu=dict(**sizes, **how, keep_graph=True),
    small=dict(**small, **how, keep_graph=True),
    steps=3,
    warmup=0,
    profile="memory",
)
after = measure(
    "memory-snapshot/after",
    leak.run,
    gpu=dict(**sizes, **how, keep_graph=False),
    small=dict(**small, **how, keep_graph=False),
    steps=3,
    warmup=0,
    profile="memory",
)


def timeline(run, what):
    """Draw all allocations over time."""
    plots.memory_timeline(
        snapshots.bands(run.snapshot),
        snapshots.timeline(run.snapshot),
        title=f"Memory, {what} ({run.mode})",
    )


if before.snapshot:
    timeline(before, "each number kept with its graph")
before

# %%
# And with the bare numbers kept:

if after.snapshot:
    timeline(after, "the bare numbers kept")
after

# %%
# What grew in every step, by line, with the fault and without it. Without it
# there are the entropies, and the losses that the training loop keeps: each
# number costs the smallest block there is.


# fold: How the table is made
def grown(run):
    """What grew in every step, by line."""
    ends = snapshots.ranges(run.snapshot, "^step$")["to_event"]
    table = snapshots.growth(run.snapshot, ends.tolist())
    return table[table["least_bytes"] > 0]


if before.snapshot and after.snapshot:
    tables = {"with the graph": grown(before), "without": grown(after)}
    shown = pd.concat(tables, names=["kept"]).reset_index(level=0)
    shown = shown[["kept", "site", "category", "least_bytes"]]
    names = {"least_bytes": "grown each step (bytes)"}
    shown = shown.rename(columns=names)
    plots.table(shown, {"grown each step (bytes)": "{:,.0f}"})

# %%
# The faulty run once more, with less memory, until it runs out. After the
# error the list is emptied, and two ordinary steps follow:

full = measure(
    "memory-snapshot/full",
    leak.run,
    gpu=dict(**sizes, **how, keep_graph=True, limit_bytes=limit_bytes),
    small=dict(**small, **how, keep_graph=True, limit_bytes=limit_bytes),
    steps=1,
    warmup=0,
    profile="memory",
)
if full.snapshot:
    timeline(full, "until it is full")
full

# %%
# The error is an event like any other, and the moment before it can be looked
# at:


# fold: How the table is made
def at_the_error(full, blamed):
    """What failed, and who held the memory then."""
    oom = snapshots.summary(full.snapshot)["oom"]
    holders = snapshots.sites(full.snapshot, "oom").set_index("site")["bytes"]
    at_fault = holders[holders.index.isin(blamed)].sum()
    return {
        "steps that were finished": int(full.median("steps")),
        "the line that failed": oom["site"],
        "it asked for (MB)": f"{oom['requested_bytes'] / 1e6:,.1f}",
        "allocated then (MB)": f"{oom['allocated_bytes'] / 1e6:,.1f}",
        "by the lines that grew (MB)": f"{at_fault / 1e6:,.1f}",
        "limit (MB)": f"{full.parameters['limit_bytes'] / 1e6:,.1f}",
    }


on_gpu = bool(before.snapshot and after.snapshot and full.snapshot)
if on_gpu:
    expected = held(before.parameters)
    much = tables["with the graph"]
    much = much[much["least_bytes"] > 0.01 * expected]
    blamed = list(dict.fromkeys(much["site"]))
    facts = pd.Series(at_the_error(full, blamed)).rename_axis("at the error")
    plots.table(facts.reset_index(name=""))

# %%
# What the runs say:

# fold: How the answer is put together
said = "the steps ran; a CPU's memory has no snapshot."
if on_gpu:
    growth, rest = (int(t["least_bytes"].sum()) for t in tables.values())
    agrees = abs(growth / expected - 1) < 0.01
    failed = facts["the line that failed"]
    said = (
        f"memory grew by {growth / 1e6:,.1f} MB every step, "
        f"{'as' if agrees else 'not as'} predicted ({expected / 1e6:,.1f} "
        f"MB). The snapshot names {' and '.join(blamed)}. Without the graph "
        f"it grew by {rest:,} bytes. The error came from {failed}, which is "
        f"{'' if failed in blamed else 'not '}one of the lines at fault."
    )
share = {kind["category"]: kind["share"] for kind in account["by_category"]}
findings = headline(
    said,
    before,
    after,
    full,
    otherwise=(
        f"a healthy step ends where it began: {begin / 1e3:.1f} GB before and "
        f"after, {account['peak_bytes'] / 1e9:.1f} GB at its peak, "
        f"{share['activations']:.0%} of that activations. One number that is "
        f"kept with its graph can hold {kept(logits):.0f} bytes a logit, "
        f"every step."
    ),
    badge=step.label,
    **answers,
)
