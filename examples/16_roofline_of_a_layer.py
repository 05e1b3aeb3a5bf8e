"""
How fast could a layer be?
==========================

A transformer layer takes some time. Before anybody tries to make it faster:
how fast could it be at all, and which of its operations are far from that?

What is measured: a layer's forward pass, operator by operator, against what
the card's arithmetic and memory allow, first with its attention written out.
What came out: :measured:`16_roofline_of_a_layer.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it. No hardware counters.
"""

# %%
# Expectation
# -----------
# An operation needs arithmetic, which a unit does at some rate, and has to
# move its operands through the memory at least once. The longer of the two
# times is its bound: the roofline. Both follow from shapes alone. For a layer
# on one card, by its datasheet:

# sphinx_gallery_thumbnail_number = 1
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import sol
from nsightkit.investigations import parts as investigations

SHAPE = ("batch", "context", "hidden", "heads", "d_ff")


def operations(sizes):
    """What one layer of these sizes must do, and nothing more."""
    return sol.layer_costs(*(sizes[name] for name in SHAPE), "bf16")


h200 = sol.datasheet(hardware.find("H200"))
sizes = investigations.find("roofline", "before").gpu
table = sol.bounds(operations(sizes), h200)
table["share"] = table["bound_ns"] / table["bound_ns"].sum()
UNITS = {"flops": "GFLOP", "bytes": "MB", "bound_ns": "bound (µs)"}
units = table.drop(columns="source")
units[list(UNITS)] /= [1e9, 1e6, 1e3]
plots.table(
    units.rename(columns=UNITS), dict.fromkeys(UNITS.values(), "{:,.2f}")
)

# %%
# So nearly all of this layer's least time is matrix products. What is bound by
# memory is small if it runs alone, and nothing if it is fused into a product.

gemms = table.loc[table["bound"] == "compute", "bound_ns"].sum()
print(f"all of them, one by one: {table['bound_ns'].sum() / 1e3:,.1f} µs")
print(f"only what is bound by arithmetic: {gemms / 1e3:,.1f} µs")

# %%
# Attention that writes its scores out is another matter. Its products do twice
# the arithmetic, for they do not leave the masked half out, and the scores
# travel through memory again and again: written by the product, read and
# written by the scale, the mask, the softmax and the cast. Each such trip, in
# 16 and in 32 bits:

rows, heads = sizes["context"], sizes["heads"]
for precision in ("bf16", "fp32"):
    once = sol.elementwise_cost("softmax", heads * rows, rows, precision)
    trip = h200.memory_ns(once) / 1e3
    print(f"reading and writing the scores in {precision}: {trip:,.0f} µs")

# %%
# Published figures can be checked in the same way. These times for the same
# layer on another card have been in print; no card could have done it:

h100 = sol.datasheet(hardware.find("H100 SXM"))
printed = {
    "QKV": 85e3,
    "output projection": 32e3,
    "gate and up": 135e3,
    "down": 68e3,
}
claimed = [op for op in operations(sizes) if op.name in printed]
checked = sol.judge(claimed, [printed[op.name] for op in claimed], h100)
checked["printed (µs)"] = checked["time_ns"] / 1e3
checked["bound (µs)"] = [h100.bound_ns(op) / 1e3 for op in claimed]
columns = ["name", "printed (µs)", "bound (µs)", "note"]
plots.table(checked[columns], {"bound (µs)": "{:,.0f}"})

# %%
# Measure
# -------
# The layer with everything written out. The profile keeps the shapes of what
# operators are given, which is all that the bounds need.

from nsightkit.investigations import measure

before = measure("roofline", "before")
before

# %%
# The ceilings of this machine, from the same products and transfers as on the
# page about them. Without a GPU these are the CPU's, and so is the roof.

ran = {name: measure("ceilings", name) for name in ("before", "fp32", "copy")}
found = [sol.ceiling(r.parameters, r.median("step_ns")) for r in ran.values()]
ceilings = sol.ceilings(found, "measured here")
rates = {"unit": "unit", "tflops": "TFLOP/s", "gb_per_s": "GB/s", "what": "of"}
plots.table(pd.DataFrame(found)[list(rates)].rename(columns=rates))

# %%
# Read
# ----
# Each operator with its shape, all of its calls together. On a GPU its time is
# that of the kernels it launched; on a CPU its own.

from nsightkit.errors import UsageError


def datasheet(run):
    """Rates of the card that a run was measured on, None if not listed."""
    try:
        name = (run.provenance["gpu"] or {})["name"]
        return sol.datasheet(hardware.find(name))
    except (KeyError, UsageError):
        return None


def judged(run):
    """Operators against the roofs."""
    if datasheet(run):
        card = run.provenance["gpu"]["name"]
        return sol.summary(run.trace, card, measured=ceilings)
    held = sol.summary(run.trace, machine=ceilings)
    # Without a datasheet the ceilings are the only roof.
    held["sol_measured"] = held.pop("sol_datasheet")
    return held


def shown(table):
    """The columns that a page has room for."""
    columns = ["name", "count", "time_ns", "intensity", "bound"]
    short = table[columns].head(12).copy()
    if "sol_datasheet" in table:
        short["share of datasheet"] = table["sol_datasheet"]
    short["share of ceiling"] = table["sol_measured"]
    return short


was = judged(before)
plots.table(shown(was))

# %%
# The same as a picture. A point on a roof cannot be made faster as it is; one
# far below is waiting for something, or moves more than it has to. Percentages
# are shares of the datasheet's roof, where there is one.

roofs = [roof for roof in (datasheet(before), ceilings) if roof]
LOWER = ["fp32"]  # what the ordinary cores reach
written_out = f"A layer, written out ({before.mode})"
plots.roofline(was, roofs, "bf16", lower=LOWER, title=written_out)

# %%
# Change one thing
# ----------------
# Attention in one operator, and products with a common input in one:
#
# .. code-block:: python
#
#    q, k, v = (x @ w_qkv).split(sizes, dim=-1)
#    F.scaled_dot_product_attention(q, k, v, is_causal=True)
#    gate, up = (x @ w_gate_up).chunk(2, dim=-1)

# %%
# Measure again
# -------------

after = measure("roofline", "after")
after

# %%
# Operators again:

now = judged(after)
plots.table(shown(now))

# %%
# And under the same roofs:

fused = f"A layer, fused ({after.mode})"
plots.roofline(now, roofs, "bf16", lower=LOWER, title=fused)

# %%
# The whole layer against the sum of its bounds, each operation on its own. A
# layer that fuses more than this list may come out above one. The last column
# is for such a one: it counts only the arithmetic of products and attention.

layers = before.parameters["layers"]
ideal = operations(before.parameters)
rows = []
for roof in roofs:
    bound = sum(roof.bound_ns(op) for op in ideal) * layers
    least = sum(roof.compute_ns(op) for op in ideal if op.unit == "bf16")
    for run, name in ((before, "written out"), (after, "fused")):
        row = {"roof": roof.source, "layer": name}
        row |= {"step_ns": run.median("step_ns"), "bound_ns": bound}
        row["share reached"] = bound / run.median("step_ns")
        row["share, all fused"] = least * layers / run.median("step_ns")
        rows.append(row)
whole = pd.DataFrame(rows)
plots.table(whole)

# %%
# Verdict
# -------
# Computed from the runs. The operator that could save most is the one with the
# most time above its bound:

import textwrap


def largest(table):
    """Operator with the most time to gain, and its share of that."""
    gain = (1 - table["sol_measured"].clip(upper=1)) * table["time_ns"]
    if not gain.sum() > 0:
        return "no operator", 0.0
    return table.loc[gain.idxmax(), "name"], gain.max() / gain.sum()


gpus = [(run.provenance["gpu"] or {}).get("name") for run in (before, after)]
comparable = before.mode == after.mode and gpus[0] == gpus[1]
where = "in a smoke run on a CPU" if after.mode == "smoke" else "on a GPU"
mine = whole[whole["roof"] == ceilings.source].set_index("layer")
reached = mine["share reached"]
left, share = largest(now)
verdict = (
    f"{where}, the layer reaches {reached['written out']:.0%} of its bound by "
    f"measured ceilings with attention written out, {reached['fused']:.0%} "
    f"fused; {share:.0%} of what is still to gain lies in {left}."
)
if not comparable:
    verdict = "the two runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "written": float(reached["written out"]),
    "fused": float(reached["fused"]),
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# A bound is of compulsory bytes. Tensors that fit the level-2 cache may be
# there still, and their operator be quicker than the memory; the table of a
# GPU's trace marks that apart from what is impossible.
#
# Kernels that a compiler fused belong to no operator with a known cost and do
# not appear here; whole layers do. Times are of profiled steps, those of whole
# layers are not.
#
# Causal attention is counted as half of the square in its fused form, and as
# the whole where its scores are written out, since that is what it computes.
# On a CPU the roof is made of one small product and one copy, and operators on
# small tensors that lie in its caches may pass it.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{run.part}, {run.mode}, as a timeline": run.trace
    for run in (before, after)
}

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/16_roofline_of_a_layer.py
#
# Any trace with shapes, against the card that it names:
#
# .. code-block:: python
#
#    with torch.profiler.profile(record_shapes=True) as profiling:
#        step()
#    profiling.export_chrome_trace("trace.json.gz")
#
# .. code-block:: console
#
#    $ nsightkit sol trace.json.gz
#    $ nsightkit peaks --measure --format json > ceilings.json
#    $ nsightkit sol trace.json.gz --ceilings ceilings.json
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only roofline --only ceilings
