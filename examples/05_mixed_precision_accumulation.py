"""
Why do half-precision sums come out wrong?
==========================================

Add 0.01 a thousand times and you expect 10. In bf16 the total stops growing
less than half way there. No error is raised, and no value is infinite. Which
part of the sum needs more bits: the numbers that are added, or the total?

.. in-short::
"""

# %%
# The symptom
# -----------
# A running sum hides in many places of a training loop: gradients accumulated
# over small batches, a mean loss, a weight that is updated step by step. We
# use the simplest one:

# sphinx_gallery_thumbnail_number = 1
# record: 15 s
import torch


def add_up(dtype, count=1000):
    """Add a hundredth to a total of this type, and keep each total."""
    total, addend = torch.zeros(2, dtype=dtype)
    addend += 0.01
    totals = []
    for _ in range(count):
        total += addend
        totals.append(float(total))
    return totals


# %%
# Predict: where does a total stop?
# ---------------------------------
# A floating-point type has a fixed number of significant bits. Between two
# powers of two its numbers are evenly spaced, and the spacing doubles at each
# power. Every result is rounded to the nearest of these numbers. With that we
# can work out every sum on this page before adding anything.

import math

BITS = {"fp32": 24, "fp16": 11, "bf16": 8}


def spacing(value, kind):
    """Distance between the numbers of a type around a value."""
    return 2.0 ** (math.frexp(value)[1] - BITS[kind])


def rounded(value, kind):
    """Give the nearest number of a type; a tie goes to the even one."""
    step = spacing(value, kind)
    return round(value / step) * step


# %%
# With bf16's eight bits, at which total does adding 0.01 change nothing? And
# does an fp16 total, with eleven bits, reach 10?
#
# .. dropdown:: Answer
#
#    An addition is lost when the addend is less than half a spacing. Between 4
#    and 8 the numbers of bf16 are 1/32 apart, and half of that is more than
#    0.01. So the total stops at 4. An fp16 total keeps growing, but each step
#    is rounded up or down: it ends near 10 without reaching it exactly.

# %%
# Evidence: can we predict every sum to the last bit?
# ---------------------------------------------------
# The same arithmetic on paper, for totals and addends of several types:

count, block = 1000, 25


def running(total, added, block=1):
    """Work out the total after each block of additions."""
    held, now, totals = rounded(0.01, added), 0.0, []
    for _ in range(count // block):
        part = 0.0
        for _ in range(block):
            part = rounded(part + held, total)
        now = rounded(now + part, total)
        totals.append(now)
    return totals


# %%
# The sum of each combination, and where its error comes from:

# fold: How the table is made
import pandas as pd

from nsightkit import plots

TYPES = {  # of the total, of the addend
    "fp32": ("fp32", "fp32"),
    "fp16": ("fp16", "fp16"),
    "fp32 of fp16": ("fp32", "fp16"),
    "fp32 of widened fp16": ("fp32", "fp16"),
    "bf16": ("bf16", "bf16"),
    "fp32 of bf16": ("fp32", "bf16"),
}
predicted = {name: running(*types) for name, types in TYPES.items()}
rows = []
for name, (total, added) in TYPES.items():
    if "widened" not in name:
        of_addends = count * rounded(0.01, added)
        row = {"total": total, "addends": added, "sum": predicted[name][-1]}
        row["error of the addends"] = of_addends - 10
        rows.append(row | {"error of adding": row["sum"] - of_addends})
formats = dict.fromkeys(rows[0].keys() - {"total", "addends"}, "{:+z.4f}")
plots.table(pd.DataFrame(rows), formats | {"sum": "{:.4f}"})

# %%
# The addend is rounded once, when it is stored, and a thousand of them carry
# that error a thousand times. An fp32 total adds almost nothing to it. A bf16
# or fp16 total adds a new error in every addition, and that error is by far
# the larger one.

# fold: How the figure is drawn
import matplotlib.pyplot as plt

LOOKS = {"fp32": "#7d8590", "fp16": "#2f7fc1", "bf16": "#d9690f"}


def draw_totals(series, title):
    """Totals against the number of additions, named at their ends."""
    figure, axes = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
    said = []
    for (kind, totals), shift in zip(series.items(), (7, -7, 0), strict=True):
        line = "--" if kind == "fp16" else "-"
        axes.plot(totals, line, color=LOOKS[kind], lw=2)
        end = (len(totals), totals[-1])
        axes.annotate(
            f"{kind}: {totals[-1]:.4f}",
            end,
            (6, shift),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
        said.append(f"{kind} ends at {totals[-1]:.4f}")
    axes.set(xlabel="additions", ylabel="total", xlim=(0, 1.2 * count))
    axes.set_xticks(range(0, count + 1, 200))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left")
    figure.set_label(f"{title}: {', '.join(said)}.")


draw_totals(
    {kind: predicted[kind] for kind in BITS},
    "A hundredth, added a thousand times (exact)",
)

# %%
# The bends are at powers of two, where the spacing doubles. The bf16 line goes
# flat at the total we predicted. So far all of this is paper. Does the program
# at the top of the page agree, in each of its thousand totals? Its result is
# the same on a CPU and on a GPU:

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
for kind, dtype in zip(BITS, DTYPES, strict=True):
    totals = add_up(dtype)
    same = sum(map(float.__eq__, totals, predicted[kind]))
    print(f"{kind}: {totals[-1]:.4f}, {same} of {count} totals are equal")

# %%
# Change one thing: the order
# ---------------------------
# Sum up blocks, then add the sums of the blocks. The types stay the same, but
# a total is never much larger than the number added to it:
#
# .. code-block:: diff
#
#    -for x in addends:
#    -    total += x
#    +for block in addends.split(25):
#    +    part = 0
#    +    for x in block:
#    +        part += x
#    +    total += part
#
# By the same arithmetic:

# fold: How the table is made
in_blocks = {name: running(*types, block) for name, types in TYPES.items()}
orders = {
    "one chain": predicted,
    f"blocks of {block}": in_blocks,
}
rows = [
    {"order": name} | {kind: sums[kind][-1] for kind in BITS}
    for name, sums in orders.items()
]
plots.table(pd.DataFrame(rows), dict.fromkeys(BITS, "{:.4f}"))

# %%
# PyTorch's own ``sum`` and ``mean`` go further: they keep fp32 totals
# internally and round once, at the end. :doc:`06_what_autocast_casts` shows
# which operations of a training step, such as the one in the guide's
# :ref:`worked example <worked-example>`, autocast keeps in fp32 for this
# reason.

# %%
# Verdict
# -------
# The total needs the bits. Rounding the addends costs a proportional error
# once. Rounding the total costs an error in every addition, until an addition
# no longer changes anything.

# %%
# Limits
# ------
# * Equal addends are a bad case: up to the next power of two, each rounding
#   goes the same way. Errors of random addends partly cancel and grow more
#   like the square root of their number.
# * Blocked sums also look good here because the block totals happen to be
#   round.
# * By default, tensor cores keep fp32 totals for fp16 and bf16 operands, with
#   roundings inside. Recent versions of PyTorch can turn that off for fp16:
#   ``torch.backends.cuda.matmul.allow_fp16_accumulation``.
# * A long matmul may be split along its inner dimension and its parts added.
#   PyTorch lets cuBLAS add them in the operands' type unless
#   ``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`` is
#   off. Turn it off to see whether a result depends on it.

# %%
# Run it yourself
# ---------------
# To run this page's script, with a GPU or without one. The sums are the same:
#
# .. code-block:: console
#
#    $ python examples/05_mixed_precision_accumulation.py
#
# A sum of any size, from the folder ``examples``:
#
# .. code-block:: python
#
#    from _lib import accumulation
#
#    with accumulation.run("cpu", addend=0.1, count=4096) as sums:
#        for row in sums.rows():
#            if row["sum"] == "bf16" and row["added"] == 4096:
#                print(row["total"])

# %%
# Exercises
# ---------
# 1. A program counts samples by adding 1 to a total. At which number does the
#    counter stop in bf16, in fp16 and in fp32?
#
#    .. dropdown:: Answer
#
#       At two to the power of the type's bits: 256, 2048 and 16,777,216. There
#       half a spacing is exactly 1, and the tie goes to the even number, which
#       is the total itself. Try ``torch.tensor(2.0**24) + 1 == 2.0**24``.
#
# 2. A weight of 1.0 is kept in bf16, and an update adds 0.001. How far does
#    the weight move?
#
#    .. dropdown:: Answer
#
#       It does not move. Above 1 the numbers of bf16 are 1/128 apart, and half
#       of that is 0.0039. This is why optimizers keep fp32 weights, or add the
#       update with stochastic rounding.
#
# 3. Above, the fp16 total ended near 10. Keep adding 0.01: does it ever stop?
#
#    .. dropdown:: Answer
#
#       At 32, where half a spacing is 1/64. ``add_up(torch.float16, 6000)``
#       shows it.

# %%
# Measured here
# -------------
# .. own-run::
#
# The same sums on a real device, and a matmul of the same addends. First in
# one chain:

# fold: How the runs are compared
from _lib import accumulation

from nsightkit.guide import headline, measure

# Six chains of 1,000 additions that depend on each other: 6,000 launches of
# 5 µs are 30 ms. The result does not depend on the device.
before = measure(
    "accumulation/before",
    accumulation.run,
    gpu=dict(block=1),
    small=dict(block=1),
)
after = measure(
    "accumulation/after",
    accumulation.run,
    gpu=dict(block=block),
    small=dict(block=block),
)


def totals_of(run, name):
    """Give the running totals of one sum."""
    return run.rows.loc[run.rows["sum"] == name, "total"].tolist()


if before and after:
    draw_totals(
        {kind: totals_of(before, kind) for kind in BITS},
        f"A hundredth, added a thousand times ({before.mode})",
    )
before

# %%
# Then in blocks:

after

# %%
# Each element of a matmul is also a sum of a thousand terms. If it equals the
# sum with an fp32 total, rounded once, then the matmul kept more bits inside
# than its operands have. That rules out a half-precision total; it does not
# prove an fp32 one.

# fold: How the table is made
products = pd.DataFrame()
if before and after:
    rows = []
    for kind in ("fp16", "bf16"):
        inside = totals_of(before, f"fp32 of {kind}")[-1]
        row = {"operands": kind, "with an fp32 total": rounded(inside, kind)}
        row["with a total of its type"] = totals_of(before, kind)[-1]
        row["matmul"] = totals_of(before, f"matmul {kind}")[0]
        rows.append(row)
    products = pd.DataFrame(rows)
formats = dict.fromkeys(products.columns[1:], "{:.4f}")
plots.table(products, formats) if len(products) else None

# %%
# The answer from the runs, bit by bit:

# fold: How the answer is put together
last = {kind: predicted[kind][-1] for kind in BITS}
now = {kind: in_blocks[kind][-1] for kind in BITS}
answer = (
    f"instead of 10, the sum is {last['fp32']:.4f} in fp32, "
    f"{last['fp16']:.4f} in fp16 and {last['bf16']:.4f} in bf16. Added in "
    f"blocks, it is {now['fp16']:.4f} and {now['bf16']:.4f}. The total needs "
    f"the bits, not the addends."
)
said = ""
if before and after:
    right = 0
    for name in TYPES:
        right += totals_of(before, name)[-1] == predicted[name][-1]
        right += totals_of(after, name)[-1] == in_blocks[name][-1]
    count_of_sums = 2 * len(TYPES)
    said = (
        f"{answer} {right} of {count_of_sums} sums match the prediction "
        "exactly."
    )
findings = headline(said, before, after, otherwise=answer, badge="exact")
