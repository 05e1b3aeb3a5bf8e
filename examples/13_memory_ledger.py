"""
Where did the memory of a training step go?
===========================================

A GPU is full although the weights are a fraction of it. What is the rest, can
every byte of it be named, and what would have to shrink for more to fit?

What is measured: one training step, item by item, in two precisions, with two
kinds of attention, and without a backward pass. What came out:
:measured:`13_memory_ledger.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# A ledger has three columns: what there is, how large it is, and when it is
# alive. The last one decides. Gradients and what the forward pass keeps are
# rarely there in full at the same time, so the peak is a maximum over moments
# and not a sum over items. The prediction runs a step through on paper:

# sphinx_gallery_thumbnail_number = 2
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.memory import ledger as memory
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import find

model = find("medium")
HOW = {"precision": "fp32", "attention": "sdpa", "mode": "train"}
ledger = memory.predict(model, **HOW)
shown = ledger.assign(
    **{
        "at the peak (MB)": ledger["predicted_bytes"] / 1e6,
        "at most (MB)": ledger["largest_bytes"] / 1e6,
    }
)
plots.table(
    shown[["item", "at the peak (MB)", "at most (MB)", "alive", "formula"]],
    dict.fromkeys(("at the peak (MB)", "at most (MB)"), "{:,.0f}"),
)

# %%
# Items that are large at another moment than the peak can grow without any
# effect. The moments of the same step:


def moments(model, **how):
    """Bytes by item at each moment, as a mapping for stacked bars."""
    table = memory.moments(model, **how).set_index("moment")
    return {str(m): row[list(memory.ITEMS)] for m, row in table.iterrows()}


plots.memory_stacks(
    moments(model, **HOW), title="Moments of a step, predicted (fp32)"
)

# %%
# Three lines of a ledger are in no formula. The allocator holds memory that it
# does not give out (slack), some of it in pieces beside blocks in use
# (fragmentation), and the CUDA context with its libraries was never the
# allocator's. Without them a ledger does not close against what the device
# says is used.

# %%
# Measure
# -------
# Two steps are watched. In one the allocator is asked at the end and the peak
# of each phase; in the other every operator is looked at, which tells what a
# tensor is for. A CPU has the second account only.

from nsightkit.investigations import measure

before = measure("ledger", "before")
before

# %%
# Read
# ----
# Predicted and measured, item by item. What the measured peak has beyond the
# items is in a row of its own; with it the column closes to the byte. The row
# of the peak compares the whole.

import dataclasses


def ran(run):
    """The model and the way that ran, as the prediction has them."""
    names = ["batch", "context", "d_model", "layers", "d_ff", "heads"]
    cell = {n: run.parameters[n] for n in [*names, "vocabulary"]}
    given = {name: run.parameters[name] for name in HOW}
    device = "cuda" if len(run.values("reserved_bytes")) else "cpu"
    return dataclasses.replace(model, **cell), given | {"device": device}


def values(run):
    """Each metric of a run once."""
    return run.samples.groupby("metric")["value"].first().to_dict()


def closed(run):
    """Predicted beside measured, with what is left over."""
    configuration, how = ran(run)
    predicted = memory.predict(configuration, **how)
    return memory.reconcile(predicted, memory.measured(values(run)))


def in_mb(table):
    """The ledger for a page."""
    columns = ["predicted", "measured", "difference"]
    sizes = {f"{c} (MB)": table[f"{c}_bytes"] / 1e6 for c in columns}
    found = table[["item"]].assign(**sizes)
    return found.assign(**{"share of peak": table["share_of_peak"]})


MB = dict.fromkeys(
    ["predicted (MB)", "measured (MB)", "difference (MB)"], "{:,.3f}"
)
plots.table(in_mb(closed(before)), MB)

# %%
# The same as bars:


def bars(table):
    """Predicted and measured as stacks; the total is not a part of them."""
    inside = table.set_index("item")
    inside = inside.loc[:"unexplained"]
    return {
        kind: inside[f"{kind}_bytes"] for kind in ("predicted", "measured")
    }


plots.memory_stacks(
    bars(closed(before)), title=f"The peak of an fp32 step ({before.mode})"
)

# %%
# And moment by moment. The largest decides how much memory a step needs:


def by_moment(run):
    """Predicted and measured bytes of each moment."""
    configuration, how = ran(run)
    found = memory.moments(configuration, **how)
    metrics = [f"{m.replace(' ', '_')}_bytes" for m in found["moment"]]
    seen = [run.values(metric)[0] for metric in metrics]
    table = found[["moment"]].assign(
        **{
            "predicted (MB)": found["total_bytes"] / 1e6,
            "measured (MB)": [size / 1e6 for size in seen],
        }
    )
    off = table["predicted (MB)"] / table["measured (MB)"] - 1
    return table.assign(**{"share off": off})


plots.table(by_moment(before), MB)

# %%
# Change one thing
# ----------------
# The precision, which is what is tried first when memory is short:
#
# .. code-block:: python
#
#    with torch.autocast("cuda", torch.bfloat16):
#        logits = model(tokens)
#
# Weights, gradients and states stay fp32 under autocast, so the formulas
# expect nothing of half the size. Copies of the weights come on top.

# %%
# Measure again
# -------------
# With two more rows against bf16: attention with its scores written out, and
# a forward pass alone.

after = measure("ledger", "after")
runs = {
    "fp32": before,
    "bf16": after,
    "bf16, naive attention": measure("ledger", "naive"),
    "bf16, forward only": measure("ledger", "forward"),
}
after

# %%
# What bf16 saved, and what it added:

tables = {name: closed(run).set_index("item") for name, run in runs.items()}
pair = pd.DataFrame(
    {
        f"{name} (MB)": tables[name]["measured_bytes"].astype(float) / 1e6
        for name in ("fp32", "bf16")
    }
)
order = list(dict.fromkeys([*tables["fp32"].index, *tables["bf16"].index]))
pair = pair.loc[[item for item in order if item != "peak"] + ["peak"]]
pair = pair.fillna(0)
pair["saved (MB)"] = pair.iloc[:, 0] - pair.iloc[:, 1]
plots.table(
    pair.rename_axis("item").reset_index(),
    dict.fromkeys(pair.columns, "{:,.3f}"),
)

# %%
# All four beside each other:

plots.memory_stacks(
    {name: bars(closed(run))["measured"] for name, run in runs.items()},
    title=f"The peak of a step, measured ({after.mode})",
)

# %%
# Whether the ledgers close. Unexplained is what operators need within
# themselves and what rounding adds: the allocator sees it, a look at tensors
# does not.


def closing(name, table):
    """One row: the whole, its error, and what is left over."""
    peak = table.loc["peak"]
    return {
        "run": name,
        "predicted (MB)": peak["predicted_bytes"] / 1e6,
        "measured (MB)": peak["measured_bytes"] / 1e6,
        "share off": peak["predicted_bytes"] / peak["measured_bytes"] - 1,
        "share unexplained": table.loc["unexplained", "share_of_peak"],
    }


outcome = pd.DataFrame([closing(n, t) for n, t in tables.items()])
plots.table(outcome.astype(dict.fromkeys(outcome.columns[1:], float)), MB)

# %%
# Divided among ranks
# -------------------
# Arithmetic, not a measurement. With many GPUs the states need not be on each
# of them. Stage 1 of ZeRO divides the optimizer's states, stage 2 gradients
# too, stage 3 weights too; what the forward pass keeps is divided by nothing
# but a smaller batch. Exchanging needs buffers; without ZeRO (stage 0) they
# are copies of all gradients. In bf16 the peak comes before the gradients
# exist: the first column counts them, the peak does not, and stage 2 does not
# lower it.

RANKS = 8
rows = []
for stage in range(4):
    table = memory.predict(model, stage=stage, ranks=RANKS)
    sizes = table.set_index("item")["predicted_bytes"].dropna() / 1e6
    kept = ["weights", "gradients", "optimizer states"]
    state = memory.sharded(envelope(model).params, RANKS)["total_bytes"] / 1e6
    rows.append(
        {
            "stage": stage,
            "weights, gradients, states (MB)": state[stage],
            "buckets (MB)": sizes["communication buckets"],
            "activations, logits (MB)": sizes["activations"] + sizes["logits"],
            "peak of a rank (MB)": sizes.sum(),
            "at": table["moment"][0],
        }
    )
ranks = pd.DataFrame(rows)
plots.table(ranks, dict.fromkeys(ranks.columns[1:5], "{:,.0f}"))

# %%
# Serving instead of training
# ---------------------------
# Arithmetic again. Serving has no gradients and no states. Instead it keeps
# keys and values of every token of every sequence:

kv = memory.kv_bytes_per_token(model.layers, model.heads, model.d_head)
grouped = memory.kv_bytes_per_token(
    model.layers, model.heads // 4, model.d_head
)
print(f"{kv / 1e3:.0f} kB a token, {grouped / 1e3:.0f} kB with a quarter")
print("of the heads for keys and values (grouped-query attention)")

# %%
# How many sequences fit at once, with 16-bit weights of the largest model of
# this guide, in nine tenths of a GPU. A prompt needs its layer's activations
# for a moment, decoding hardly any. 0: the weights fit, but no sequence of
# that many tokens.

LENGTHS = [1024, 4096, 16_384, 65_536]
served = pd.concat(
    memory.serving(find("10B"), hardware.find(gpu), LENGTHS)
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
# Do the ledgers close, and what did bf16 save?

import textwrap

worst = float(outcome["share off"].abs().max())
left_over = float(outcome["share unexplained"].abs().max())
peak_mb = outcome.set_index("run")["measured (MB)"]
saved = 1 - float(peak_mb["bf16"] / peak_mb["fp32"])
fixed = tables["bf16"].reindex(["weights", "gradients", "optimizer states"])
fixed = float(fixed["share_of_peak"].sum())
gpus = {(run.provenance["gpu"] or {}).get("name") for run in runs.values()}
modes = {run.mode for run in runs.values()}
comparable = len(gpus) == 1 == len(modes)
where = "in a smoke run on a CPU" if after.mode == "smoke" else "on a GPU"
verdict = (
    f"{where}, {len(outcome)} predicted peaks are off by at most {worst:.1%}, "
    f"and at most {left_over:.1%} of a measured peak has no name. bf16 "
    f"autocast saves {saved:.0%} of fp32's peak: of its own peak {fixed:.0%} "
    f"are weights, gradients and states, which stay fp32, and "
    f"{tables['bf16']['share_of_peak'].get('autocast cache', 0):.0%} are "
    f"copies of weights that fp32 does not have."
)
if not comparable:
    verdict = "the runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "off": worst,
    "unexplained": left_over,
    "saved": saved,
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# Items are distinguished by what made a tensor: what the forward pass made and
# left behind is an activation, whoever keeps it. Two tensors of one shape may
# be taken for one another, the logits' for instance where the vocabulary is as
# wide as another layer.
#
# The peak of a step is not the peak of a program. A first step may need more,
# as libraries choose their kernels, and so may an evaluation or a checkpoint
# between steps. The CUDA context differs by driver, GPU and the kernels that
# were loaded, and on a shared GPU it includes other programs.
#
# What is divided among ranks is not measured here, and neither is serving:
# there the layouts and buffers of a framework come on top. Eager mode only; a
# compiler makes other tensors.
#
# A smoke run counts a CPU's tensors: it has no allocator, no workspaces and no
# context, and its items need no rounding.

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
#    $ python examples/13_memory_ledger.py
#
# The ledger of a model of your own, and what it needs of a GPU to be served:
#
# .. code-block:: python
#
#    from nsightkit import hardware
#    from nsightkit.analysis import memory
#    from nsightkit.configurations import find
#
#    memory.predict(find("large"), precision="bf16", optimizer="sgd")
#    memory.moments(find("large"), stage=3, ranks=8)
#    memory.serving(find("large"), hardware.find("L4"), [4096])
#
# Measured peaks of any size are close at hand:
#
# .. code-block:: console
#
#    $ nsightkit bench --size medium --mode train --precision bf16
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only ledger
