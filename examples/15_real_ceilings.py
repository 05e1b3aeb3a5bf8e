"""
How fast is this card, really?
==============================

A datasheet has a number for each kind of arithmetic and one for the memory.
A program that reaches half of it may be half as good as it could be, or as
good as this card allows. Which?

What is measured: large matrix products in every precision, and transfers too
large for any cache, until the clocks have settled. What came out:
:measured:`15_real_ceilings.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# The datasheet's rates hold at the boost clock. A board may draw so much power
# and no more, and a matrix product on tensor cores is what draws the most: its
# clock falls until the power fits. So large products should stay clearly below
# the datasheet, most in 16 and 8 bits, and transfers come closer to it. For an
# H200, without sparsity:

# sphinx_gallery_thumbnail_number = 1
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import sol
from nsightkit.errors import UsageError

SHEET = {"unit": "unit", "accumulate": "sums in", "tflops": "TFLOP/s"}
SHEET |= {"gb_per_s": "GB/s", "clock_mhz": "clock (MHz)", "source": "source"}
sheet = pd.DataFrame(hardware.rows(hardware.find("H200")))
plots.table(sheet[list(SHEET)].rename(columns=SHEET))

# %%
# What a clock does to a rate is arithmetic: multiprocessors, operations of
# each in a clock, and the clock.

h200 = hardware.find("H200")
rows = []
for clock_mhz in (1830, 1700, 1550, 1400):
    tflops = h200.at_clock("bf16", clock_mhz)
    row = {"SM clock (MHz)": clock_mhz, "bf16 (TFLOP/s)": tflops}
    rows.append(row | {"share": tflops / h200.peak("bf16").tflops})
plots.table(pd.DataFrame(rows))

# %%
# And data decides the power: it takes power to flip a bit, and little to leave
# it. A product of zeros should be quicker than one of random numbers, though
# it is the same work. Benchmarks on zeros promise what no program gets.

# %%
# Measure
# -------
# A product of square matrices in bf16, over and over for a second before the
# clock counts. A step is one product.

from nsightkit.investigations import measure

before = measure("ceilings", "before")
before

# %%
# Read
# ----
# Each product is a point. If the first are quicker, the card was still cool,
# or its clock still high.

rate = sol.ceiling(before.parameters, before.median("step_ns"))
print(f"{rate['what']}: {rate['tflops']:.4g} TFLOP/s in {rate['unit']}")
plots.step_times(
    {rate["what"]: before.values("step_ns")},
    title=f"A matrix product, again and again ({before.mode})",
)

# %%
# The clock, the power and the duty cycle meanwhile, and what held the clock
# down in at least half of the readings, as the driver says. A ceiling belongs
# to its duty cycle: a burst after a pause runs at a clock that nothing keeps.

metrics = ["sm_clock_mhz", "power_w", "gpu_utilization_percent"]
state = {name: before.values(name) for name in metrics}
seen = pd.DataFrame(
    [
        {
            "metric": name,
            "median": pd.Series(values).median(),
            "least": values.min(),
            "most": values.max(),
        }
        for name, values in state.items()
        if len(values)
    ],
    columns=["metric", "median", "least", "most"],
)
if len(seen):
    print(seen.to_string(index=False))
    held = hardware.slowed_by(before.values("slowdown_mask"))
    print(f"clock held down by: {held or 'not said by this driver'}")
else:
    print("no driver here that could be asked for clock and power")

# %%
# Change one thing
# ----------------
# The data: matrices of zeros. In a benchmark of your own the difference is one
# word, and easily overlooked:
#
# .. code-block:: python
#
#    a = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
#    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)

# %%
# Measure again
# -------------

after = measure("ceilings", "after")
after

# %%
# The same product of either:

named = {"random": before, "zeros": after}
plots.step_times(
    {name: run.values("step_ns") for name, run in named.items()},
    title=f"A product of random numbers and of zeros ({after.mode})",
)

# %%
# Now everything else: products of the shapes that a transformer layer has and
# a larger square, the other precisions, and transfers. A copy reads and
# writes, a triad reads twice and writes, a sum only reads. A smoke run takes a
# few of them.

EVERYTHING = ["large", "qkv", "out", "layer", "down", "fp16", "tf32", "fp32"]
EVERYTHING += ["fp8", "copy", "triad", "read"]
FEW = ["fp32", "copy", "read"]
chosen = FEW if before.mode == "smoke" else EVERYTHING
runs = {"before": before}
runs |= {name: measure("ceilings", name) for name in chosen}
try:
    gpu = hardware.find((before.provenance["gpu"] or {})["name"])
except (KeyError, UsageError):
    gpu = None

rows = []
for run in runs.values():
    found = sol.ceiling(run.parameters, run.median("step_ns"))
    peak = gpu and found["unit"] != "memory" and gpu.peak(found["unit"])
    sheet = peak.tflops if peak else None
    if gpu and found["unit"] == "memory":
        sheet = gpu.gb_per_s
    got = found["tflops"] or found["gb_per_s"]
    clock = run.median("sm_clock_mhz")
    row = {"what": found["what"], "unit": found["unit"]}
    row |= {"TFLOP/s": found["tflops"], "GB/s": found["gb_per_s"]}
    row |= {"share of datasheet": got / sheet if sheet else None}
    there = peak and clock and gpu.at_clock(found["unit"], clock)
    row |= {"share at its clock": got / there if there else None}
    row |= {"clock (MHz)": clock, "power (W)": run.median("power_w")}
    held = hardware.slowed_by(run.values("slowdown_mask"))
    rows.append(row | {"held down by": held or "-"})
ceilings = pd.DataFrame(rows)
numbers = ceilings.columns[2:-1]
ceilings[numbers] = ceilings[numbers].astype(float)
plots.table(ceilings)

# %%
# The share of the datasheet is of the rate at its boost clock; the share at
# its clock, of what the units could do at the clock that they had. Where the
# first is low and the second high, power is the limit and not the program.
#
# These are the ceilings that other pages hold their operations against. Both
# shares are given there, of the datasheet and of these, and never mixed.

drawn = ceilings.set_index("what")
products = drawn[drawn["unit"] != "memory"].copy()
gemms = [r.parameters for r in runs.values() if r.parameters["kind"] == "gemm"]
products.index = [
    f"{p['precision']}, {p['m']}x{p['k']}x{p['n']}" for p in gemms
]
plots.panels(
    products,
    ["TFLOP/s", *(["share of datasheet"] if gpu else [])],
    title=f"Matrix products ({before.mode})",
)

# %%
# Verdict
# -------
# Computed from the runs:

import textwrap

from nsightkit.analysis.core import noise

quicker = noise.ratio(before.values("step_ns"), after.values("step_ns"))
zeros = quicker.value - 1
effect = f"{abs(zeros):.0%} {'less' if zeros < 0 else 'more'} time than"
if not quicker.excludes(1):
    effect = "the same time, within the spread of steps, as"
rates = sol.ceilings(
    [sol.ceiling(r.parameters, r.median("step_ns")) for r in runs.values()],
    before.label,
)
where = "in a smoke run on a CPU" if before.mode == "smoke" else "on a GPU"
best = (
    f"bf16 products reach {rates.tflops['bf16']:.3g} TFLOP/s and transfers "
    f"{rates.gb_per_s:,.0f} GB/s"
)
if gpu:
    best += (
        f", {rates.tflops['bf16'] / gpu.peak('bf16').tflops:.0%} and "
        f"{rates.gb_per_s / gpu.gb_per_s:.0%} of the datasheet"
    )
gpus = {(run.provenance["gpu"] or {}).get("name") for run in named.values()}
comparable = len(gpus) == 1 and before.mode == after.mode
verdict = (
    f"{where}, {best}; a product of zeros takes {effect} one of random "
    f"numbers."
)
if not comparable:
    verdict = "the two runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "bf16_tflops": rates.tflops["bf16"],
    "gb_per_s": rates.gb_per_s,
    "zeros": zeros,
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# A ceiling is what one program reached, not what no program can pass. Other
# shapes, layouts or libraries may reach more; a rate above these is a finding
# and not a mistake, one above the datasheet's is a mistake.
#
# Cards of one name differ in cooling, power limit and age. Ceilings belong to
# the card they were measured on, and to its temperature.
#
# Transfers are of fp32 and in order. What scattered access reaches is another
# question. On a CPU the same code runs, and its figures are about the CPU.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{name}, {run.mode}, as a timeline": run.trace
    for name, run in (runs | {"zeros": after}).items()
}

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/15_real_ceilings.py
#
# Your card's ceilings as a file, and a trace held against them:
#
# .. code-block:: console
#
#    $ nsightkit peaks --measure --format json > ceilings.json
#    $ nsightkit sol trace.json.gz --ceilings ceilings.json
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only ceilings
