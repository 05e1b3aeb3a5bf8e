"""
How fast could each operation of a layer be?
============================================

A layer takes some time. Before we try to make it faster: what is the limit
for each of its operations, and which are far from it?

.. in-short::
"""

# %%
# Predict: what bounds do the shapes give?
# ----------------------------------------
# An operation needs arithmetic, which a unit does at some rate, and it has to
# move its operands through the memory at least once. The longer of the two
# times is its bound: the roofline. Both follow from shapes, before anything
# runs.

# sphinx_gallery_thumbnail_number = 1
# record: 60 s
import pandas as pd
from _lib import climb, published

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import sol
from nsightkit.guide import case

sizes = dict(batch=1, context=2048, hidden=4096, heads=32, d_ff=11_008)
h200 = sol.datasheet(hardware.find("H200"))
table = sol.bounds(climb.operations("prefill", sizes), h200)
least_us = table["bound_ns"].sum() / 1e3
print(f"{len(table)} operations, one after the other: {least_us:,.0f} µs")

# %%
# The layer has four matmuls, attention, two norms, rotary positions, SwiGLU
# and two residual sums. Which of them are bound by memory on an H200, and what
# share of the total bound do they have together?
#
# .. dropdown:: Answer
#
#    All but the matmuls and attention, and together
#    :measured:`16_roofline_of_a_layer.by_memory:.0%`. Fused into the matmuls
#    beside them they would be free, so this sum does not bound a layer that
#    fuses them.

# fold: The table of bounds
UNITS = {"flops": "GFLOP", "bytes": "MB", "bound_ns": "bound (µs)"}
units = table[["name", *UNITS, "intensity", "bound"]].copy()
units[list(UNITS)] /= [1e9, 1e6, 1e3]
plots.table(
    units.rename(columns=UNITS), dict.fromkeys(UNITS.values(), "{:,.1f}")
)

# %%
# Unfused attention is another matter: each score is written by a matmul, then
# read and written again by scale, mask and softmax. Guess before you read on.
# On a real card, which operator of such a layer is furthest below its roof,
# and which one takes the most time?

# %%
# Evidence: which operators are far below their roof?
# ---------------------------------------------------
# A video model on an H100, with unfused attention. The profile recorded the
# input shapes of its operators, and ``sol`` needs nothing else:

odd = case("odd-tokens", "timesformer-h100")
judged = odd.trace.sol()
odd

# %%
# The second case file is one matmul on an H200: a generated kernel at its last
# stage, and cuBLAS.

stages = published.on_h200()
case("h200-matmul", "3-setmaxnreg")

# %%
# A point on the roof cannot be made faster as it is. A point far below it
# waits for something, or moves more bytes than it has to. Each label has the
# share of the datasheet's roof:

# fold: How the figure is made
NAMES = {
    "aten::_softmax 8x12": "softmax",
    "aten::bmm 96x3137x64": "scores",
    "aten::bmm 96x3137x3137": "scores x values",
    "aten::mul 8x12": "scale",
    "aten::addmm 3072": "MLP matmul",
    "aten::gelu": "GELU",
    "aten::native_layer_norm 1x25089": "layer norm",
}
drawn = published.one_by_one(judged, NAMES).assign(group="TimeSformer, H100")
two = stages.iloc[[2, 5]].assign(
    name=["generated kernel", "cuBLAS"], group="fp16 matmul, H200"
)
cards = {"H100 datasheet": "H100 SXM", "H200 datasheet": "H200"}
roofs = [
    sol.Rates(name, sheet.tflops, sheet.gb_per_s)
    for name, gpu in cards.items()
    if (sheet := sol.datasheet(hardware.find(gpu)))
]
plots.roofline(
    pd.concat([drawn, two], ignore_index=True),
    roofs,
    "bf16",
    title="Operators under two roofs (case file)",
)

# %%
# We see three things. The scale is close to its roof and still a loss, because
# it need not exist. The softmax is at a fifth of its roof and takes more time
# than any other operator. The two matmuls of attention are at about a third of
# theirs: their odd number of tokens allows only kernels that load one element
# at a time, with names that end in ``align1``. (The linear layers have other
# shapes and another roof, so their higher share does not measure the cost of
# the odd size.)

# fold: How the table is made
NAMED = {"name": "operator", "time_ns": "time (ms)", "bound": "bound by"}
worst = drawn.assign(gain=(1 - drawn["sol_datasheet"]) * drawn["time_ns"])
short = worst[[*NAMED, "sol_datasheet", "gain"]].copy()
short[["time_ns", "gain"]] = short[["time_ns", "gain"]].astype(float) / 1e6
short = short.rename(columns=NAMED | {"sol_datasheet": "share of roof"})
short = short.rename(columns={"gain": "above its bound (ms)"})
MS = dict.fromkeys(["time (ms)", "above its bound (ms)"], "{:,.1f}")
plots.table(short, MS)

# %%
# Change one thing: attention in one operator
# -------------------------------------------
# Should we tune the softmax? First look at what the program asks for:
#
# .. code-block:: diff
#
#    -scores = torch.bmm(q, k.transpose(1, 2)) * scale
#    -mixed = torch.bmm(scores.softmax(-1), v)
#    +mixed = F.scaled_dot_product_attention(q, k, v)

h100 = sol.datasheet(hardware.find("H100 SXM"))
four = drawn.iloc[:4]
fused = sol.attention_cost(8, 12, 3137, 64, causal=False)
calls = int(four["count"].iloc[0])
times_ns = {
    "unfused, measured": four["time_ns"].sum(),
    "unfused, each at its bound": (
        four["time_ns"] * four["sol_datasheet"]
    ).sum(),
    "in one operator, at its bound": calls * h100.bound_ns(fused),
}
attention = pd.DataFrame(times_ns.items(), columns=["attention", "ms"])
plots.table(attention.assign(ms=attention["ms"] / 1e6), {"ms": "{:,.1f}"})

# %%
# Perfect kernels for the four operators would save two thirds of their time,
# and the remaining third would still be many times longer than one fused
# operator needs. When the scores stay on the chip, the bound itself moves. We
# have not measured that change on this program: the last row is predicted, and
# no attention kernel reaches its bound.

# %%
# Verdict
# -------
# The roof limits an operation as it is written. It does not show whether the
# operation is needed. Start with the operator that has the most time above its
# bound, here the :measured:`16_roofline_of_a_layer.most_to_gain`, and ask both
# questions. :doc:`/guide/speed_of_light` explains the method; in the guide's
# worked example (:doc:`02_starved_input_pipeline`) it becomes the next
# question once the GPU no longer waits.

# %%
# Limits
# ------
# * One capture each of a program that we did not write.
# * A bound counts compulsory bytes. Tensors that fit the level-2 cache may
#   still be there, and then their operator is faster than the memory. ``sol``
#   marks that case separately from impossible times.
# * Operators without arithmetic, such as copies, are not in the figure. The
#   table of ``sol`` compares them with the memory's bandwidth.
# * Kernels that a compiler fused belong to no operator with a known cost.
# * The sizes of the matmul on the H200 are inferred, not recorded.

# %%
# Run it yourself
# ---------------
# Any trace with shapes, compared with the card that it names. No hardware
# counters are needed:
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
# To run this page's script (without a GPU it runs a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/16_roofline_of_a_layer.py

downloads = {"TimeSformer on an H100": odd.trace}

# %%
# Exercises
# ---------
# 1. Run ``nsightkit sol`` on the downloaded trace. Some copies reach a small
#    share of the bandwidth although they only move bytes. What is wrong?
#
#    .. dropdown:: Answer
#
#       Both inputs have the same shape, so the copy changes the order in
#       memory, as ``.contiguous()`` does after a transpose. It reads or writes
#       in strides and leaves a part of each sector unused. Of the long copies
#       the best reach :measured:`16_roofline_of_a_layer.best_copy:.0%`, the
#       worst :measured:`16_roofline_of_a_layer.worst_copy:.0%`.
#
# 2. If the tokens were padded to the next multiple of eight, which points in
#    the figure would move?
#
#    .. dropdown:: Answer
#
#       The two matmuls could use aligned kernels and move up. The softmax and
#       the scale would stay: they are bound by memory, and padding adds bytes.
#
# 3. An elementwise operator is at a share above one. Is that an error?
#
#    .. dropdown:: Answer
#
#       Not if its tensors fit the level-2 cache, because then they did not
#       come from the memory. Above the cache's size, or for arithmetic, either
#       the time, the shape or the clock is wrong; ``sol`` marks which.

# %%
# Measured here
# -------------
# .. own-run::
#
# The layer of :doc:`17_layer_ladder`, unfused and then fused, profiled with
# the input shapes of its operators:

from nsightkit.guide import headline, measure
from nsightkit.workloads import ceilings, layer

# 0.86 TFLOP a layer take an H100 at least 1.2 ms. Unfused it takes 2 to 3 ms,
# and its 45 launches cost the CPU 0.2 ms, so the GPU is busy throughout.
little = dict(batch=1, context=64, hidden=128, heads=4, d_ff=352)


def profiled(part, rung):
    """Measure one implementation of the layer."""
    how = dict(mode="prefill", rung=rung)
    return measure(
        f"roofline/{part}",
        layer.run,
        gpu=dict(**sizes, **how, layers=3),
        small=dict(**little, **how, layers=2),
        warmup=300,
        profile="shapes",
    )


before = profiled("before", "unfused")
after = profiled("after", "fused")
before

# %%
# The ceilings of the same GPU, as :doc:`15_real_ceilings` measures them:


def product(part, precision, warmup, steps):
    """Measure a large GEMM."""
    return measure(
        f"ceilings/{part}",
        ceilings.gemm,
        gpu=dict(m=8192, n=8192, k=8192, precision=precision),
        small=dict(m=256, n=256, k=256, precision=precision),
        steps=steps,
        warmup=warmup,
        profile=None,
    )


copied = measure(
    "ceilings/copy",
    ceilings.copy,
    gpu=dict(megabytes=4_000, kind="copy"),
    small=dict(megabytes=16, kind="copy"),
    steps=200,
    warmup=300,
    profile=None,
)
cube = product("before", "bf16", 800, 200)
cube_fp32 = product("fp32", "fp32", 60, 60)
against = climb.bounds("prefill", before, [cube, cube_fp32, copied])
copied

# %%
# The unfused layer's operators under the roofs of the datasheet and of the
# measured ceilings:

# fold: How the runs are judged
roofs_here = [roof for roof in (against.sheet, against.ceilings) if roof]
on_gpu = bool(before and after and against.ceilings)


def judged_here(run):
    """Operators against the roofs."""
    return sol.summary(run.trace, measured=against.ceilings)


if on_gpu:
    title = f"A layer, unfused ({before.mode})"
    was = judged_here(before)
    plots.roofline(was, roofs_here, "bf16", title=title, top=6)

# %%
# With fused attention, and merged matmuls:

# fold: How the figure is made
if on_gpu:
    title = f"A layer, fused ({after.mode})"
    now = judged_here(after)
    plots.roofline(now, roofs_here, "bf16", title=title, top=6)
after

# %%
# The whole layer compared with the sum of its bounds. In principle, everything
# except the matmuls and attention can be fused away; the last column counts
# only those.


# fold: How the table is made
def whole(run, roof, name):
    """One row: the time of all layers, and the share of it that is needed."""
    layers = run.parameters["layers"]
    took = run.median("step_ns")
    bound = climb.list_ns(against.listed, roof) * layers
    least = climb.floor_ns(against.listed, roof) * layers
    return {
        "roof": roof.source,
        "layer": name,
        "step (ms)": took / 1e6,
        "share reached": bound / took,
        "share, all fused": least / took,
    }


rows = []
for roof in roofs_here if on_gpu else []:
    rows.append(whole(before, roof, "unfused"))
    rows.append(whole(after, roof, "fused"))
if rows:
    plots.table(pd.DataFrame(rows))

# %%
# The answer from the two runs:


# fold: How the answer is put together
def largest(table):
    """Operator with the most time to gain, and its share of that."""
    gain = (1 - table["sol_measured"].clip(upper=1)) * table["time_ns"]
    if not gain.sum() > 0:
        return "no operator", 0.0
    return table.loc[gain.idxmax(), "name"], gain.max() / gain.sum()


said = ""
if before and after:
    error = max(run.median("relative_error") for run in (before, after))
    said = f"both layers ran, with a relative error of {error:.2g} at most."
if on_gpu:
    unfused_share, fused_share = (row["share reached"] for row in rows[-2:])
    left, share = largest(now)
    said = (
        f"against measured ceilings the layer reaches {unfused_share:.0%} of "
        f"its bound unfused and {fused_share:.0%} fused; {left} has "
        f"{share:.0%} of the time still to gain."
    )
roof = drawn.set_index("name")["sol_datasheet"].astype(float)
moved = judged[judged["name"].str.startswith("aten::copy_")]
ratio = times_ns["unfused, each at its bound"]
ratio /= times_ns["in one operator, at its bound"]
findings = headline(
    said,
    before,
    after,
    otherwise=(
        f"on an H100, the softmax of unfused attention reaches "
        f"{roof['softmax']:.0%} of its roof and takes the most time. From the "
        f"bounds alone, the four operators of this attention take "
        f"{ratio:.0f}x as long as one fused operator would (predicted)."
    ),
    badge="case file, NVIDIA H100 and H200",
    by_memory=table.loc[table["bound"] == "memory", "bound_ns"].sum()
    / table["bound_ns"].sum(),
    most_to_gain=worst.loc[worst["gain"].astype(float).idxmax(), "name"],
    best_copy=moved["sol_datasheet"].max(),
    worst_copy=moved.head(8)["sol_datasheet"].min(),
)
