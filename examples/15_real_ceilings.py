"""
How fast is this card, really?
==============================

A datasheet has a number for each kind of arithmetic and one for the memory.
A program that reaches half of it may be half as good as it could be, or as
good as this card allows. Which?

.. in-short::
"""

# %%
# Predict: what is the datasheet's clock worth?
# ---------------------------------------------
# A rate on a datasheet is a product of three numbers: the multiprocessors, the
# operations each does per clock, and a clock.

# sphinx_gallery_thumbnail_number = 1
# record: 60 s
import pandas as pd
from _lib import published

from nsightkit import hardware, plots
from nsightkit.guide import case

h200 = hardware.find("H200")
sheet = pd.DataFrame(hardware.rows(h200))

# %%
# For an H200, without sparsity:

# fold: How the table is made
SHEET = {"unit": "unit", "tflops": "TFLOP/s", "gb_per_s": "GB/s"}
SHEET |= {"clock_mhz": "clock (MHz)"}
plots.table(sheet[list(SHEET)].rename(columns=SHEET))

# %%
# The table has two clocks. NVIDIA quotes the tensor cores at a lower clock
# than the ordinary cores, but the card may run at the higher one. So a short
# measurement can exceed the datasheet without being wrong:

bf16 = h200.peak("bf16")
highest = h200.peak("fp32").clock_mhz
above = h200.at_clock("bf16", highest)
print(f"bf16, quoted at {bf16.clock_mhz:,} MHz: {bf16.tflops:,.0f} TFLOP/s")
print(f"bf16, at {highest:,} MHz: {above:,.0f} TFLOP/s")

# %%
# A board also has a power limit. What share of the datasheet does a large
# matmul sustain in bf16, in fp8, and on a newer card? And a transfer through
# the memory?
#
# .. dropdown:: Answer
#
#    A matmul on tensor cores draws the most power, so its clock falls until
#    the power fits. On Hopper, published bf16 and fp16 matmuls sustain
#    :measured:`15_real_ceilings.hopper:.0%`, fp8 ones less, and a B200's are
#    in between. A transfer draws less power and comes close to its rate.

# %%
# Evidence: what do others report, and does a trace agree?
# --------------------------------------------------------
# Published figures, each as a share of its card's datasheet, and one that we
# can check: cuBLAS in a trace from an H200.

trace = case("h200-matmul", "3-setmaxnreg")
library = published.on_h200().iloc[-1]
trace

# %%
# The case file agrees with the figures reported for its chip: about four
# fifths.

# fold: How the figure is made
rows = {figure.label: figure.share for figure in published.REPORTED}
rows["H200 fp16, case file"] = float(library["sol_datasheet"])
shares = pd.Series(rows, name="share of datasheet").to_frame()
plots.panels(
    shares,
    ["share of datasheet"],
    title="Shares of the datasheet (reported; the last: case file)",
)

# %%
# The source of each figure:

# fold: The table of sources
plots.table(published.rates_table())

# %%
# Which of three yardsticks is fair?
# ----------------------------------
# The *datasheet* is the same for everyone, and out of reach for long matmuls.
# The *measured ceiling* is the rate that one program reached on this very
# card. The *speed of light at the settled clock* is what the units could do at
# the clock that the card had under load. NVIDIA recommends the third (in
# CUTLASS, *GEMM Performance Measurement Methodology Guidelines*). Our trace
# does not record the clock, so the share that cuBLAS reached depends on what
# we assume for it:

reached = library["flops"] / library["time_ns"] / 1e3
clocks = [highest, bf16.clock_mhz, 1700, 1550]
at_clock = pd.DataFrame({"clock (MHz)": clocks})
at_clock["could do (TFLOP/s)"] = [h200.at_clock("bf16", c) for c in clocks]
at_clock["share that cuBLAS reached"] = reached / at_clock.iloc[:, 1]
least_mhz = reached / above * highest
print(f"it ran at {least_mhz:,.0f} MHz or more: a lower clock is too slow")
plots.table(at_clock)

# %%
# Change one thing: the data
# --------------------------
# Flipping a bit takes power and leaving it alone takes little. A matmul of
# zeros can therefore keep a higher clock than the same matmul of random
# numbers, and a benchmark on zeros promises a rate that no real program gets.
# The difference is one word:
#
# .. code-block:: diff
#
#    -a = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
#    +a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
#
# How large the effect is can only be measured on the card itself. The two runs
# at the end of this page are that experiment; a CPU cannot answer it.

# %%
# Verdict
# -------
# Judge a long matmul by a ceiling measured on the same card, or by the speed
# of light at its settled clock. Against the datasheet, a very good one looks a
# fifth short. Beating a measured ceiling is a finding. Beating the datasheet
# means that the clock was above the quoted one. Above
# :measured:`15_real_ceilings.above:,.0f` TFLOP/s an H200 has no clock that
# would explain it, so the measurement is wrong. (The guide's worked example,
# :doc:`02_starved_input_pipeline`, is far below any ceiling: fix the waiting
# first.)

# %%
# Limits
# ------
# * The reported figures are from other people's cards, whose power limit,
#   cooling and clocks are mostly not stated. A burst after a pause is faster
#   than a second of work.
# * The matmul of the trace was launched once in each capture, and its sizes
#   are inferred.
# * A ceiling is the best rate of one program. Another program may pass it.
# * Transfers here are sequential. Scattered access is another question.

# %%
# Run it yourself
# ---------------
# Your card's ceilings as a file, and a trace compared with them:
#
# .. code-block:: console
#
#    $ nsightkit peaks H200
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
#    $ python examples/15_real_ceilings.py

downloads = {"a matmul beside cuBLAS, on an H200": trace.trace}

# %%
# Exercises
# ---------
# 1. In the downloaded trace, ``nsightkit kernels`` gives the time of the
#    library's kernel, whose name starts with ``nvjet``. Work out its rate: the
#    matmul has M = N = 2048 and K = 8192.
#
#    .. dropdown:: Answer
#
#       Twice M times N times K operations in
#       :measured:`15_real_ceilings.cublas_us:.1f` µs are
#       :measured:`15_real_ceilings.cublas:.0f` TFLOP/s.
#
# 2. A colleague measures a bf16 matmul at
#    :measured:`15_real_ceilings.above:,.0f` TFLOP/s on an H200, in one launch
#    after a pause. Wrong, or possible?
#
#    .. dropdown:: Answer
#
#       Just possible: it means every tensor core busy at the highest clock.
#       Ask for the median of a second of launches and for the clock.
#
# 3. Your layer reaches most of the measured ceiling and a much smaller share
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
# A square bf16 matmul, over and over, after a second of warm-up. Each matmul
# is a point. If the first ones are faster, the card was still cool, or its
# clock still high.

from _lib import climb

from nsightkit.analysis.core import noise
from nsightkit.analysis.roofline import sol
from nsightkit.guide import headline, measure
from nsightkit.workloads import ceilings

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


before = product("before", "bf16", 800)
if before:
    plots.step_times(
        {"bf16": before.values("step_ns")},
        title=f"One matmul, over and over ({before.mode})",
    )
before

# %%
# The same matmul, of zeros. A comparison needs a GPU:

# fold: How the figure is made
after = product("after", "bf16", 800, zeros=True)
if before.gpu and after.gpu:
    plots.step_times(
        {"random": before.values("step_ns"), "zeros": after.values("step_ns")},
        title=f"A matmul of random numbers and of zeros ({after.mode})",
    )
after

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


runs = [
    before,
    product("large", "bf16", 100, large),
    product("qkv", "bf16", 3500, qkv),
    product("out", "bf16", 8000, out),
    product("layer", "bf16", 2000, gate_up),
    product("down", "bf16", 4000, down),
    product("fp16", "fp16", 800),
    product("tf32", "tf32", 400),
    product("fp32", "fp32", 60, steps=60),
    product("fp8", "fp8", 1200),
    transfer("copy"),
    transfer("triad"),
    transfer("read"),
]

# %%
# Where the share of the datasheet is low and the share at the card's own clock
# is high, power is the limit, not the program.


# fold: How the table is made
def judged(run):
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
    table = pd.DataFrame(judged(run) for run in runs)
    numbers = table.columns[2:-1]
    table[numbers] = table[numbers].astype(float)
    plots.table(table)

# %%
# The answer from the runs:

# fold: How the answer is put together
said = ""
if all(runs):
    rates = sol.ceilings(
        [sol.ceiling(run.parameters, run.median("step_ns")) for run in runs],
        before.label,
    )
    said = (
        f"bf16 matmuls reach {rates.tflops['bf16']:.3g} TFLOP/s and "
        f"transfers {rates.gb_per_s:,.0f} GB/s"
    )
    gpu = climb.gpu_of(before)
    if gpu:
        said += (
            f", {rates.tflops['bf16'] / gpu.peak('bf16').tflops:.0%} and "
            f"{rates.gb_per_s / gpu.gb_per_s:.0%} of the datasheet"
        )
if said and before.gpu and after.gpu:
    zeros = noise.ratio(before.values("step_ns"), after.values("step_ns"))
    words = "less" if zeros.value < 1 else "more"
    effect = f"{abs(zeros.value - 1):.0%} {words} time than"
    if not zeros.excludes(1):
        effect = "the same time, within the noise, as"
    said += f"; a matmul of zeros takes {effect} one of random numbers"
said += "."
best = {
    (figure.gpu, figure.unit): figure.share
    for figure in published.best_products()
}
findings = headline(
    said,
    after,
    *runs,
    otherwise=(
        f"the best bf16 and fp16 matmuls sustain {best['H200', 'bf16']:.0%} "
        f"of the datasheet on an H100 or H200 and {best['B200', 'bf16']:.0%} "
        f"on a B200 (reported). cuBLAS in a trace from an H200 reaches "
        f"{library['sol_datasheet']:.0%}. Always name the yardstick of a "
        f"share: the datasheet, a measured ceiling, or the settled clock."
    ),
    badge=trace.label,
    hopper=best["H200", "bf16"],
    above=above,
    cublas=reached,
    cublas_us=library["time_ns"] / 1e3,
)
