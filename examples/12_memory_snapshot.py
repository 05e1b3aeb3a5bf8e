"""
Why does a training step need more memory each time?
====================================================

A run that fits for an hour and then does not. Nothing in its code says what
it keeps. A memory snapshot knows every block, and the line that asked for it.

What is measured: the allocator's history of a few training steps, from before
the model is built, with one fault, without it, and with it until memory is
full. What came out: :measured:`12_memory_snapshot.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# Between two steps little has to be alive: weights, the optimizer's states,
# the batches, what cuBLAS works in. Activations, logits and gradients come
# and go within a step. So a step's memory is a hill on a plateau, and from the
# second step on both are as high as before. In numbers, for the model that
# this page runs on a GPU:

# sphinx_gallery_thumbnail_number = 1
import dataclasses

import pandas as pd

from nsightkit import plots
from nsightkit.analysis.memory import ledger as memory
from nsightkit.configurations import find
from nsightkit.investigations import parts as investigations

SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads")
SIZES = (*SIZES, "vocabulary")


def sized(parameters):
    """The model with a run's sizes."""
    cell = {name: parameters[name] for name in SIZES}
    return dataclasses.replace(find("medium"), **cell)


planned = investigations.find("memory-snapshot", "before").parameters("live")
model = sized(planned)
moments = memory.moments(model, precision="bf16").set_index("moment")
alive = moments.loc[["before the step", "backward peak"]].T / 1e6
alive = alive[alive.gt(0).any(axis=1)].rename(columns="{} (MB)".format)
alive = alive.rename({"total_bytes": "all"}).rename_axis("item").reset_index()


def table(frame):
    """A table with megabytes to one decimal."""
    mb = [name for name in frame if "(MB)" in name]
    return plots.table(frame, dict.fromkeys(mb, "{:,.1f}"))


table(alive)

# %%
# The run also watches how sure the model is of its predictions. After each
# forward pass a hook keeps one number for a plot, their entropy:
#
# .. code-block:: python
#
#    logarithms = logits.float().log_softmax(-1)
#    entropy = -(logarithms.exp() * logarithms).sum(-1).mean()
#    entropies.append(entropy)
#
# One number a step. Is that all that is kept? It was computed with gradients
# on, so it comes with its graph, and autograd saves in a graph what the
# derivatives will need: for ``exp`` its result, for the product both factors.
# A backward pass would free them, but none begins at this number. Two tensors
# of tokens by vocabulary would stay, in fp32, every step:


def kept(model):
    """Bytes a step that the graph of the entropy holds."""
    return 2 * 4 * model.tokens * model.vocabulary


print(f"{model.tokens:,} tokens by {model.vocabulary:,} words, twice:")
print(f"{kept(model) / 1e6:,.0f} MB a step, for one number")

# %%
# Measure
# -------
# Three steps. Recording begins before there is a model, or the snapshot would
# know its blocks but not whose they are.

from nsightkit.investigations import measure

before = measure("memory-snapshot", "before")
before

# %%
# Read
# ----
# Each band is one allocation, as high as it is large, from the event that
# made it to the one that freed it. It lies on those that were there before.
# PyTorch's own viewer draws the same. The axis counts the allocator's events:
# in time, most of it would be thin.

from nsightkit.analysis.memory import snapshot as snapshots

taken = before.snapshot


def timeline(run, what):
    """All allocations over time."""
    return plots.memory_timeline(
        snapshots.bands(run.snapshot),
        snapshots.timeline(run.snapshot),
        title=f"Memory, {what} ({run.mode})",
    )


timeline(before, "each number kept with its graph")

# %%
# Bands that begin in a step and go on to the right edge are what the step left
# behind. In the first step the optimizer's states are among them, and belong
# there. What is left behind again in every step after it does not.
#
# Between which events the steps lie, the snapshot says itself: PyTorch records
# ``record_function`` ranges beside the events. Prediction and measurement at
# the end of each step:


def how(run):
    """How it ran, as the prediction has it."""
    on_gpu = len(run.values("context_bytes")) > 0
    return {"precision": "bf16", "device": "cuda" if on_gpu else "cpu"}


def ends(run):
    """The last event of each step that was finished."""
    steps = snapshots.ranges(run.snapshot, "^step$")
    return steps["to_event"].tolist()[: int(run.values("steps")[0])]


def levels(run):
    """Allocated bytes after each step, and the highest within it."""
    level = snapshots.timeline(run.snapshot)["allocated_bytes"].to_numpy()
    ours = memory.moments(sized(run.parameters), **how(run))
    ours = ours.set_index("moment")["total_bytes"]
    rows, begin = [], -1
    for number, end in enumerate(ends(run), 1):
        row = {"step": number, "after it (MB)": level[end + 1] / 1e6}
        row["reckoned (MB)"] = ours["before the step"] / 1e6
        row["highest in it (MB)"] = level[begin + 1 : end + 2].max() / 1e6
        row["reckoned, highest (MB)"] = ours.max() / 1e6
        rows.append(row)
        begin = end
    return pd.DataFrame(rows)


table(levels(before))

# %%
# What the peak is made of, by kind. A category is read from the call stack and
# from how long a block lives: what the forward pass made and did not free is
# an activation, what the loss or a softmax over words made are logits. Memory
# that was kept by mistake is among them, for nothing about a block says that
# it is one too many.

account = snapshots.summary(taken)


def in_mb(table, columns):
    """Chosen columns under their names for a page, bytes as megabytes."""
    found = table[list(columns)].rename(columns=columns)
    for name in columns.values():
        if name.endswith("(MB)"):
            found[name] = found[name] / 1e6
    return found


kinds = pd.DataFrame(account["by_category"])
shown = {"category": "category", "bytes": "allocated (MB)", "count": "blocks"}
table(in_mb(kinds, shown | {"share": "share"}))

# %%
# By the line that allocated: the innermost of the program's own frames.

at_peak = snapshots.sites(taken)
plots.memory_bars(
    at_peak, title=f"Memory at the peak by who allocated it ({before.mode})"
)

# %%
# Two lines of the hook stand high, and their bars alone cannot say whether
# that is right. What can is to compare the ends of the steps. A line that
# holds more after every step than after the one before is a leak, or a cache
# that fills; either has a name now.

grown = snapshots.growth(taken, ends(before))
shown = {"site": "site", "category": "category", "count": "more blocks"}
shown |= {"end_bytes": "after the last step (MB)"}
table(in_mb(grown, shown | {"least_bytes": "grown each step (MB)"}))

# %%
# And what the allocator takes from the device beyond what it gives out. It
# keeps what was freed for the next request and cuts blocks out of segments.
# Free memory between blocks in use serves only requests that fit there:
# fragmentation. A row is a segment, what is filled is in use.

pieces = snapshots.segments(taken, "peak")
plots.segment_map(
    pieces,
    snapshots.at(taken, "peak"),
    top=20,
    title=f"Segments at the peak ({before.mode})",
)

# %%
# The amounts of one moment, each the one before plus something: rounding to
# blocks, then free memory in the allocator's hands. What the allocator never
# saw comes on top, and only the device can tell it. The peak has a second
# witness, counted while the program ran.

lost = account["fragmentation"]
peak = snapshots.timeline(taken).set_index("event").loc[account["event"]]
caches = bool(len(before.values("context_bytes")))
amounts = {
    "requested: the bytes that were asked for": peak["requested_bytes"],
    "allocated: the blocks that hold them": peak["allocated_bytes"],
    "reserved: all segments": peak["reserved_bytes"],
    "reserved and free, between blocks in use": lost["inactive_split_bytes"],
    "reserved and free, in whole segments": lost["releasable_bytes"],
    "allocated, counted beside the snapshot": before.median("peak_bytes"),
}
if caches:
    outside = before.median("context_bytes")
    amounts["on the device, not the allocator's"] = outside
else:
    print("a CPU caches nothing: each tensor is a full segment of its own")
amounts = pd.Series(amounts, dtype=float).div(1e6)
table(amounts.rename_axis("at the peak").reset_index(name="size (MB)"))

# %%
# Change one thing
# ----------------
# The number without its graph:
#
# .. code-block:: python
#
#    entropies.append(entropy.detach())
#
# ``entropy.item()`` would do, too, but it waits for the GPU. The loss itself
# is the better known case and the milder one: a backward pass has begun there
# and freed what its graph had saved. Whoever keeps it keeps the bare graph,
# and a block for the number.

# %%
# Measure again
# -------------

after = measure("memory-snapshot", "after")
after

# %%
# The same picture without the fault:

timeline(after, "the bare numbers kept")

# %%
table(levels(after))

# %%
# What still grows, in bytes: the entropies, and the losses that the training
# loop keeps. Each number costs the smallest block there is.

left = snapshots.growth(after.snapshot, ends(after))
shown = {"site": "site", "category": "category", "count": "more blocks"}
table(in_mb(left, shown | {"least_bytes": "grown each step (B)"}))

# %%
# When memory runs out
# --------------------
# The faulty run once more, with less memory, until it runs out. On a
# GPU the limit is ``torch.cuda.set_per_process_memory_fraction``; on a CPU the
# counter of tensors enforces it. The error is an event like any other, and the
# moment before it can be looked at.

full = measure("memory-snapshot", "full")
full

# %%
timeline(full, "until it is full")

# %%
# The error names the line whose request was one too many. Which line that is,
# is chance, and seldom it is the one at fault. The lines that hold the memory
# are in the snapshot.

oom = snapshots.summary(full.snapshot)["oom"]
holders = snapshots.sites(full.snapshot, "oom").set_index("site")["bytes"]
much = grown["least_bytes"] > 0.01 * kept(sized(before.parameters))
lines = list(dict.fromkeys(grown.loc[much, "site"]))
at_fault = int(holders[holders.index.isin(lines)].sum())
facts = {
    "steps that were finished": int(full.values("steps")[0]),
    "the line that failed": oom["site"],
    "it asked for (MB)": f"{oom['requested_bytes'] / 1e6:,.1f}",
    "allocated then (MB)": f"{oom['allocated_bytes'] / 1e6:,.1f}",
    "by the lines that grew (MB)": f"{at_fault / 1e6:,.1f}",
    "cached and free (MB)": f"{oom['cached_free_bytes'] / 1e6:,.1f}",
    "limit (MB)": f"{full.parameters['limit_bytes'] / 1e6:,.1f}",
}
facts = pd.Series(facts).rename_axis("at the error").reset_index(name="")
plots.table(facts)

# %%
# Verdict
# -------
# Whether the growth is what the graph should hold, whether it is gone, and
# whether the error pointed to the fault.

import textwrap


def each_step(table):
    """Bytes by which memory grew in every step."""
    return int(table.loc[table["least_bytes"] > 0, "least_bytes"].sum())


expected = kept(sized(before.parameters))
growth, rest = each_step(grown), each_step(left)
agrees = abs(growth / expected - 1) < 0.01
blamed = oom["site"] in lines
peaks = levels(after)["highest in it (MB)"]
reckoned = levels(after)["reckoned, highest (MB)"]
off = peaks.iloc[-1] / reckoned.iloc[-1] - 1
runs = (before, after, full)
gpus = {(run.provenance["gpu"] or {}).get("name") for run in runs}
comparable = len(gpus) == 1 == len({run.mode for run in runs})
where = "in a smoke run on a CPU" if after.mode == "smoke" else "on a GPU"
verdict = (
    f"{where}, memory grew by {growth / 1e6:,.1f} MB every step, "
    f"{'as' if agrees else 'not as'} the two saved tensors should make it "
    f"({expected / 1e6:,.1f} MB). The snapshot names {' and '.join(lines)}. "
    f"Without the graph it grew by {rest:,} bytes a step, and its peak was "
    f"{off:+z.1%} off the one reckoned. With less memory the fault left room "
    f"for {facts.loc[0, '']} steps, and the error came from {oom['site']}, "
    f"which is {'one' if blamed else 'none'} of the lines at fault."
)
if not comparable:
    verdict = "the runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "growth": growth,
    "expected": expected,
    "rest": rest,
    "off": float(off),
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# A snapshot is of PyTorch's allocator. The CUDA context, kernels that were
# loaded, NCCL and other libraries take memory that is in none of its amounts;
# what the device says is used is always more. A workspace that cuBLAS gets
# from the allocator is in it.
#
# The history is a ring. When it is full it forgets its beginning, and with it
# who made what is still there; those blocks are then called ``before
# recording``, and an earlier peak is not in the file. On pages like this one
# three steps fit easily. In a long run, record the last steps before the end.
#
# An event knows how much was asked for, not how large the block was.
# ``nsightkit`` works that out from the allocator's rules, backwards from the
# state at the end, and says how much is uncertain. Categories are read from
# call stacks and are a reading aid. A reference cycle or a list that somebody
# empties later grows in just the same way as a leak: three steps show growth,
# not intent.
#
# A smoke run counts tensors on a CPU, in the form of a snapshot. It has no
# allocator that caches, so its segments are full and nothing is fragmented;
# what an operator needs within itself is not seen, and neither are stacks of
# C++.

# %%
# The snapshots, as PyTorch writes them, without anybody's folders or names.
# PyTorch's viewer takes them as they are (``torch.cuda._memory_viz``, or its
# page to drop files on), and so does ``nsightkit memory``:

from pathlib import Path

names = {"before": before, "after": after, "full": full}
downloads = {}
for name, run in names.items():
    file = Path(run.snapshot_path)
    downloads[f"{name}, {run.mode}, memory snapshot"] = file
    downloads[f"{name}, {run.mode}, one step as a timeline"] = run.trace

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/12_memory_snapshot.py
#
# A snapshot of a program of your own, and what it says. The function is
# private to PyTorch and its arguments have changed: give them by keyword.
#
# .. code-block:: python
#
#    torch.cuda.memory._record_memory_history(
#        enabled="all", context="all", stacks="all", max_entries=100_000
#    )
#    try:
#        train(steps=3)
#    finally:
#        torch.cuda.memory._dump_snapshot("snapshot.pickle")
#        torch.cuda.memory._record_memory_history(enabled=None)
#
# The same through ``nsightkit``, without folders and names in the file and
# with ranges recorded beside the events:
#
# .. code-block:: python
#
#    from nsightkit.capture import memory
#
#    with memory.recording("snapshot.pickle"):
#        train(steps=3)
#
# .. code-block:: console
#
#    $ nsightkit memory snapshot.pickle --top 10
#    $ nsightkit memory snapshot.pickle --at oom
#
# A pickle is a program: never load one that you were sent with ``pickle``.
# ``nsightkit`` refuses whatever is more than plain data.
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only memory-snapshot
