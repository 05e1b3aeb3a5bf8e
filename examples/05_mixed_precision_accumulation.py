"""
Why do half-precision sums come out wrong?
==========================================

Add 0.01 a thousand times and you expect 10. In bf16 the total stops growing
less than halfway there. No error is raised, and no value is infinite. Which
part of the sum needs more bits: the numbers that are added, or the total?

.. in-short::
"""

# %%
# The symptom: a total that stops
# -------------------------------
# A running sum hides in many places of a training loop: gradients accumulated
# over small batches, a mean loss, a weight that is updated step by step. We
# use the simplest one:

# sphinx_gallery_thumbnail_number = 1
# record: 15 s
# fold: Imports
import pandas as pd
import torch
from _lib import accumulation, totals

from nsightkit import plots
from nsightkit.guide import headline, measure

# %%


def add_up(dtype, count=1000):
    """Add a hundredth to a total of this type, and keep each total."""
    total, addend = torch.zeros(2, dtype=dtype)
    addend += 0.01
    seen = []
    for _ in range(count):
        total += addend
        seen.append(float(total))
    return seen


DTYPES = {"fp32": torch.float32}
DTYPES |= {"fp16": torch.float16, "bf16": torch.bfloat16}
sums = {kind: add_up(dtype) for kind, dtype in DTYPES.items()}
totals.draw(sums, "A hundredth, added a thousand times (exact)")

# %%
# Predict: where does a total stop?
# ---------------------------------
# A floating-point type has a fixed number of significant bits: 24 in fp32, 11
# in fp16 and 8 in bf16. Between two powers of two its numbers are evenly
# spaced, and the spacing doubles at each power. Every result is rounded to the
# nearest of these numbers. With bf16's eight bits, at which total does adding
# 0.01 change nothing? And does an fp16 total reach 10?
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
# The bends of the bf16 line are at powers of two, where the spacing doubles,
# and it goes flat at the total we predicted. That is one number. We can do the
# same rounding on paper for each of the thousand additions, and compare with
# the program. Its result is the same on a CPU and on a GPU:

predicted = totals.predicted()
for kind, seen in sums.items():
    same = sum(map(float.__eq__, seen, predicted[kind]))
    print(f"{kind}: {seen[-1]:.4f}, {same} of {len(seen)} totals are equal")

# %%
# On paper we can also mix types. Where does the error of each combination come
# from?

errors = totals.errors(predicted)
looks = dict.fromkeys(errors.columns[3:], "{:+z.4f}")
plots.table(errors, looks | {"sum": "{:.4f}"})

# %%
# The addend is rounded once, when it is stored, and a thousand of them carry
# that error a thousand times. An fp32 total adds almost nothing to it. A bf16
# or fp16 total adds a new error in every addition, and that error is by far
# the larger one.

# %%
# Change one thing: the order
# ---------------------------
# Sum up blocks, then add the sums of the blocks. The types stay the same, but
# a total is at most forty times the number added to it, not a thousand times:
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
block = 25
in_blocks = totals.predicted(block)
orders = {"one chain": predicted, f"blocks of {block}": in_blocks}
rows = [
    {"order": name} | {kind: seen[kind][-1] for kind in DTYPES}
    for name, seen in orders.items()
]
plots.table(pd.DataFrame(rows), dict.fromkeys(DTYPES, "{:.4f}"))

# %%
# PyTorch's own ``sum`` and ``mean`` go further: they keep fp32 totals
# internally and round once, at the end. :doc:`06_what_autocast_casts` shows
# which operations of a training step autocast keeps in fp32 for this reason.

# %%
# Verdict
# -------
# The total needs the bits. Rounding the addends costs a proportional error
# once. Rounding the total costs an error in every addition, until an addition
# no longer changes anything. So keep every running total of your loop in fp32,
# for addends of any type, and print it once next to a float64 sum.

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
# On a GPU, this page's script also adds the sums up there. Without a GPU it
# uses the CPU:
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
# The same sums on a real device, in one chain and in blocks.

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
if before and after:
    title = f"A hundredth, added a thousand times ({before.mode})"
    totals.draw({k: totals.of(before, k) for k in DTYPES}, title)
before

# %%
# Each element of a matmul is also a sum of a thousand terms. If it equals the
# sum with an fp32 total, rounded once, the matmul did not use a half-precision
# total.

matmuls = totals.matmuls(before) if before and after else pd.DataFrame()
looks = dict.fromkeys(matmuls.columns[1:], "{:.4f}")
plots.table(matmuls, looks) if len(matmuls) else None

# %%

# fold: How the answer is put together
last = {kind: seen[-1] for kind, seen in predicted.items()}
now = {kind: seen[-1] for kind, seen in in_blocks.items()}
answer = (
    f"Because the total is rounded in every addition. In bf16 the sum stops "
    f"at {last['bf16']:.4f} instead of ten. It is {last['fp16']:.4f} in fp16 "
    f"and {last['fp32']:.4f} in fp32. Added in blocks of {block}, it is "
    f"{now['fp32']:.4f} in fp32, {now['fp16']:.4f} in fp16 and "
    f"{now['bf16']:.4f} in bf16."
)
said = ""
if before and after:
    right = totals.right(before, last) + totals.right(after, now)
    said = f"{answer} {right} of {2 * len(last)} sums match the prediction "
    said += "exactly."
findings = headline(said, before, after, otherwise=answer, badge="exact")
