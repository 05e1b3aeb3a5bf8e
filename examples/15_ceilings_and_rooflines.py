"""
How fast could this operation be?
=================================

A profile shows how long each operation takes. It does not show how long it
should take. Which operations are far from their limit on this card, and is the
datasheet a fair limit?

.. in-short::
"""

# %%
# The symptom: a long list of times
# ---------------------------------
# TimeSformer, a video model with unfused attention, on an H100. Its profile
# recorded the input shapes of the operators, and ``sol`` works out from them
# what each needs at least. Left, the total time of some operators; right, the
# share of that time that the datasheet allows:

# record: 60 s
# sphinx_gallery_thumbnail_number = 1
# fold: How the trace is opened, and the figure is made
import pandas as pd
from _lib import climb, clocks, published, yardsticks

from nsightkit import hardware, plots
from nsightkit.analysis.core import noise
from nsightkit.analysis.roofline import sol
from nsightkit.guide import case, headline, measure
from nsightkit.workloads import ceilings, layer

odd = case("odd-tokens", "timesformer-h100")
judged = odd.trace.sol()
NAMES = {
    "aten::_softmax 8x12": "softmax",
    "aten::bmm 96x3137x64": "scores",
    "aten::bmm 96x3137x3137": "scores x values",
    "aten::mul 8x12": "scale",
    "aten::addmm 3072": "MLP matmul",
    "aten::gelu": "GELU",
    "aten::native_layer_norm 1x25089": "layer norm",
}
drawn = published.one_by_one(judged, NAMES).set_index("name")
drawn["share of its limit"] = drawn["sol_datasheet"]
plots.panels(
    drawn,
    ["time_ns", "share of its limit"],
    title="Seven operators of TimeSformer on an H100 (case file)",
)
odd

# %%
# Predict: how long should the softmax take?
# ------------------------------------------
# An operation needs arithmetic at some peak rate, and it must move its
# operands through the memory at least once. The longer of the two times is its
# bound: the roofline. For a softmax the arithmetic is negligible. So count the
# bytes: 8 samples and 12 heads with 3,137 by 3,137 scores in bf16, each read
# once and written once, in twelve layers, at 3,350 gigabytes per second. How
# long is that, and which share of the measured time?
#
# .. dropdown:: Answer
#
#    The scores are 8 by 12 by 3,137 by 3,137, and each moves four bytes:
#    :measured:`15_ceilings_and_rooflines.softmax_gb:.1f` GB in one layer.
#    Twelve layers take :measured:`15_ceilings_and_rooflines.softmax_ms:.1f` ms
#    at the full bandwidth, and the program took
#    :measured:`15_ceilings_and_rooflines.softmax_took_ms:.1f` ms: a share of
#    :measured:`15_ceilings_and_rooflines.softmax:.0%`, as in the figure.

# %%
# Evidence: which operators have time to give back?
# -------------------------------------------------
# A low share of a short operation is worth little. What counts is the time
# above the bound:

# fold: How the table is made
above = (1 - drawn["sol_datasheet"].astype(float)) * drawn["time_ns"] / 1e6
gains = pd.DataFrame({"above its bound (ms)": above, "bound": drawn["bound"]})
gains = gains.rename_axis("operator").reset_index()
gains = gains.rename(columns={"bound": "bound by"}).head(5)
plots.table(gains, {"above its bound (ms)": "{:.1f}"})

# %%
# The softmax could give back most, and the two matmuls of attention come next,
# at a third of their limit. Their kernels' names end in ``align1``: the number
# of tokens is odd, so cuBLAS can only use kernels that load one element at a
# time. The scale is at :measured:`15_ceilings_and_rooflines.scale:.0%` of its
# limit and cannot become much faster as it is.

# %%
# Change one thing: attention in one operator
# -------------------------------------------
# A limit holds for an operation as it is written. It does not ask whether the
# operation is needed:
#
# .. code-block:: diff
#
#    -scores = torch.bmm(q, k.transpose(1, 2)) * scale
#    -mixed = torch.bmm(scores.softmax(-1), v)
#    +mixed = F.scaled_dot_product_attention(q, k, v)

# fold: How the table is made
h100 = sol.datasheet(hardware.find("H100 SXM"))
four = drawn.iloc[:4]
fused = sol.attention_cost(8, 12, 3137, 64, causal=False)
times_ns = {
    "four operators, measured": four["time_ns"].sum(),
    "each at its bound": (four["time_ns"] * four["sol_datasheet"]).sum(),
    "one operator, at its bound": 12 * h100.bound_ns(fused),
}
attention = pd.DataFrame(times_ns.items(), columns=["attention", "ms"])
plots.table(attention.assign(ms=attention["ms"] / 1e6), {"ms": "{:,.1f}"})

# %%
# Perfect kernels would save two thirds of the time. One fused operator keeps
# the scores on the chip and moves the limit itself, by a factor of
# :measured:`15_ceilings_and_rooflines.moved:.0f`. That row is a prediction: we
# have not made the change on this program. No attention kernel reaches its
# bound.

# %%
# Is the datasheet a fair limit?
# ------------------------------
# For memory-bound kernels it is, for matmuls not always. A matmul on tensor
# cores draws the most power, so a board lowers its clock until the power fits
# its limit. These are rates that people published for an A100, an H100, an
# H200 or a B200, as shares of the datasheet (*reported*; the sources are under
# *Limits*):

# fold: How the table is made
plots.table(published.shares())

# %%
# Memory-bound kernels come close to the datasheet; matmuls do not. For a
# check of our own we have one fp16 matmul by cuBLAS on an H200. It reaches
# :measured:`15_ceilings_and_rooflines.library:.0%`. How much of the rest is
# left to gain depends on the clock, which the trace did not record. At the
# highest clock of the card (:measured:`15_ceilings_and_rooflines.highest:,.0f`
# MHz) cuBLAS reached :measured:`15_ceilings_and_rooflines.at_highest:.0%` of
# what the units could do. At :measured:`15_ceilings_and_rooflines.low:,.0f`
# MHz, which a power limit can bring about, it would have reached
# :measured:`15_ceilings_and_rooflines.at_low:.0%`.

# fold: How the rate is read from the trace
library = published.on_h200().iloc[-1]
reached = library["flops"] / library["time_ns"] / 1e3
h200 = hardware.find("H200")
HIGHEST, LOW = h200.peak("fp32").clock_mhz, 1550
most, least = (
    clocks.at_clock(h200, "bf16", clock) for clock in (HIGHEST, LOW)
)
case("h200-matmul", "3-setmaxnreg")

# %%
# So name the yardstick with each share. The *datasheet* is the same for
# everyone; NVIDIA quotes the tensor cores below the highest clock, so a short
# measurement may exceed it without being wrong. The *measured ceiling* is the
# best rate of one program on this very card. The *speed of light at the
# settled clock*, which NVIDIA recommends (in CUTLASS, *GEMM Performance
# Measurement Methodology Guidelines*), is what the units could do at the clock
# that the card had under load.

# %%
# Verdict
# -------
# Work out what the shapes need at the datasheet's rates, and compare with the
# time. Start with the operator that has the most time above its bound, here
# the :measured:`15_ceilings_and_rooflines.most_to_gain`, and ask first whether
# it is needed. Judge a long matmul by a ceiling measured on the same card,
# because even the best published ones stay short of the datasheet.
#
# :doc:`/guide/speed_of_light` explains the method. In the guide's worked
# example it is the question after :ref:`step 6 <example-left>`, once the GPU
# no longer waits.

# %%
# Limits
# ------
# * One capture each of programs that we did not write. The sizes of the matmul
#   on the H200 are inferred, not recorded.
# * A bound counts compulsory bytes. Tensors that fit the level-2 cache may
#   still be there, and then their operator is faster than the memory. ``sol``
#   marks that case separately from impossible times.
# * Kernels that a compiler fused belong to no operator with a known cost.
# * The reported figures are from other people's cards, whose power limit,
#   cooling and clocks are mostly not stated. A burst after a pause is faster
#   than a second of work.
#
#   .. dropdown:: Sources of the reported rates
#
#      :measured:`15_ceilings_and_rooflines.sources`.

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
# On a GPU, this page's script also measures the ceilings of matmuls and
# copies, and a layer under them. Without a GPU it runs a tiny CPU version:
#
# .. code-block:: console
#
#    $ python examples/15_ceilings_and_rooflines.py

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
#       the best reach :measured:`15_ceilings_and_rooflines.best_copy:.0%`, the
#       worst :measured:`15_ceilings_and_rooflines.worst_copy:.0%`.
#
# 2. An elementwise operator is at a share above one. Is that an error?
#
#    .. dropdown:: Answer
#
#       Not if its tensors fit the level-2 cache, because then they did not
#       come from the memory. Above the cache's size, or for arithmetic, either
#       the time, the shape or the clock is wrong; ``sol`` marks which.
#
# 3. A colleague measures a bf16 matmul at
#    :measured:`15_ceilings_and_rooflines.most:,.0f` TFLOP/s on an H200, in one
#    launch after a pause. Wrong, or possible?
#
#    .. dropdown:: Answer
#
#       Just possible: it means every tensor core busy at the highest clock.
#       Ask for the median of a second of launches and for the clock.

# %%
# Measured here
# -------------
# .. own-run::
#
# A matmul of random numbers and one of zeros. Flipping a bit takes power, so
# the second can keep a higher clock, which no real program gets.

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
zeros = product("after", "bf16", 800, zeros=True)
if random.gpu and zeros.gpu:
    plots.step_times(
        {"random": random.values("step_ns"), "zeros": zeros.values("step_ns")},
        title=f"A matmul of random numbers and of zeros ({zeros.mode})",
    )
random

# %%
# All ceilings. Where the share of the datasheet is low and the share at the
# card's own clock is high, power is the limit, not the program.

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
runs = [random, product("large", "bf16", 100, large)]
runs.append(product("qkv", "bf16", 3500, qkv))
runs.append(product("out", "bf16", 8000, out))
runs.append(product("layer", "bf16", 2000, gate_up))
runs.append(product("down", "bf16", 4000, down))
runs += [product("fp16", "fp16", 800), product("tf32", "tf32", 400)]
runs += [in_fp32, product("fp8", "fp8", 1200)]
runs += [copied, transfer("triad"), transfer("read")]
plots.table(yardsticks.ceilings(runs)) if all(runs) else None

# %%
# A layer, unfused and fused, under the roofs of the datasheet and of the
# measured ceilings:

# 0.86 TFLOP a layer take an H100 at least 1.2 ms. Unfused it takes 2 to 3 ms,
# and its 45 launches cost the CPU 0.2 ms, so the GPU is busy throughout.
sizes = dict(batch=1, context=2048, hidden=4096, heads=32, d_ff=11_008)
little = dict(batch=1, context=64, hidden=128, heads=4, d_ff=352)
layers = {}
for part, rung in ("before", "unfused"), ("after", "fused"):
    how = dict(mode="prefill", rung=rung)
    layers[rung] = measure(
        f"roofline/{part}",
        layer.run,
        gpu=dict(**sizes, **how, layers=3),
        small=dict(**little, **how, layers=2),
        warmup=300,
        profile="shapes",
    )
before, after = layers.values()
against = climb.bounds("prefill", before, [random, in_fp32, copied])
roofs = [roof for roof in (against.sheet, against.ceilings) if roof]
on_gpu = bool(before and after and against.ceilings)
if on_gpu:
    for rung, run in layers.items():
        table = sol.summary(run.trace, measured=against.ceilings)
        title = f"A layer, {rung} ({run.mode})"
        plots.roofline(table, roofs, "bf16", title=title, top=6)
before

# %%
# The whole layer compared with the sum of its bounds; the last column counts
# only matmuls and attention, because all else can be fused away.

# fold: How the answer is put together
whole = yardsticks.layers(layers, against) if on_gpu else pd.DataFrame()
said = ""
if all(runs):
    said = yardsticks.reached(runs, random)
if said and random.gpu and zeros.gpu:
    ratio = noise.ratio(random.values("step_ns"), zeros.values("step_ns"))
    said += yardsticks.of_zeros(ratio)
if on_gpu:
    said += yardsticks.of_layers(whole, after, against)
copies = judged[judged["name"].str.startswith("aten::copy_")]
limits = drawn["sol_datasheet"].astype(float)
moved = times_ns["each at its bound"] / times_ns["one operator, at its bound"]
shares = published.shares().set_index("unit")
softmax_gb = 8 * 12 * 3137**2 * 4 / 1e9
findings = headline(
    said,
    before,
    after,
    zeros,
    *runs,
    otherwise=(
        f"divide its FLOPs and bytes by the card's peaks. In a video model on "
        f"an H100, the softmax takes the most time and reaches "
        f"{limits['softmax']:.0%} of that limit. Perfect kernels would save "
        f"two thirds of attention's time; fused into one operator, it would "
        f"have a {moved:.0f}x shorter bound (predicted). Published bf16 "
        f"matmuls reach {shares.loc['bf16', 'lowest']} to "
        f"{shares.loc['bf16', 'highest']} of the datasheet."
    ),
    badge="case file, NVIDIA H100 and H200",
    softmax=limits["softmax"],
    scale=limits["scale"],
    softmax_gb=softmax_gb,
    softmax_ms=12 * softmax_gb / h100.gb_per_s * 1e3,
    softmax_took_ms=float(drawn.loc["softmax", "time_ns"]) / 1e6,
    moved=moved,
    most_to_gain=above.idxmax(),
    best_copy=copies["sol_datasheet"].max(),
    worst_copy=copies.head(8)["sol_datasheet"].min(),
    most=most,
    library=float(library["sol_datasheet"]),
    highest=HIGHEST,
    at_highest=reached / most,
    low=LOW,
    at_low=reached / least,
    sources="; ".join(published.REPORTED["source"].unique()),
)
plots.table(whole) if len(whole) else None
