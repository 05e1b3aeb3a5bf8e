"""
How far can the context grow before memory runs out?
====================================================

A longer context is the surest way to run out of memory. What grows with it,
what does not, and can one say beforehand at which length a GPU will be full?

What is measured: one model at contexts that double until nothing fits, one
switch at a time. What came out: :measured:`11_memory_against_context.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# Three kinds of memory. Weights, gradients and the optimizer's states are the
# same at any context. What the forward pass keeps for the backward grows with
# the number of tokens. Scores of attention, where they are written out, grow
# with the square of the context. The prediction runs a step through on paper:
# every operator allocates what it gives, autograd keeps what its derivative
# needs, and the peak is the highest moment. It knows no measurement.

# sphinx_gallery_thumbnail_number = 2
import dataclasses

import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.memory import ledger as memory
from nsightkit.configurations import find

model = find("medium")
h200 = hardware.find("H200")
CARD = max(h200.memory_gb) * 1e9
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
    return [memory.moments(c, **how)["total_bytes"].max() for c in longer]


plots.memory_curves(
    {name: (LENGTHS, peaks(model, LENGTHS, **RUNS[name])) for name in RUNS},
    {},
    limit_bytes=CARD,
    title="Peak of a step, predicted: medium model, H200",
)

# %%
# On logarithmic axes a line that doubles with the context has slope one, a
# line that goes with its square has slope two, and what is the same everywhere
# is flat. Each curve begins flat and ends in its own slope. Where it meets the
# limit, the forecast is:

forecast = pd.DataFrame(
    {
        "run": list(RUNS),
        "longest context on an H200, reckoned": [
            memory.largest_context(model, CARD, **how) for how in RUNS.values()
        ],
    }
)
plots.table(forecast)

# %%
# bf16 saves less than one may hope. Under autocast weights, gradients and
# states stay fp32, and copies of the weights are added. Only what is kept for
# the backward pass shrinks, and not all of it: the residual path and the norms
# stay fp32.

short = {
    name: memory.predict(model, **RUNS[name]).set_index("item")
    for name in ("training, fp32, SDPA", "training, bf16, SDPA")
}
both = pd.DataFrame(
    {f"{name} (MB)": t["predicted_bytes"] / 1e6 for name, t in short.items()}
).dropna()
both = both[both.gt(0).any(axis=1)].astype(float)
both["saved (MB)"] = both.iloc[:, 0] - both.iloc[:, 1]
plots.table(both.reset_index(), dict.fromkeys(both, "{:,.0f}"))

# %%
# Measure
# -------
# Attention written out comes first. A process for each row, in which contexts
# double until one does not fit; longer ones are not tried.

from nsightkit.investigations import measure

before = measure("memory-context", "before")
before

# %%
# Read
# ----
# A peak is what PyTorch's allocator gave out at most in a step. A CPU has no
# such account: there the tensors that operators give are counted, against a
# limit that is made up.


def on_gpu(run):
    """Whether the allocator's account was kept, which a CPU has not."""
    return bool(len(run.values("reserved_bytes")))


def sizes(run):
    """The model that ran, small in a smoke run."""
    names = ["batch", "d_model", "layers", "d_ff", "heads", "vocabulary"]
    cell = {name: run.parameters[name] for name in names}
    return dataclasses.replace(model, **cell)  # its context is replaced


def how(run):
    """How it ran, as the prediction has it."""
    given = {k: run.parameters[k] for k in ("precision", "attention", "mode")}
    return given | {"device": "cuda" if on_gpu(run) else "cpu"}


def cells(run):
    """Measured and predicted, context by context."""
    found = pd.DataFrame({"context": run.values("context").astype(int)})
    found["measured (MB)"] = run.values("peak_bytes") / 1e6
    reckoned = peaks(sizes(run), found["context"], **how(run))
    found["predicted (MB)"] = [size / 1e6 for size in reckoned]
    found["share off"] = found["predicted (MB)"] / found["measured (MB)"] - 1
    return found


plots.table(cells(before))

# %%
# What the peak is made of at each context. Weights and states stay what they
# are; the longer the bar, the smaller is their share of it.

PARTS = [item for item in memory.ITEMS if item != "library workspaces"]


def parts(run, position):
    """Bytes by item at the peak of one cell."""
    names = {item: f"at_peak_{item.replace(' ', '_')}_bytes" for item in PARTS}
    values = {item: run.values(name) for item, name in names.items()}
    return pd.Series(
        {item: v[position] for item, v in values.items() if len(v)}
    )


plots.memory_stacks(
    {
        f"context {int(context)}": parts(before, position)
        for position, context in enumerate(before.values("context"))
    },
    title=f"Attention written out, peak by item ({before.mode})",
)

# %%
# Change one thing
# ----------------
# Attention: PyTorch's fused one, which never has the whole matrix of scores.
#
# .. code-block:: python
#
#    # scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
#    # attended = F.softmax(scores.masked_fill(future, -inf), -1) @ v
#    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)

# %%
# Measure again
# -------------
# With two more rows that each change one thing against it: precision, and
# whether there is a backward pass.

after = measure("memory-context", "after")
runs = {
    "naive": before,
    "SDPA": after,
    "SDPA, fp32": measure("memory-context", "fp32"),
    "SDPA, forward only": measure("memory-context", "forward"),
}
after

# %%
# Predicted as lines, measured as points; a cross is where memory ran out.

import numpy as np

tables = {name: cells(run) for name, run in runs.items()}


def out_of_memory(run):
    """The context that did not fit, None where all did."""
    found = run.values("oom_context")
    return int(found[0]) if len(found) else None


limit = float(
    np.min([run.values("limit_bytes").min() for run in runs.values()])
)
tried = sorted(
    {int(c) for r in runs.values() for c in r.parameters["contexts"]}
)
plots.memory_curves(
    {
        name: (tried, peaks(sizes(r), tried, **how(r)))
        for name, r in runs.items()
    },
    {
        name: (t["context"], 1e6 * t["measured (MB)"])
        for name, t in tables.items()
    },
    failed={n: out_of_memory(r) for n, r in runs.items() if out_of_memory(r)},
    limit_bytes=limit,
    title=f"Peak of a step against context ({after.mode})",
)

# %%
# The forecast next to where it came. The contexts double, so a forecast is
# right if it lies between the last that fitted and the first that did not. On
# a GPU the limit is what the allocator could have had: the card without the
# CUDA context.

PHASES = ("setup", "copy", "forward", "backward", "optimizer", "zero_grad")


def came(name, run):
    """Where the forecast lies against what happened."""
    room = float(run.values("limit_bytes").min())
    longest = memory.largest_context(sizes(run), room, multiple=16, **how(run))
    fits, fails = run.values("context").max(), out_of_memory(run)
    phase = run.values("oom_phase")
    right = longest >= fits and (fails is None or longest < fails)
    return {
        "run": name,
        "forecast": longest,
        "fitted": int(fits),
        "did not": fails or "nothing that was tried",
        "it was in": PHASES[int(phase[0])] if len(phase) else "",
        "forecast holds": bool(right),
    }


outcome = pd.DataFrame([came(name, run) for name, run in runs.items()])
plots.table(outcome)

# %%
# What each switch is worth, at the longest context that all rows could run:

shared = min(t["context"].max() for t in tables.values())
at = {
    name: float(t.set_index("context").loc[shared, "measured (MB)"])
    for name, t in tables.items()
}
worth = pd.DataFrame(
    {
        "run": list(at),
        f"peak at {shared} tokens (MB)": list(at.values()),
        "share of naive": [size / at["naive"] for size in at.values()],
    }
)
plots.table(worth)

# %%
# Verdict
# -------
# Two questions: how far off the prediction is at each point, and whether the
# forecasts hold.

import textwrap

off = pd.concat([t["share off"] for t in tables.values()]).abs()
shorter = [c for c in tables["naive"]["context"] if c < shared]
earlier = max(shorter, default=shared)
growth = {
    name: at[name] / t.set_index("context").loc[earlier, "measured (MB)"]
    for name, t in tables.items()
}
gpus = {(run.provenance["gpu"] or {}).get("name") for run in runs.values()}
modes = {run.mode for run in runs.values()}
comparable = len(gpus) == 1 == len(modes)
where = (
    "in a smoke run on a CPU, with a limit that is made up"
    if after.mode == "smoke"
    else "on a GPU"
)
held = int(outcome["forecast holds"].sum())
verdict = (
    f"{where}, the prediction is off by at most {off.max():.1%} over "
    f"{len(off)} peaks, and {held} of {len(outcome)} forecasts of the longest "
    f"context hold. From {earlier} to {shared} tokens memory grew "
    f"{growth['naive']:.2f}-fold with scores written out and "
    f"{growth['SDPA']:.2f}-fold without. At {shared} tokens bf16 took "
    f"{at['SDPA'] / at['SDPA, fp32']:.0%} of fp32's memory, and forward only "
    f"{at['SDPA, forward only'] / at['SDPA']:.0%} of training's."
)
if not comparable:
    verdict = "the runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "off": float(off.max()),
    "forecasts": held,
    "bf16": at["SDPA"] / at["SDPA, fp32"],
    "forward": at["SDPA, forward only"] / at["SDPA"],
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# A prediction is of tensors. Near the limit a real allocator fails earlier:
# it holds free memory in pieces, none of which is large enough. That moves a
# forecast by a little, and never to the other side of a doubling unless it is
# close to one.
#
# The model is this guide's, operator by operator, in eager mode. A compiler
# fuses operators and keeps other tensors; checkpointing keeps fewer and
# computes them again. Neither is in this prediction.
#
# Causal attention needs only half of the scores. Written out it still has all
# of them: a mask is applied after they are there.
#
# A smoke run counts tensors on a CPU, where softmax stays in 16 bits and
# attention has other kernels; the prediction allows for both. Its limit
# is one that a counter enforces, so what it shows is that the page works.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{name}, {run.mode}, as a timeline": run.trace
    for name, run in runs.items()
}

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/11_memory_against_context.py
#
# For a model of your own:
#
# .. code-block:: python
#
#    from nsightkit.analysis import memory
#    from nsightkit.configurations import Configuration
#
#    mine = Configuration("mine", batch=8, context=2048, d_model=2048,
#                         layers=16, d_ff=5632, heads=16,
#                         vocabulary=32_000, intent="")
#    memory.predict(mine)
#    memory.largest_context(mine, limit_bytes=80e9)
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only memory-context
