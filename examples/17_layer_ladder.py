"""
How close can a transformer layer come to its card's ceilings?
==============================================================

Fused attention, merged matmuls, a compiler, a CUDA graph: each promises a
faster layer. Arithmetic tells us beforehand how much each can gain at most,
and which cannot gain anything. We work that out for one layer and look for
it in real traces. We have not run this ladder on a GPU yet.

.. in-short::
"""

# %%
# Predict: how much can each change gain?
# ---------------------------------------
# Every operation of a layer has a least time: its arithmetic at the peak rate
# of its unit, or its operands through the memory once, whichever takes longer.
# We call the operations of the textbook layer *the list*, and the sum of their
# least times its bound. Every rung is compared with the same list, so no rung
# looks better by doing less.

# record: 400 s
# sphinx_gallery_thumbnail_number = 1
import pandas as pd
from _lib import climb, figures, published

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import sol
from nsightkit.guide import case
from nsightkit.workloads import layer

sizes = dict(batch=1, context=2048, hidden=4096, heads=32, d_ff=11_008)
listed = climb.operations("prefill", sizes)
h200 = sol.datasheet(hardware.find("H200"))
bounds = sol.bounds(listed, h200)
whole_ns = bounds["bound_ns"].sum()
floor_ns = climb.floor_ns(listed, h200)

# %%
# The ladder has four main rungs. **unfused** is the layer as in a textbook,
# with the scores of its attention in memory. **sdpa** fuses the attention,
# **fused** merges matmuls that share an input, and **compiled** hands the rest
# to ``torch.compile``. What share of the list's speed can the first rung reach
# at most? Which change is worth most? And what would a CUDA graph add?
#
# .. dropdown:: Answer
#
#    At most :measured:`17_layer_ladder.unfused:.0%`, and fused attention is
#    worth most: it raises the bound to :measured:`17_layer_ladder.sdpa:.0%`.
#    Compiling can take the layer to the full speed of the list. Merged matmuls
#    fill their last wave better and save almost no bytes. A graph has nothing
#    to remove: even the first rung has only
#    :measured:`17_layer_ladder.launches:.0f` launches, and at the cost that we
#    assume for one they take :measured:`17_layer_ladder.launched:.0%` of the
#    GPU's least time.
#
# The figure is that prediction, from the datasheet of an H200. A bar that is
# shorter than a line could meet that goal. The dotted line is
# :measured:`17_layer_ladder.goal:.0%` of the list's speed on the datasheet.
# The dashed line is the same share of the rate that matmuls *reach*: the best
# bf16 matmul reported for this chip replaces a ceiling measured on the card.

# fold: How the figure is made
GOAL = 0.85
rates = published.rates("H200")
goal_ns = sum(rates.bound_ns(operation) for operation in listed) / GOAL
on_paper = climb.predicted("prefill", sizes, h200)
LINES = {
    f"goal, {GOAL:.0%} of reported ceilings": goal_ns,
    f"{GOAL:.0%} of the datasheet": whole_ns / GOAL,
}
figures.ladder(
    on_paper,
    LINES,
    title="A layer on an H200 (predicted from the datasheet)",
)

# %%
# Where is the time in this list? Nearly all of it is in the GEMMs:

# fold: How the table is made
KINDS = {
    "QKV|output|gate|down": "GEMMs",
    "attention": "attention",
    "RMSNorm": "norms",
    "rotary": "rotary positions",
    "residual|SwiGLU": "residuals and SwiGLU",
}
kinds = bounds["name"].replace(
    {f".*({name}).*": kind for name, kind in KINDS.items()}, regex=True
)
short = bounds.groupby(kinds, sort=False).agg(
    flops=("flops", "sum"),
    bytes=("bytes", "sum"),
    bound_by=("bound", "first"),
    bound_ns=("bound_ns", "sum"),
)
short = short.sort_values("bound_ns", ascending=False).reset_index()
short[["flops", "bytes", "bound_ns"]] /= [1e9, 1e6, 1e3]
short["share"] = short["bound_ns"] / short["bound_ns"].sum()
HEADS = {"flops": "GFLOP", "bytes": "MB", "bound_ns": "bound (µs)"}
HEADS |= {"name": "operations", "bound_by": "bound by"}
plots.table(
    short.rename(columns=HEADS),
    dict.fromkeys(["GFLOP", "MB", "bound (µs)"], "{:,.1f}"),
)

# %%
# Matmuls and attention are limited by compute. The rest is limited by
# memory, and a compiler can fuse it into the matmuls beside it. Without the
# rest we get the *floor*, where the hatched part of the last bar starts: no
# fusion goes below it.

# %%
# Evidence: which rungs do real programs show?
# --------------------------------------------
# Published traces of other programs show two rungs of the ladder.
#
# *The first rung, on an H100.* A video model with unfused attention:

odd = case("odd-tokens", "timesformer-h100")
judged = odd.trace.sol()
odd

# %%
# Attention takes most of the kernels' time, and its softmax is furthest from
# the datasheet. (Its two matmuls are slow for a second reason, an odd number
# of tokens: :doc:`10_ten_configurations`.) The linear layers at the bottom
# show how far a GEMM gets inside a whole program.

# fold: How the figure is made
NAMES = {
    "aten::_softmax 8x12": "softmax of the scores",
    "aten::bmm 96x3137x64": "scores (bmm)",
    "aten::bmm 96x3137x3137": "scores x values (bmm)",
    "aten::mul 8x12": "scale (mul)",
    "aten::addmm 3072": "MLP, up (addmm)",
    "aten::addmm 768 25089x3072": "MLP, down (addmm)",
}
kernel_ns = odd.trace.kernels()["total_ns"].sum()
shown = published.one_by_one(judged, NAMES).set_index("name")
shown["share of datasheet"] = shown["sol_datasheet"]
shown["share of kernel time"] = shown["time_ns"] / kernel_ns
plots.panels(
    shown,
    ["share of datasheet", "share of kernel time"],
    title="TimeSformer on an H100 (case file)",
)

# %%
# *How far a matmul gets, on an H200.* Three stages of a generated kernel were
# captured, each beside cuBLAS, which stayed the same:

stages = published.on_h200()
library = stages["kernel"].str.startswith("cuBLAS")
for who, rows in ("the kernel", ~library), ("cuBLAS", library):
    took = stages.loc[rows, "time_ns"] / 1e3
    print(f"{who}: {took.min():.1f} to {took.max():.1f} µs in three captures")
case("h200-matmul", "3-setmaxnreg")

# %%
# cuBLAS barely differs between the captures, so the kernel's gain is real. And
# the library stops at about four fifths of the datasheet, like other long
# matmuls on this chip (:doc:`15_ceilings_and_rooflines` explains why):

# fold: How the figure is made
first = stages.iloc[:4].copy()
first.loc[first.index[3], "kernel"] = "cuBLAS"
first["time_ns"] = first["time_ns"].astype(float)
first["share of datasheet"] = first["sol_datasheet"]
plots.panels(
    first.set_index("kernel"),
    ["time_ns", "share of datasheet"],
    title="One fp16 matmul on an H200 (case file)",
)

# %%
# Change one thing: rung by rung
# ------------------------------
# **sdpa** removes the trips of the scores through the memory, and half of both
# matmuls, because it skips the masked half. It disappoints where an explicit
# mask or an odd head size rules the fast kernel out.
#
# .. code-block:: diff
#
#    -scores = (q @ k.transpose(-1, -2)) * scale
#    -scores = scores.masked_fill(future, float("-inf"))
#    -mixed = scores.float().softmax(-1).to(q.dtype) @ v
#    +mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
#
# **fused** computes q, k and v in one matmul, and gate and up in another. A
# matmul is computed in tiles, a wave of them at a time, and the last wave of a
# larger matmul may waste less. It disappoints where all waves were already
# full.
#
# .. code-block:: diff
#
#    -gate, up = F.linear(x, w_gate), F.linear(x, w_up)
#    +gate, up = F.linear(x, w_gate_up).chunk(2, dim=-1)

full = climb.waves(sizes, hardware.find("H200").multiprocessors)
waves = pd.Series(full, name="share of full waves").rename_axis("matmul")
plots.table(waves.reset_index())

# %%
# **compiled** fuses the operations between the matmuls, down to the floor at
# most. It disappoints where the graph breaks.
#
# .. code-block:: diff
#
#    -y = layer(x)
#    +y = torch.compile(layer)(x)
#
# The other rungs, in short:
#
# * **autotuned** picks each GEMM by trial. It can bring them to their ceiling,
#   which the library has mostly reached already.
# * **fp8** at most halves the time of the GEMMs. It computes something else,
#   so it has a speedup but no share of this list.
# * **graphed** should gain nothing here, because no kernel waits for its
#   launch. :doc:`18_decode_bandwidth` is where a graph pays.
# * **triton** merges the SwiGLU with the matmuls around it in a kernel of ours
#   that writes and reads one tensor less.

# fold: The side rungs
rungs = pd.DataFrame(
    [
        {"rung": name, "changes": rung.base, "to": rung.change}
        for name, rung in layer.RUNGS["prefill"].items()
        if name not in set(on_paper["rung"])
    ]
)
plots.table(rungs)

# %%
# Is a claimed ladder possible?
# -----------------------------
# The same list checks other people's numbers. Suppose a table claims that four
# changes take this very layer from
# :measured:`17_layer_ladder.claimed_first:.0%` to
# :measured:`17_layer_ladder.goal:.0%`, with savings of a tenth or less each.
# Two checks need no GPU. Added up, the savings lead to
# :measured:`17_layer_ladder.added_up:.0%`. And if the table gives times for an
# H100, we compare them with their bounds:

# fold: How the table is made
PRINTED_NS = {"QKV": 85e3, "output projection": 32e3}
PRINTED_NS |= {"gate and up": 135e3, "down": 68e3}
claimed_first, savings = 0.40, (0.08, 0.04, 0.10, 0.10)
added_up = claimed_first / (1 - sum(savings))
h100 = sol.datasheet(hardware.find("H100 SXM"))
claimed = [op for op in listed if op.name in PRINTED_NS]
checked = sol.judge(claimed, [PRINTED_NS[op.name] for op in claimed], h100)
checked["claimed (µs)"] = checked["time_ns"] / 1e3
checked["bound (µs)"] = [h100.bound_ns(op) / 1e3 for op in claimed]
plots.table(
    checked[["name", "claimed (µs)", "bound (µs)", "note"]],
    {"bound (µs)": "{:,.0f}"},
)

# %%
# Each of the four times is shorter than all tensor cores of the card need at
# their peak, so none of them was measured correctly. Ask of any such table
# which yardstick its shares refer to.
#
# Verdict
# -------
# Fuse the attention first: no other rung is worth as much. Then compile.
# Expect nothing from a graph. (First make sure that the GPU never runs out of
# work, as it does in :ref:`step 1 <example-summary>` of the worked example.)
#
# How fast is fast enough? Per the datasheet the list takes
# :measured:`17_layer_ladder.list_us:,.0f` µs and the floor
# :measured:`17_layer_ladder.floor_us:,.0f` µs. But the best matmul reported
# for this chip reaches :measured:`17_layer_ladder.ceiling:.0%` of the
# datasheet, so a layer made of matmuls will not reach
# :measured:`17_layer_ladder.goal:.0%` of it. The same share of such ceilings
# is :measured:`17_layer_ladder.goal_us:,.0f` µs, or
# :measured:`17_layer_ladder.goal_share:.0%` of the datasheet.

# %%
# Limits
# ------
# * We have not run the ladder on a GPU yet. The two case files are of other
#   programs, one capture each.
# * A prediction is the most that a change can save. A change can exceed it by
#   a side effect, such as a higher clock.
# * Causal attention counts as half the square, and activations of this size
#   fit the level-2 cache, so an elementwise operation may beat its bound.
# * One shape, one direction. A smaller layer is limited by its launches.

# %%
# Run it yourself
# ---------------
# The bounds of any trace with shapes, and the ceilings of your card:
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
#    $ python examples/17_layer_ladder.py

downloads = {"TimeSformer on an H100": odd.trace}

# %%
# Exercises
# ---------
# 1. Download the H100 trace above. Fused attention would put softmax, scale
#    and both matmuls into one kernel. How much faster could all kernels
#    together get, at most?
#
#    .. dropdown:: Answer
#
#       The four take :measured:`17_layer_ladder.attention_share:.0%` of the
#       kernel time. Fused attention needs its arithmetic and keeps the scores
#       out of memory, so at its bound all kernels together are
#       :measured:`17_layer_ladder.with_sdpa:.1f` times faster. No attention
#       kernel reaches its bound, so expect less.
#
# 2. The step of that trace takes much longer than its kernels. Is fused
#    attention worth as much for the step?
#
#    .. dropdown:: Answer
#
#       No. ``nsightkit verdict`` reports one long idle time before the
#       kernels, and a change to kernels leaves that as it is. It happened
#       once, so look at a second step before you decide.
#
# 3. A colleague reports a layer at :measured:`17_layer_ladder.goal:.0%`. What
#    do you ask?
#
#    .. dropdown:: Answer
#
#       Of what: the datasheet, or a ceiling measured on that card, at which
#       clock? Is causal attention counted as half? Is it the same list before
#       and after fusing? And does the result still match float64?

# fold: The arithmetic behind the first answer
tokens, heads, width, blocks = 3137, 12, 64, 12
fused = sol.attention_cost(8, heads, tokens, width, causal=False)
scores_ns = shown["time_ns"].iloc[:4].sum()
with_sdpa = kernel_ns / (kernel_ns - scores_ns + blocks * h100.bound_ns(fused))

# %%
# Measured here
# -------------
# .. own-run::
#
# The rungs of this ladder, each through several layers with different weights,
# so that no weight is still in the cache. Two rungs differ if the interval of
# their difference excludes zero (:doc:`/definitions`).

from nsightkit.guide import headline, measure
from nsightkit.workloads import ceilings

# A layer's 0.86 TFLOP take an H100 at least 1.2 ms, and its 45 launches the
# CPU 0.2 ms. Three layers, so that no weight waits in the cache.
little = dict(batch=1, context=64, hidden=128, heads=4, d_ff=352)


def climbed(rung):
    """Measure one rung."""
    how = dict(mode="prefill", rung=rung)
    return measure(
        f"ladder/{rung}",
        layer.run,
        gpu=dict(**sizes, **how, layers=3),
        small=dict(**little, **how, layers=2),
        steps=100,
        warmup=300,
    )


runs = {rung: climbed(rung) for rung in layer.RUNGS["prefill"]}
runs["unfused"]

# %%
# The ceilings for the comparison, measured on the same GPU:

cube = dict(m=8192, n=8192, k=8192)
small_cube = dict(m=256, n=256, k=256)


def product(part, precision, warmup):
    """Measure a large GEMM."""
    return measure(
        f"ceilings/{part}",
        ceilings.gemm,
        gpu=dict(**cube, precision=precision),
        small=dict(**small_cube, precision=precision),
        steps=200,
        warmup=warmup,
    )


roofs = [product("before", "bf16", 800), product("fp32", "fp32", 60)]
roofs.append(product("fp8", "fp8", 1200))
roofs.append(
    measure(
        "ceilings/copy",
        ceilings.copy,
        gpu=dict(megabytes=4_000, kind="copy"),
        small=dict(megabytes=16, kind="copy"),
        steps=200,
        warmup=300,
    )
)
roofs[0]

# %%
# Predicted and measured, one row per change. Each rung is checked against the
# same weights in float64, because a layer that computes something else is not
# faster.

# fold: How the figures are made
against = climb.bounds("prefill", runs["unfused"], roofs)
rungs = climb.table(runs, against)
judged_rungs = climb.changes(runs, against)
if against.best:
    figures.ladder(
        climb.predicted("prefill", sizes, against.best),
        {f"goal, {GOAL:.0%} of the list": whole_ns / GOAL},
        rungs["time_ns"],
        title="The ladder, predicted and measured",
    )
plots.table(judged_rungs) if len(judged_rungs) else None

# %%
# The errors, and the clock where the driver reports it:

CHECKED = ["rung", "speedup", "relative_error", "sm_clock_mhz"]
plots.table(rungs[CHECKED]) if len(rungs) else None

# %%
# The answer from the rungs:

# fold: How the answer is put together
said = climb.answer("a layer", rungs, judged_rungs)
if against.ceilings and len(rungs):
    share = rungs["sol_measured"].max()
    said += f" The goal of {GOAL:.0%} of the measured ceilings is "
    said += "reached." if share >= GOAL else "not reached."
at_best = on_paper.set_index("rung")["share"]
ceiling = rates.tflops["bf16"] / h200.tflops["bf16"]
findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"with unfused attention, a layer on an H200 reaches at most "
        f"{at_best['unfused']:.0%} of the speed that the datasheet allows "
        f"({whole_ns / 1e3:,.0f} µs). Fused attention raises that bound to "
        f"{at_best['sdpa']:.0%}, a compiler to all of it, and a CUDA graph "
        f"adds nothing. We have not run it on a GPU yet."
    ),
    badge="predicted for an H200; case files, H100 and H200",
    unfused=at_best["unfused"],
    sdpa=at_best["sdpa"],
    list_us=whole_ns / 1e3,
    floor_us=floor_ns / 1e3,
    goal_us=goal_ns / 1e3,
    goal_share=whole_ns / goal_ns,
    ceiling=ceiling,
    added_up=added_up,
    claimed_first=claimed_first,
    goal=GOAL,
    attention_share=scores_ns / kernel_ns,
    launches=int(on_paper["launches"].iloc[0]),
    launched=float(
        on_paper["launches"].iloc[0] * climb.LAUNCH_US * 1e3 / floor_ns
    ),
    with_sdpa=with_sdpa,
)
