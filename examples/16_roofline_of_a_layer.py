"""
How fast could each operation of a layer be?
============================================

A layer takes some time. Before anybody tries to make it faster: how fast could
each of its operations be at all, and which are far from that?

.. in-short::
"""

# %%
# Predict: bounds from shapes
# ---------------------------
# An operation needs arithmetic, which a unit does at some rate, and has to
# move its operands through the memory at least once. The longer of the two
# times is its bound: the roofline. Both follow from shapes, so nothing has to
# run.

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
# The layer has four products, attention, two norms, rotary positions, SwiGLU
# and two residual sums. Which of them are bound by memory on an H200, and what
# share of the least time do they have together?
#
# .. dropdown:: Answer
#
#    All but the products and attention, and together
#    :measured:`16_roofline_of_a_layer.by_memory:.0%`. Fused into the products
#    beside them they would cost nothing, so the sum of these bounds is not a
#    bound on a layer that fuses them.

# fold: The table of bounds
UNITS = {"flops": "GFLOP", "bytes": "MB", "bound_ns": "bound (µs)"}
units = table[["name", *UNITS, "intensity", "bound"]].copy()
units[list(UNITS)] /= [1e9, 1e6, 1e3]
plots.table(
    units.rename(columns=UNITS), dict.fromkeys(UNITS.values(), "{:,.1f}")
)

# %%
# Attention that writes its scores out is another matter: each score is written
# by a product, then read and written again by scale, mask and softmax. Guess,
# before you read on: on a real card, which operator of such a layer is
# furthest below its roof, and which one takes the most time?

# %%
# Evidence: operators under their roof
# ------------------------------------
# A video model on an H100, with its attention written out. The profile keeps
# the shapes of what operators are given, and ``sol`` needs nothing else:

odd = case("odd-tokens", "timesformer-h100")
judged = odd.trace.sol()
odd

# %%
# The second case file is one product on an H200: a generated kernel at its
# last stage, and cuBLAS.

stages = published.on_h200()
case("h200-matmul", "3-setmaxnreg")

# %%
# A point on the roof cannot be made faster as it is. A point far below it
# waits for something, or moves more than it has to. Each point is written with
# its share of the datasheet's roof:

# fold: How the figure is made
NAMES = {
    "aten::_softmax 8x12": "softmax",
    "aten::bmm 96x3137x64": "scores",
    "aten::bmm 96x3137x3137": "scores x values",
    "aten::mul 8x12": "scale",
    "aten::addmm 3072": "MLP product",
    "aten::gelu": "GELU",
    "aten::native_layer_norm 1x25089": "layer norm",
}
drawn = published.one_by_one(judged, NAMES).assign(group="TimeSformer, H100")
two = stages.iloc[[2, 5]].assign(
    name=["generated kernel", "cuBLAS"], group="fp16 product, H200"
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
# Three findings. The scale is close to its roof, and still a loss, because it
# need not exist. The softmax is at a fifth of its roof and takes more time
# than any other. The two products of attention are far below theirs, although
# they are matrix products: their odd number of tokens allows only kernels that
# load one number at a time. Their names end in ``align1``.

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
# Should somebody tune the softmax? Look at what the program asks for first:
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
    "written out, measured": four["time_ns"].sum(),
    "written out, each at its bound": (
        four["time_ns"] * four["sol_datasheet"]
    ).sum(),
    "in one operator, at its bound": calls * h100.bound_ns(fused),
}
attention = pd.DataFrame(times_ns.items(), columns=["attention", "ms"])
plots.table(attention.assign(ms=attention["ms"] / 1e6), {"ms": "{:,.1f}"})

# %%
# Perfect kernels for the four operators would save two thirds of their time,
# and what is left would still be many times what one operator needs. The bound
# itself moves when the scores stay on the chip. Nobody measured that change on
# this program: the last row is predicted, and no attention kernel reaches its
# bound.

# %%
# Verdict
# -------
# The roof says how fast an operation could be as it is written. It does not
# say that the operation is needed. Start with the operator that has the most
# time above its bound, here the
# :measured:`16_roofline_of_a_layer.most_to_gain`, and ask of it both
# questions.

# %%
# Limits
# ------
# * One capture each, of somebody else's program.
# * A bound is of compulsory bytes. Tensors that fit the level-2 cache may be
#   there still, and their operator be quicker than the memory. ``sol`` marks
#   that apart from what is impossible.
# * Operators without arithmetic, such as copies, have no place in the figure.
#   The table of ``sol`` holds them against the memory's bandwidth.
# * Kernels that a compiler fused belong to no operator with a known cost.
# * The sizes of the product on the H200 are inferred, not recorded.

# %%
# Run it yourself
# ---------------
# Any trace with shapes, against the card that it names. No hardware counters
# are needed:
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
#       in strides, and a part of each sector that it moves is not used. Of the
#       long copies the best reach
#       :measured:`16_roofline_of_a_layer.best_copy:.0%`, the worst
#       :measured:`16_roofline_of_a_layer.worst_copy:.0%`.
#
# 2. What would a padding of the tokens to the next multiple of eight change in
#    the figure, and what not?
#
#    .. dropdown:: Answer
#
#       The two products could use aligned kernels and move up, towards the
#       projections. The softmax and the scale would stay where they are: they
#       are bound by memory, and padding adds bytes.
#
# 3. An elementwise operator is at a share above one. Is that an error?
#
#    .. dropdown:: Answer
#
#       Not if its tensors fit the level-2 cache: then they did not come from
#       the memory. Above the cache's size, or for arithmetic, it is an error
#       of the time, the shape or the clock; ``sol`` says which it is.

# %%
# Measured here
# -------------
# .. own-run::
#
# The layer of :doc:`17_layer_ladder`, unfused and then fused, profiled with
# the shapes of what its operators are given:

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
# With attention in one operator, and products with a common input in one:

# fold: How the figure is made
if on_gpu:
    title = f"A layer, fused ({after.mode})"
    now = judged_here(after)
    plots.roofline(now, roofs_here, "bf16", title=title, top=6)
after

# %%
# The whole layer against the sum of its bounds. In principle, everything
# except the products and attention can be fused away; the last column counts
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
# What the two runs say:


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
        f"the layer reaches {unfused_share:.0%} of its bound by measured "
        f"ceilings unfused, {fused_share:.0%} fused; {share:.0%} of what is "
        f"still to gain lies in {left}."
    )
roof = drawn.set_index("name")["sol_datasheet"].astype(float)
moved = judged[judged["name"].str.startswith("aten::copy_")]
ratio = times_ns["written out, each at its bound"]
ratio /= times_ns["in one operator, at its bound"]
findings = headline(
    said,
    before,
    after,
    otherwise=(
        f"on an H100, a softmax written out reaches {roof['softmax']:.0%} of "
        f"its roof and the products beside it {roof['scores']:.0%} and "
        f"{roof['scores x values']:.0%}, where ordinary products reach "
        f"{roof['MLP product']:.0%}. Predicted from bounds alone, the "
        f"operators of this attention take {ratio:.0f} times as long as fused "
        f"attention."
    ),
    badge="case file, NVIDIA H100 and H200",
    by_memory=table.loc[table["bound"] == "memory", "bound_ns"].sum()
    / table["bound_ns"].sum(),
    most_to_gain=worst.loc[worst["gain"].astype(float).idxmax(), "name"],
    best_copy=moved["sol_datasheet"].max(),
    worst_copy=moved.head(8)["sol_datasheet"].min(),
)
