"""
How fast could this operation be?
=================================

A profile shows how long each operation of a layer takes. How fast could this
card run them, is the datasheet a fair yardstick, and which operations are far
from their limit?

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
h200 = hardware.find("H200")
table = sol.bounds(climb.operations("prefill", sizes), sol.datasheet(h200))
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
#    :measured:`15_ceilings_and_rooflines.by_memory:.0%`. Fused into the
#    matmuls beside them they would be free, so this sum does not bound a layer
#    that fuses them.

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
library = stages.iloc[-1]
trace = case("h200-matmul", "3-setmaxnreg")
trace

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
# We see three things. The scale is close to its roof, yet fused attention
# would save all of its time. The softmax is at a fifth of its roof and takes
# more time than any other operator. The two matmuls of attention are at about
# a third of theirs: their odd number of tokens allows only kernels that load
# one element at a time, with names that end in ``align1``. (The linear layers
# have other shapes and another roof, so their higher share does not measure
# the cost of the odd size.)

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
# Is the datasheet a fair roof?
# -----------------------------
# A rate on a datasheet is a product of three numbers: the multiprocessors, the
# operations each does per clock, and a clock. NVIDIA quotes the tensor cores
# at a lower clock than the ordinary cores, but the card may run at the higher
# one, so a short measurement can exceed the datasheet without being wrong:

bf16 = h200.peak("bf16")
highest = h200.peak("fp32").clock_mhz
above = h200.at_clock("bf16", highest)
print(f"bf16, quoted at {bf16.clock_mhz:,} MHz: {bf16.tflops:,.0f} TFLOP/s")
print(f"bf16, at {highest:,} MHz: {above:,.0f} TFLOP/s")

# %%
# A board also has a power limit. A matmul on tensor cores draws the most
# power, so its clock falls until the power fits. What share of the datasheet
# does a large matmul sustain? These are published figures. The cuBLAS kernel
# above reaches :measured:`15_ceilings_and_rooflines.library:.0%`, which agrees
# with those of its chip:

# fold: The table of sources
plots.table(published.rates_table())

# %%
# There are three yardsticks. The *datasheet* is the same for everyone, and out
# of reach for long matmuls. The *measured ceiling* is the rate that one
# program reached on this very card. The *speed of light at the settled clock*
# is what the units could do at the clock that the card had under load. NVIDIA
# recommends the third (in CUTLASS, *GEMM Performance Measurement Methodology
# Guidelines*). Our trace does not record the clock, so the share that cuBLAS
# reached depends on what we assume for it:

reached = library["flops"] / library["time_ns"] / 1e3
clocks = [highest, bf16.clock_mhz, 1700, 1550]
at_clock = pd.DataFrame({"clock (MHz)": clocks})
at_clock["could do (TFLOP/s)"] = [h200.at_clock("bf16", c) for c in clocks]
at_clock["share that cuBLAS reached"] = reached / at_clock.iloc[:, 1]
least_mhz = reached / above * highest
print(f"it ran at {least_mhz:,.0f} MHz or more: a lower clock is too slow")
plots.table(at_clock)

# %%
# Verdict
# -------
# The roof limits an operation as it is written. It does not show whether the
# operation is needed. Start with the operator that has the most time above its
# bound, here the :measured:`15_ceilings_and_rooflines.most_to_gain`, and ask
# both questions.
#
# Judge a long matmul by a ceiling measured on the same card, or by the speed
# of light at its settled clock. Against the datasheet, a very good one looks a
# fifth short. More than :measured:`15_ceilings_and_rooflines.above:,.0f`
# TFLOP/s on an H200 would need a clock that the card does not have, so such a
# measurement is wrong.
#
# :doc:`/guide/speed_of_light` explains the method. In the guide's worked
# example it is the question after :ref:`step 6 <example-left>`, once the GPU
# no longer waits.

# %%
# Limits
# ------
# * One capture each of a program that we did not write. The sizes of the
#   matmul on the H200 are inferred, not recorded.
# * A bound counts compulsory bytes. Tensors that fit the level-2 cache may
#   still be there, and then their operator is faster than the memory. ``sol``
#   marks that case separately from impossible times.
# * Operators without arithmetic, such as copies, are not in the figure. The
#   table of ``sol`` compares them with the memory's bandwidth.
# * Kernels that a compiler fused belong to no operator with a known cost.
# * The reported figures are from other people's cards, whose power limit,
#   cooling and clocks are mostly not stated. A burst after a pause is faster
#   than a second of work.

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
# For a ceiling that means something, use random data, warm up for seconds
# until the clock has settled, rotate operands through more than twice the
# level-2 cache, log the clock and the power, and use the same duty cycle as
# the work that you compare.
#
# To run this page's script (without a GPU it runs a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/15_ceilings_and_rooflines.py

downloads = {
    "TimeSformer on an H100": odd.trace,
    "a matmul beside cuBLAS, on an H200": trace.trace,
}

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
#       the best reach :measured:`15_ceilings_and_rooflines.best_copy:.0%`, the
#       worst :measured:`15_ceilings_and_rooflines.worst_copy:.0%`.
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

# 4. A colleague measures a bf16 matmul at
#    :measured:`15_ceilings_and_rooflines.above:,.0f` TFLOP/s on an H200, in
#    one launch after a pause. Wrong, or possible?
#
#    .. dropdown:: Answer
#
#       Just possible: it means every tensor core busy at the highest clock.
#       Ask for the median of a second of launches and for the clock.
#
# 5. Your layer reaches most of the measured ceiling and a much smaller share
#    of the datasheet. What is left to gain?
#
#    .. dropdown:: Answer
#
#       Little from better kernels. Possibly much from fewer operations, a
#       smaller type or less power spent elsewhere: see :doc:`17_layer_ladder`.

# %%
# Measured here
# -------------
# .. own-run::
#
# First the ceilings. A square bf16 matmul, over and over, after a second of
# warm-up. Each matmul is a point. If the first ones are faster, the card was
# still cool, or its clock still high.

from nsightkit.analysis.core import noise
from nsightkit.guide import headline, measure
from nsightkit.workloads import ceilings, layer

# 2 x 8192³ = 1.1 TFLOP: about 1.5 ms in bf16 on an H100, 2.7 in tf32, 22 in
# fp32 and 0.8 in fp8. So 800 products in bf16 warm the card for a second.
cube = dict(m=8192, n=8192, k=8192)
small_cube = dict(m=256, n=256, k=256)


def product(part, precision, warmup, shape=cube, steps=200, **how):
    """Measure a GEMM, over and over."""
    return measure(
        f"ceilings/{part}",
        ceilings.gemm,
        gpu=dict(**shape, precision=precision, **how),
        small=dict(**small_cube, precision=precision, **how),
        steps=steps,
        warmup=warmup,
        profile=None,
    )


random = product("before", "bf16", 800)
if random:
    plots.step_times(
        {"bf16": random.values("step_ns")},
        title=f"One matmul, over and over ({random.mode})",
    )
random

# %%
# The same matmul, of zeros. Flipping a bit takes power and leaving it alone
# takes little, so a matmul of zeros can keep a higher clock, and a benchmark
# on zeros promises a rate that no real program gets. A comparison needs a GPU:

# fold: How the figure is made
zeros = product("after", "bf16", 800, zeros=True)
if random.gpu and zeros.gpu:
    plots.step_times(
        {"random": random.values("step_ns"), "zeros": zeros.values("step_ns")},
        title=f"A matmul of random numbers and of zeros ({zeros.mode})",
    )
zeros

# %%
# All ceilings: matmuls of a layer's shapes, other precisions, and transfers. A
# copy reads and writes, a triad reads twice and writes, a sum only reads.

# One tensor of a transfer is 4 GB, eighty times an H100's level-2 cache.
large = dict(m=16_384, n=16_384, k=16_384)
qkv = dict(m=2048, n=12_288, k=4096)
out = dict(m=2048, n=4096, k=4096)
gate_up = dict(m=2048, n=22_016, k=4096)
down = dict(m=2048, n=4096, k=11_008)


def transfer(kind):
    """Measure a transfer through the memory."""
    return measure(
        f"ceilings/{kind}",
        ceilings.copy,
        gpu=dict(megabytes=4_000, kind=kind),
        small=dict(megabytes=16, kind=kind),
        steps=200,
        warmup=300,
        profile=None,
    )


in_fp32 = product("fp32", "fp32", 60, steps=60)
copied = transfer("copy")
runs = [
    random,
    product("large", "bf16", 100, large),
    product("qkv", "bf16", 3500, qkv),
    product("out", "bf16", 8000, out),
    product("layer", "bf16", 2000, gate_up),
    product("down", "bf16", 4000, down),
    product("fp16", "fp16", 800),
    product("tf32", "tf32", 400),
    in_fp32,
    product("fp8", "fp8", 1200),
    copied,
    transfer("triad"),
    transfer("read"),
]

# %%
# Where the share of the datasheet is low and the share at the card's own clock
# is high, power is the limit, not the program.


# fold: How the table is made
def ceiling_row(run):
    """One row: the rate that was reached, and its shares."""
    ceiling = sol.ceiling(run.parameters, run.median("step_ns"))
    unit, gpu = ceiling["unit"], climb.gpu_of(run)
    clock = run.median("sm_clock_mhz")
    row = {"what": ceiling["what"], "unit": unit}
    row |= {"TFLOP/s": ceiling["tflops"], "GB/s": ceiling["gb_per_s"]}
    row |= {"share of datasheet": None, "share at its clock": None}
    row |= {"clock (MHz)": clock, "power (W)": run.median("power_w")}
    slowed_by = hardware.slowed_by(run.values("slowdown_mask"))
    row["clock limited by"] = slowed_by or "-"
    if gpu and unit == "memory":
        row["share of datasheet"] = ceiling["gb_per_s"] / gpu.gb_per_s
    elif gpu and gpu.peak(unit):
        row["share of datasheet"] = ceiling["tflops"] / gpu.peak(unit).tflops
        if clock:
            at_its_clock = gpu.at_clock(unit, clock)
            row["share at its clock"] = ceiling["tflops"] / at_its_clock
    return row


if all(runs):
    reached_here = pd.DataFrame(ceiling_row(run) for run in runs)
    numbers = reached_here.columns[2:-1]
    reached_here[numbers] = reached_here[numbers].astype(float)
    plots.table(reached_here)

# %%
# Then the layer of :doc:`17_layer_ladder`, unfused and then fused, profiled
# with the input shapes of its operators:

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
# The unfused layer's operators under the roofs of the datasheet and of the
# measured ceilings:

# fold: How the runs are judged
against = climb.bounds("prefill", before, [random, in_fp32, copied])
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
# The answer from the runs:


# fold: How the answer is put together
def largest(table):
    """Operator with the most time to gain, and its share of that."""
    gain = (1 - table["sol_measured"].clip(upper=1)) * table["time_ns"]
    if not gain.sum() > 0:
        return "no operator", 0.0
    return table.loc[gain.idxmax(), "name"], gain.max() / gain.sum()


said = ""
if all(runs):
    rates = sol.ceilings(
        [sol.ceiling(run.parameters, run.median("step_ns")) for run in runs],
        random.label,
    )
    said = (
        f"bf16 matmuls reach {rates.tflops['bf16']:.3g} TFLOP/s and "
        f"transfers {rates.gb_per_s:,.0f} GB/s"
    )
    gpu = climb.gpu_of(random)
    if gpu:
        said += (
            f", {rates.tflops['bf16'] / gpu.peak('bf16').tflops:.0%} and "
            f"{rates.gb_per_s / gpu.gb_per_s:.0%} of the datasheet"
        )
    said += "."
if said and random.gpu and zeros.gpu:
    ratio = noise.ratio(random.values("step_ns"), zeros.values("step_ns"))
    words = "less" if ratio.value < 1 else "more"
    effect = f"{abs(ratio.value - 1):.0%} {words} time than"
    if not ratio.excludes(1):
        effect = "the same time, within the noise, as"
    said += f" A matmul of zeros takes {effect} one of random numbers."
if on_gpu:
    unfused_share, fused_share = (row["share reached"] for row in rows[-2:])
    left, share = largest(now)
    said += (
        f" Against measured ceilings the layer reaches {unfused_share:.0%} of "
        f"its bound unfused and {fused_share:.0%} fused; {left} has "
        f"{share:.0%} of the time still to gain."
    )
roof = drawn.set_index("name")["sol_datasheet"].astype(float)
moved = judged[judged["name"].str.startswith("aten::copy_")]
longer = times_ns["unfused, each at its bound"]
longer /= times_ns["in one operator, at its bound"]
findings = headline(
    said,
    before,
    after,
    zeros,
    *runs,
    otherwise=(
        f"on an H100, the softmax of unfused attention reaches "
        f"{roof['softmax']:.0%} of its roof and takes the most time. From the "
        f"bounds alone, the four operators of this attention take "
        f"{longer:.0f}x as long as one fused operator would (predicted). "
        f"cuBLAS on an H200 reaches {library['sol_datasheet']:.0%} of the "
        f"datasheet, as the best published matmuls on its chip do."
    ),
    badge="case file, NVIDIA H100 and H200",
    by_memory=table.loc[table["bound"] == "memory", "bound_ns"].sum()
    / table["bound_ns"].sum(),
    most_to_gain=worst.loc[worst["gain"].astype(float).idxmax(), "name"],
    best_copy=moved["sol_datasheet"].max(),
    worst_copy=moved.head(8)["sol_datasheet"].min(),
    above=above,
    library=float(library["sol_datasheet"]),
)
