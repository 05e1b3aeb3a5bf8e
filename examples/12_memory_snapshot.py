"""
Why does a training step need more memory each time?
====================================================

A run fits for an hour, and then it does not. Its code does not show which
tensors it keeps. A memory snapshot lists every block, with the line that
allocated it.

.. in-short::
"""

# %%
# The symptom
# -----------
# ``torch.OutOfMemoryError``, some steps after the start. The last commit added
# a hook that watches how confident the model is in its predictions. It keeps
# one number per step, their entropy:
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
# After a step, memory should be back where it was. The entropy is one number.
# Is that all we keep? And when the error comes, will it name this line?
#
# .. dropdown:: Answer
#
#    The number was computed with gradients on, so it carries its graph, and
#    the graph keeps the tensors that derivatives need: for ``exp`` its result,
#    for the product both factors. No backward pass ever starts from this
#    number, so they are never freed. The error names the line that asks for a
#    block that no longer fits. Any allocation can be the first to fail, so the
#    error rarely names the line at fault.

# %%
# Evidence: what does a healthy step look like?
# ---------------------------------------------
# First a step without a leak, so that we know what to look for. It was
# recorded on a real GPU with ``torch.cuda.memory._record_memory_history``:

# sphinx_gallery_thumbnail_number = 1
# record: 60 s
from _lib import figures

from nsightkit import plots
from nsightkit.analysis.memory import snapshot as snapshots
from nsightkit.guide import case

step = case("memory-snapshot", "step")
account = snapshots.summary(step.snapshot)
step

# %%
# Each band is one allocation, as high as it is large, from the event that made
# it to the event that freed it. PyTorch's own viewer draws the same picture.
# The axis counts allocator events, because on a time axis most bands would be
# too thin to see.

over_time = snapshots.timeline(step.snapshot)
figures.memory_timeline(
    snapshots.bands(step.snapshot),
    over_time,
    title="Memory of one training step (case file)",
)

# %%
# We see a hill. Activations pile up in the forward pass, and the backward pass
# frees them. After the step the allocated bytes are the same as before, to the
# byte:

begin, end = over_time["allocated_bytes"].iloc[[0, -1]] / 1e6
print(f"before the step {begin:,.3f} MB, after it {end:,.3f} MB")
print(f"at the peak {account['peak_bytes'] / 1e6:,.3f} MB")

# %%
# By category, the peak is mostly activations. The lines that allocated them
# are more useful, because a line can be changed:

plots.bars(
    snapshots.sites(step.snapshot),
    top=9,
    title="Memory at the peak by who allocated it (case file)",
)

# %%
# None of these lines is a bug, but some are expensive: ``softmax`` and
# ``silu`` are hand-written and keep more tensors than PyTorch's own functions
# would.

# %%
# How much does the hook keep?
# ----------------------------
# We have no recording of the leak yet, so we count it. ``saved_tensors_hooks``
# lists the tensors in its graph, on any machine:

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
print(f"{kept(logits):.0f} bytes per logit with the graph")
print(f"{kept(logits.detach()):.0f} bytes without it")

# %%
# Two fp32 tensors of tokens by vocabulary, every step. For the model that this
# page runs on a GPU, with a limit that we set low on purpose, the peak of each
# step becomes:

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
plots.stacks(
    stacks,
    quantity="memory",
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
# ``entropy.item()`` also works, but it waits for the GPU. Keeping the loss is
# the better known case and the milder one: its backward pass has already freed
# the saved tensors, so only an empty graph and one small block remain.

# %%
# Verdict
# -------
# Compare the ends of steps, not the peaks. A line that holds more after every
# step than after the step before is a leak, or a cache that is filling. The
# snapshot names that line; the error does not. The chapter
# :doc:`/guide/memory` explains the method. The guide's
# :ref:`worked example <example-left>` asks for time what we asked here for
# memory.

# %%
# Limits
# ------
# * The recorded step has no leak, and its GPU is not named. The leak is
#   counted, not recorded: *Measured here* records it on a GPU.
# * A snapshot covers PyTorch's allocator. The CUDA context, NCCL and other
#   libraries use memory outside it.
# * The history is a ring buffer. When it is full it drops its oldest events,
#   and the blocks they describe appear as ``before recording``.
# * Categories are guessed from call stacks, as a reading aid.
# * Three steps can show that memory grows. They cannot show whether the
#   program means to keep it.

# %%
# Run it yourself
# ---------------
# To run this page's script (without a GPU it runs a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/12_memory_snapshot.py
#
# To record a snapshot of your own program and read it:
#
# .. code-block:: python
#
#    from nsightkit.capture import memory
#
#    with memory.recording("snapshot.pickle"):
#        train()
#
# If memory runs out an hour later, the snapshot is written as well, with the
# last two hundred thousand allocator events.
#
# .. code-block:: console
#
#    $ nsightkit memory snapshot.pickle --at oom
#    $ nsightkit memory snapshot.pickle --at start
#
# Blocks in the first list that are missing from the second have piled up.
#
# A pickle is a program: never open one that was sent to you with ``pickle``.
# ``nsightkit`` rejects a pickle with anything but plain data.

downloads = {"The recorded step": step.path}

# %%
# Exercises
# ---------
# The first two are about the recorded step, which you can download above.
#
# 1. ``nsightkit memory the-recorded-step.pickle`` lists ``nn_utils.py:12`` and
#    ``:13`` as logits. What are they, and how much of the peak do they hold?
#
#    .. dropdown:: Answer
#
#       The loss: a hand-written ``log_softmax`` over the whole vocabulary.
#       Together :measured:`12_memory_snapshot.logits:.0f` MB, which is
#       :measured:`12_memory_snapshot.logits_share:.1%` of the peak.
#
# 2. ``silu`` holds two blocks for each of the twelve layers: the sigmoid, and
#    its product with the input. How much lower would the peak be with
#    ``F.silu``?
#
#    .. dropdown:: Answer
#
#       ``F.silu`` recomputes the sigmoid in the backward pass. The product is
#       still kept for the next operation. So one block per layer disappears:
#       :measured:`12_memory_snapshot.silu:,.0f` MB, if the peak stays at the
#       same moment.
#
# 3. A run keeps ``loss`` in a list, without ``detach``. After a thousand steps
#    memory has barely grown. Why, and when would it?
#
#    .. dropdown:: Answer
#
#       The backward pass has freed the saved tensors. Memory would grow if no
#       backward pass ran, as in an evaluation without ``torch.no_grad()``, or
#       with ``retain_graph=True``.

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
# Three steps with the fault. The snapshot starts before the model is built;
# otherwise its blocks would have no owner. A CPU has no memory snapshot, so
# there the script only shows that the steps run.

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
    figures.memory_timeline(
        snapshots.bands(run.snapshot),
        snapshots.timeline(run.snapshot),
        title=f"Memory, {what} ({run.mode})",
    )


if before.snapshot:
    timeline(before, "each number kept with its graph")
before

# %%
# And with only the numbers kept:

if after.snapshot:
    timeline(after, "the bare numbers kept")
after

# %%
# The lines that grew in every step, with the fault and without it. Without it
# there are the entropies, and the losses that the training loop keeps: each
# number costs one smallest block.


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
# error we empty the list and run two ordinary steps:

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
# The error is an event like any other, so we can look at the moment before it:


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
# The answer from the runs:

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
        f"{share['activations']:.0%} of that activations. One number kept "
        f"with its graph can hold {kept(logits):.0f} bytes per logit, every "
        "step (counted)."
    ),
    badge=step.label,
    **answers,
)
