"""
Why does a training step need more memory each time?
====================================================

The first steps of a run fit, and a later one does not. Its code does not show
which tensors it keeps. A memory snapshot lists every block, with the line that
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

# sphinx_gallery_thumbnail_number = 3
# record: 60 s
# fold: Imports
import weakref

import pandas as pd
import torch
import torch.nn.functional as F
from _lib import figures, leak, leaked
from torch.autograd.graph import saved_tensors_hooks

from nsightkit import plots
from nsightkit.analysis.memory import snapshot as snapshots
from nsightkit.guide import case, headline, measure

# %%


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
    figures.bands(step.snapshot),
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
# The recorded step has no leak, so we run one: four training steps of a single
# layer, once with the hook's number as it is and once without its graph.
# ``saved_tensors_hooks`` counts the tensors that graphs still hold after each
# step. Their bytes are the same on every machine (*exact*):


# fold: How the bytes are counted
class Saved:
    """A tensor that a graph holds."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # else it holds the graph that holds it
        saved.add(self)


def run_steps(keep_graph):
    """Train for four steps; give the megabytes that graphs hold after each."""
    layer = torch.nn.Linear(64, 4096)
    entropies, held = [], []
    for _ in range(4):
        with saved_tensors_hooks(Saved, lambda kept: kept.tensor):
            logits = layer(torch.randn(512, 64))
            logarithms = logits.float().log_softmax(-1)
            entropy = -(logarithms.exp() * logarithms).sum(-1).mean()
            loss = F.cross_entropy(logits, torch.randint(4096, (512,)))
        entropies.append(entropy if keep_graph else entropy.detach())
        loss.backward()
        del logarithms, entropy
        blocks = {kept.tensor.data_ptr(): kept.tensor.nbytes for kept in saved}
        held.append(sum(blocks.values()) / 1e6)
    return held


saved = weakref.WeakSet()
steps = pd.DataFrame({"step": range(1, 5)})
steps["kept with its graph (MB)"] = run_steps(keep_graph=True)
steps["kept without (MB)"] = run_steps(keep_graph=False)
megabytes = dict.fromkeys(steps.columns[1:], "{:.1f}")
plots.table(steps, megabytes)

# %%
# Two fp32 tensors of tokens by vocabulary stay, in every step. At the size of
# a real model, with a limit that we set low on purpose, the fourth step no
# longer fits:

# fold: How the figure is drawn
sizes = dict(batch=8, context=1024, d_model=1024, layers=4, d_ff=4096)
sizes |= dict(heads=16, vocabulary=32_000)
limit_bytes = 16_000_000_000
chart = plots.stacks(
    leaked.until_full(sizes, limit_bytes),
    quantity="memory",
    title=f"Peak of a step, limit {limit_bytes / 1e9:.0f} GB (predicted)",
)
chart.axes[0].axvline(limit_bytes / 1e9, color="gray", linestyle="--")
chart

# %%
# Change one thing: detach the number
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
# :doc:`/guide/memory` explains the method.

# %%
# Limits
# ------
# * The recorded step has no leak, and its GPU is not named. The leak is
#   counted, not recorded in a snapshot.
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
# On a GPU, this page's script also records a snapshot of the leak, up to the
# error. Without a GPU it runs a tiny CPU version:
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
# If memory runs out hours later, the snapshot is written as well, with the
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
# Snapshots of three steps with the fault and without it.

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

ran = {
    "each number kept with its graph": before,
    "the bare numbers kept": after,
}
for what, run in ran.items():
    if run.snapshot:
        leaked.timeline(run, what)
before

# %%
# The faulty run once more, with less memory, until it runs out:

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
    leaked.timeline(full, "until it is full")
full

# %%
# The lines that grew in every step, and the moment before the error. Without
# the fault each kept number costs one smallest block.

on_gpu = bool(before.snapshot and after.snapshot and full.snapshot)
plots.table(leaked.growth(before, after)) if on_gpu else None

# %%
plots.table(leaked.at_the_error(before, full)) if on_gpu else None

# %%

# fold: How the answer is put together
said = "the steps ran; a CPU's memory has no snapshot."
if on_gpu:
    said = leaked.answer(before, after, full)
share = {kind["category"]: kind["share"] for kind in account["by_category"]}
findings = headline(
    said,
    before,
    after,
    full,
    otherwise=(
        f"something from each step is kept. One number that is kept without "
        f"detach() keeps its graph: {leaked.BYTES_PER_LOGIT} bytes per logit "
        f"more after every step (exact). A snapshot shows the line that does "
        f"it. A healthy step ends where it began: {begin / 1e3:.1f} GB before "
        f"and after, "
        f"{account['peak_bytes'] / 1e9:.1f} GB at its peak."
    ),
    badge=step.label,
    **answers,
)
