"""
Why do sums in 16 bits come out wrong?
======================================

A hundredth, added a thousand times, is ten. Numbers of 16 bits give other
answers, and one of them stops growing less than half way. Which part of a sum
needs more bits, the addends or the total?

What is measured: the same sum with totals and addends in fp32, fp16 and bf16,
every running total kept, then the same in blocks. What came out:
:measured:`05_mixed_precision_accumulation.verdict`

What one needs: nothing to read this page, a minute and a CPU with PyTorch to
repeat it; an NVIDIA GPU to see its matrix products.
"""

# %%
# Expectation
# -----------
# A floating-point type has so many significant bits. Its numbers are therefore
# evenly spaced between two powers of two, and the spacing doubles at each
# power. A sum is rounded to the nearest of them. That is all one needs to know
# to work every sum of this page out beforehand.

# sphinx_gallery_thumbnail_number = 1
import math

BITS = {"fp32": 24, "fp16": 11, "bf16": 8}


def spacing(value, kind):
    """Distance between the numbers of a type around a value."""
    return 2.0 ** (math.frexp(value)[1] - BITS[kind])


def rounded(value, kind):
    """Give the nearest number of a type; a tie goes to the even one."""
    step = spacing(value, kind)
    return round(value / step) * step


addend, count = 0.01, 1000
for kind in BITS:
    held = rounded(addend, kind)
    print(f"{kind} holds {held:.10f}: {held / addend - 1:+.1e}")

# %%
# The addend is off before anything is added, and a thousand of them are off by
# as much. What happens to the total depends on its size: the larger it is, the
# coarser are the steps in which it can grow. A step of the total is a whole
# number of spacings: zero when the addend is less than half of one.

import pandas as pd

from nsightkit import plots

rows = []
for power in range(-2, 4):
    row = {"total from": f"{2.0**power:g}", "to": f"{2.0 ** (power + 1):g}"}
    for kind in ("fp16", "bf16"):
        step = spacing(2.0**power, kind)
        row[f"{kind} spacing"] = step
        row[f"{kind} grows by"] = round(rounded(addend, kind) / step) * step
    rows.append(row)
plots.table(pd.DataFrame(rows))

# %%
# In fp16 the total grows too fast and too slowly by turns. In bf16 it does not
# grow at all from a certain power of two on, where ``x + a == x``. An fp32
# total has room for both. Rounding after each addition gives the sums:


def running(total, added, block=1):
    """Work out the total after each block of additions."""
    held, now, totals = rounded(addend, added), 0.0, []
    for _ in range(count // block):
        part = 0.0
        for _ in range(block):
            part = rounded(part + held, total)
        now = rounded(now + part, total)
        totals.append(now)
    return totals


TYPES = {  # of the total, of the addend
    "fp32": ("fp32", "fp32"),
    "fp16": ("fp16", "fp16"),
    "fp32 of fp16": ("fp32", "fp16"),
    "fp32 of widened fp16": ("fp32", "fp16"),
    "bf16": ("bf16", "bf16"),
    "fp32 of bf16": ("fp32", "bf16"),
}
predicted = {name: running(*types) for name, types in TYPES.items()}
for name, totals in predicted.items():
    print(f"{name:20} {totals[-1]:.4f}")

# %%
# "Widened" converts the addend to fp32 first, the other leaves that to the
# addition. They should agree: converting cannot bring back what was rounded
# away when the addend was stored.

# %%
# Measure
# -------
# PyTorch adds, one number at a time, on the device of the provenance block. A
# total is written to memory in its own type after each addition.

from nsightkit.investigations import measure

before = measure("accumulation", "before")
before

# %%
# Read
# ----
# The last totals, and where their error comes from: ``count`` times what the
# stored addend is off, and the rest, which the additions made.

exact = before.parameters["count"] * before.parameters["addend"]


def results(run, expected):
    """Compare last totals with what was worked out, and split their error."""
    rows = []
    for name, totals in expected.items():
        total = run.values(f"sum/{name}")[-1]
        stored = run.values(f"addend/{name}")[0]
        ideal = run.parameters["count"] * stored
        rows.append(
            {
                "sum": name,
                "worked out": totals[-1],
                "measured": total,
                "error of addends": ideal - exact,
                "error of adding": total - ideal,
            }
        )
    return pd.DataFrame(rows)


sums = results(before, predicted)
formats = dict.fromkeys(["worked out", "measured"], "{:.4f}")
formats |= dict.fromkeys(["error of addends", "error of adding"], "{:+.1e}")
plots.table(sums, formats)

# %%
# An fp32 total of 16-bit addends makes no error of its own: what is wrong with
# it was wrong with its addends. A 16-bit total adds an error that is larger.
# The totals on their way:

import matplotlib.pyplot as plt
import numpy as np

LOOKS = {
    "fp32": ("#7d8590", "-"),
    "fp16": ("#2f7fc1", "--"),
    "fp32 of fp16": ("#17936b", "-."),
    "bf16": ("#d9690f", "-"),
    "fp32 of bf16": ("#b565a7", ":"),
}


def curves(axes, run, names, what):
    """Draw totals or errors against the number of additions."""
    for name in names:
        totals = run.values(f"sum/{name}")
        made = run.parameters["block"] * np.arange(1, len(totals) + 1)
        ideal = made * run.parameters["addend"]
        error = np.abs(totals - ideal) / ideal
        error[error == 0] = np.nan  # has no place on a logarithmic axis
        colour, line = LOOKS[name]
        y = totals if what == "total" else error
        axes.plot(made, y, line, color=colour, lw=2, label=name)
    axes.set(xlabel="additions", ylabel=what)
    axes.spines[["top", "right"]].set_visible(False)


def finish(figure, axes, title, said):
    """Put a title, a legend below, and words for those who do not see it."""
    axes.set_title(title, loc="left")
    place = "outside lower center"
    figure.legend(frameon=False, fontsize=9, loc=place, ncols=5)
    figure.set_label(f"{title}: {said}.")


figure, axes = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
curves(axes, before, ["fp32", "fp16", "bf16"], "total")
last = {kind: before.values(f"sum/{kind}")[-1] for kind in BITS}
said = ", ".join(f"{k} ends at {v:.4f}" for k, v in last.items())
finish(figure, axes, f"Totals of one type each ({before.mode})", said)

# %%
# The bf16 total stops where the table above says that it grows by nothing.
# From which addition on it made no difference:

totals = before.values("sum/bf16")
stopped = int(np.argmax(totals == totals[-1])) + 1
half = spacing(totals[-1], "bf16") / 2
print(f"{totals[-1]:g} is reached after {stopped} of {len(totals)} additions")
print(f"half a spacing there is {half}, more than the addend")

# %%
# The errors, relative to what the total should be at that moment. A flat line
# is an error of the addend, in proportion from the first addition on; a rising
# one is made by adding. It dips where it changes its sign, and breaks off
# where a total happens to be right.

figure, axes = plt.subplots(figsize=(7.6, 3.8), layout="constrained")
curves(axes, before, list(LOOKS), "relative error")
axes.set(xscale="log", yscale="log", ylim=(1e-9, 2))
worst = {n: abs(before.values(f"sum/{n}")[-1] / exact - 1) for n in LOOKS}
said = ", ".join(f"{n} ends at {v:.2g}" for n, v in worst.items())
finish(figure, axes, f"How the error grows ({before.mode})", said)

# %%
# Does a matrix product do this? It is a thousand additions for each element,
# too. With an fp32 total inside, only its result would be rounded to 16 bits;
# with a 16-bit one it would be the sum above:

rows = []
for kind in ("fp16", "bf16"):
    inside = before.values(f"sum/fp32 of {kind}")[-1]
    rows.append(
        {
            "operands": kind,
            "with an fp32 total": rounded(inside, kind),
            "with a 16-bit total": before.values(f"sum/{kind}")[-1],
            "matrix product": before.values(f"matmul/{kind}")[0],
        }
    )
products = pd.DataFrame(rows)
plots.table(products, dict.fromkeys(products.columns[1:], "{:.4f}"))

# %%
# A product that equals the first column has added up more than 16 bits. That
# rules a 16-bit total out; it does not prove one of fp32.

# %%
# Change one thing
# ----------------
# The order. Sum up blocks, then add the sums: a total is then never that much
# larger than what is added to it. The types stay. Rounding errors add up along
# the longest chain of additions, which is shorter by far:

from nsightkit.investigations import parts as investigations

part = investigations.find("accumulation", "after")
block = part.parameters("live")["block"]
print("one chain:", count, "additions")
print(f"blocks of {block}:", block + count // block, "additions")
print("pairs of pairs:", math.ceil(math.log2(count)), "additions")

# %%
# Worked out beforehand by the same arithmetic:

in_blocks = {name: running(*types, block) for name, types in TYPES.items()}
for name in ("fp16", "bf16"):
    print(f"{name}: {in_blocks[name][-1]:.4f}")

# %%
# Measure again
# -------------

after = measure("accumulation", "after")
after

# %%

repaired = results(after, in_blocks)
plots.table(repaired, formats)

# %%
# The error of the 16-bit totals, in one chain and in blocks:

figure, (left, right) = plt.subplots(
    1, 2, figsize=(7.6, 3.4), layout="constrained"
)
for axes, kind in ((left, "fp16"), (right, "bf16")):
    said = []
    for run, line in ((before, "-"), (after, "--")):
        totals = run.values(f"sum/{kind}")
        size = run.parameters["block"]
        made = size * np.arange(1, len(totals) + 1)
        error = np.abs(totals / (made * addend) - 1)
        name = "one chain" if size == 1 else f"blocks of {size}"
        axes.plot(made, error, line, color=LOOKS[kind][0], lw=2, label=name)
        said.append(f"{name} ends at {error[-1]:.2g}")
    axes.set(xlabel="additions")
    axes.set_title(f"{kind} ({run.mode})", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    label = f"{figure.get_label()} {kind}: {', '.join(said)};"
    figure.set_label(label.strip())
left.set_ylabel("relative error")
figure.set_label(f"Relative error by order of additions. {label[:-1]}.")

# %%
# Verdict
# -------
# Computed from the tables above:

import textwrap

pairs = pd.concat([sums, repaired])
right_sums = int((pairs["worked out"] == pairs["measured"]).sum())
gpus = [(run.provenance["gpu"] or {}).get("name") for run in (before, after)]
comparable = before.mode == after.mode and gpus[0] == gpus[1]
now = {kind: after.values(f"sum/{kind}")[-1] for kind in BITS}
where = "in a smoke run on a CPU, " if after.mode == "smoke" else ""
verdict = (
    f"{where}instead of {exact:g}, the sum is {last['fp32']:.4f} in fp32, "
    f"{last['fp16']:.4f} in fp16 and {last['bf16']:.4f} in bf16; added in "
    f"blocks, {now['fp16']:.4f} in fp16 and {now['bf16']:.4f} in bf16. "
    f"{right_sums} of {len(pairs)} sums are to the last bit what was worked "
    f"out."
)
if not comparable:
    verdict = "the two runs are not of the same machine; nothing to compare."
findings = {"verdict": verdict, "bf16": last["bf16"], "stopped": stopped}
print(textwrap.fill(verdict))

# %%
# So it is the total that needs the bits. Rounding the addends costs an error
# once, in proportion; rounding the total costs one in every addition, and in
# the end the addition itself.

# %%
# Limits
# ------
# Equal addends are a bad case: until the total passes a power of two, each
# rounding goes the same way. Errors of random ones partly cancel and grow more
# like the square root of their number. The sums in blocks, too, owe some of
# their luck to round numbers.
#
# Tensor cores keep fp32 totals for 16-bit operands, with roundings of their
# own inside, which are not those of fp32 additions. A long product may also be
# split, each part summed by itself and the parts added: blocks, as above. By
# default PyTorch lets cuBLAS add such parts in 16 bits:

for name, value in before.parameters.items():
    if name.startswith("allow"):
        print(f"torch.backends.cuda.matmul.{name} = {value}")

# %%
# Those switches decide nothing on a CPU. On a GPU, turn them off to see
# whether a result depends on it.
#
# The same arithmetic is why optimizers keep fp32 weights: a step of the
# learning rate times the gradient, added to a bf16 weight, is often less than
# half a spacing, and the weight then stays as it is.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``. Each sum
# is a range, and each addition in it an operator:

downloads = {
    f"{run.part}, {run.mode}, as a timeline": run.trace
    for run in (before, after)
}

# %%
# Run it yourself
# ---------------
# With a GPU this measures there, without one on the CPU:
#
# .. code-block:: console
#
#    $ python examples/05_mixed_precision_accumulation.py
#
# One sum of a size of your own:
#
# .. code-block:: python
#
#    from nsightkit.workloads import accumulation
#
#    with accumulation.start("cpu", addend=0.1, count=4096) as sums:
#        sums.step()
#        print(sums.observed()["sum/bf16"][-1])
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only accumulation
