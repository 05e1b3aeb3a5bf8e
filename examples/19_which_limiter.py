"""
Which limiter does Nsight Compute see?
======================================

A kernel takes its time. Is it held back by arithmetic, by memory or by
waiting? Nsight Compute's counters know, if they were collected and are read by
the right rule.

.. in-short::
"""

# %%
# Predict: six kernels, two bounds
# --------------------------------
# Six operations: a product of matrices on tensor cores, and one without them;
# an addition of long vectors, and the same with each number it reads in a
# sector of its own; a softmax over a few long rows; and a walk, each of whose
# addresses is what was read at the one before. Their shapes give a bound for
# each:

# sphinx_gallery_thumbnail_number = 2
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import counters, sol
from nsightkit.investigations import case
from nsightkit.investigations import parts as investigations
from nsightkit.investigations.pages import six_kernels

h200 = hardware.find("H200")
sizes = investigations.find("limiters", "before").gpu
operations = six_kernels.operations(sizes)
table = sol.bounds(operations, sol.datasheet(h200))
table["ridge"] = [h200.ridge(op.unit) for op in operations]
plots.table(table[["name", "intensity", "ridge", "bound"]])

# %%
# By their shapes four of the six look alike, limited by memory. Which of them
# would you expect to use the memory's bandwidth, and which to wait?
#
# .. dropdown:: Answer
#
#    The plain addition uses the bandwidth. The strided one uses it as well and
#    wastes most of it: a whole sector for each number. The softmax has a block
#    for each of its few rows, so most multiprocessors get no work. The walk
#    has one load under way in each thread. Both wait, for neither arithmetic
#    nor bandwidth.
#
# NVIDIA's rule goes by two numbers, the use of the busiest unit of compute and
# of the busiest part of the memory, each in percent of its peak. Either above
# a first threshold names the limiter. Both below a second one mean waiting. In
# between the higher one counts, if they are far enough apart.

# %%
# Evidence: a real report
# -----------------------
# Twelve launches on an A10G: ten kernels of somebody's ladder for one FP32
# product, from a naive one to tiles of warps, and cuBLAS twice.

ladder = case("ncu-esmm", "sgemm")
judged = counters.summary(ladder.report)
ladder

# %%
# What does the rule say?

import textwrap

for found, count in judged["classification"].value_counts().items():
    print(f"{count} of {len(judged)}: {found}")
for text in judged["evidence"].iloc[0] + judged["next_steps"].iloc[0]:
    print(textwrap.fill(text, break_on_hyphens=False))

# %%
# The report lacks the two numbers, so the rule gives no answer, and does not
# guess one from the kernels' names. What the report does have is times, launch
# sizes and the limits of occupancy, which is enough for two findings:

# fold: How the figure is made
launches = ladder.report.launches.copy()
launches["name"] = (
    launches["kernel"].str.extract(r"(\w+)[<(]|(\w+_nn)").bfill(axis=1)[0]
)
launches = launches.sort_values("time_ns", ascending=False, kind="stable")
launches = launches.drop_duplicates("name", keep="last").set_index("name")
launches = launches.rename(index={"ampere_sgemm_128x64_nn": "cuBLAS"})
best_ns = launches.loc["cuBLAS", "time_ns"]
launches["share of cuBLAS's speed"] = best_ns / launches["time_ns"]
fits = launches["theoretical_occupancy_pct"] / 100
launches["share of warp slots"] = fits
per_sm = launches["grid_blocks"] / launches["sm_count"]
launches["blocks per SM"] = per_sm
columns = ["share of cuBLAS's speed", "share of warp slots", "blocks per SM"]
plots.panels(
    launches, columns, title="One product, eleven kernels (case file)"
)

# %%
# *Occupancy is a means.* The fastest kernels have room for half as many warps
# as the slowest, because each thread keeps a larger tile in registers.
#
# *The last step is the grid.* The fastest tiles of the ladder give the card
# fewer blocks than it has multiprocessors, so some have nothing to do. The
# grid of cuBLAS has a third dimension: most likely it splits the sum over k,
# and so has several blocks for each.

# %%
# A drill with a known answer
# ---------------------------
# There is no real report with all counters on this site yet, so the six
# kernels above come with synthetic ones, from
# ``nsightkit.workloads.planted_counters``. They never ran on a GPU: the card
# does not exist, and how much each kernel uses of it was chosen. What was
# planted must be found:

from nsightkit.workloads import planted_counters as planted

example, truth = planted.counters()
answers = six_kernels.counted(example)
planted_as = [truth[name]["bound"] for name in answers["name"]]
right = (answers["classification"] == planted_as).sum()
print(f"found as planted: {right} of {len(answers)}")
plots.limiter_map(answers, title="Six kernels, six limiters (synthetic)")

# %%
# The two additions lie side by side, and one of them wastes most of what it
# moves. The two products are both limited by arithmetic, and only one does it
# on tensor cores. So the rule is the first question and not the last. What the
# warps of each wait for is the next one:

# fold: How the figure is made
plots.share_bars(
    six_kernels.waits(example, answers),
    title="What their warps wait for (synthetic)",
)

# %%
# ``long_scoreboard`` is memory, ``gmma`` the result of a tensor core,
# ``math_pipe_throttle`` a busy pipe. ``not_selected`` warps could run, but
# another did; ``selected`` is the one cycle in which a warp issues. The cycles
# between two instructions of a warp are the scheduler's active warps over its
# issue rate. Check that on any report before you believe it:

# fold: How the table is made
shown = example.launches[
    ["active_warps", "issue_pct", "latency_cycles"]
].copy()
shown.insert(0, "name", example.launches["ranges"].str[-1])
shown["by the rule"] = shown["active_warps"] / shown["issue_pct"] * 100
named = {"active_warps": "active warps", "issue_pct": "issue rate (%)"}
named |= {"latency_cycles": "cycles between"}
plots.table(shown.rename(columns=named))

# %%
# Every sentence of an answer cites the counters that it rests on, by the names
# that Nsight Compute has for them:


# fold: How the text is printed
def explain(row):
    """Print what speaks for a kernel's limiter, and what to try."""
    print(f"{row['name']}: {row['classification']}")
    for sign, texts in ("-", row["evidence"]), (">", row["next_steps"]):
        wrap = textwrap.TextWrapper(79, f"{sign} ", "  ")
        wrap.break_on_hyphens = wrap.break_long_words = False
        for text in texts:
            print(wrap.fill(text.replace(" %", "\N{NO-BREAK SPACE}%")))


explain(answers.set_index("name", drop=False).loc["strided"])

# %%
# Change one thing: rows for every multiprocessor
# -----------------------------------------------
# The softmax gets many rows, of as many numbers together. Everything else
# stays as it is, and is a control. The counters are synthetic again, and never
# ran on a GPU:
#
# .. code-block:: diff
#
#    -x = x.view(16, -1)
#    +x = x.view(16384, -1)
#     torch.softmax(x, -1)

many, _ = planted.counters(many_rows=True)
both = {"few rows": answers, "many rows": six_kernels.counted(many)}
SHOWN = ["classification", "sm_pct", "memory_pct"]
rows = [one.set_index("name").loc["softmax", SHOWN] for one in both.values()]
moved = pd.DataFrame(rows, index=list(both)).set_axis(
    ["limiter", "compute (%)", "memory (%)"], axis="columns"
)
moved = moved.astype({"compute (%)": float, "memory (%)": float})
plots.table(moved.rename_axis("softmax").reset_index())

# %%
# A kernel that waited is now limited by memory, at many times the throughput.
# That is what a repaired kernel looks like: it has a limiter again.

# %%
# Verdict
# -------
# Two numbers name the limiter, and the counters below them say what to do
# about it. Without the two numbers there is no answer. Launch sizes and
# occupancy are in every report, and on the real one they point at the grid.

# %%
# Limits
# ------
# * The real report has one launch of each kernel, and no counter of
#   throughput.
# * The synthetic counters obey the rules that real ones do, and no more. They
#   show how to read a report, not what a card does.
# * *Permission.* The counters are closed to ordinary users unless an
#   administrator opens them; Nsight Compute then says ``ERR_NVGPUCTRPERM``.
#   ``nsightkit doctor`` looks before.
# * *Replay.* Each launch runs many times, with its memory put back and the
#   caches emptied. Times under Nsight Compute are not those of the program.
# * *Clocks.* By default Nsight Compute locks them to base. ``nsightkit capture
#   ncu`` leaves them alone.
# * *Percent.* That of memory is the busiest level's, not the DRAM's. A high
#   one is not an achievement: the strided addition has one.

# %%
# Run it yourself
# ---------------
# The kernels of this page; save this as ``kernels.py``:
#
# .. code-block:: python
#
#    from nsightkit.workloads import limiters
#
#    sizes = dict(side=8192, side_fp32=4096, elements=2**26, rows=16)
#    with limiters.start("cuda", **sizes) as run:
#        for _ in range(3):
#            run.step()
#
# .. code-block:: console
#
#    $ nsightkit doctor
#    $ nsightkit capture ncu --nvtx softmax -o softmax -- python kernels.py
#    $ nsightkit ncu softmax.ncu-rep
#    $ nsightkit capture ncu --nvtx step --set full -o all -- python kernels.py
#    $ nsightkit ncu all.ncu-rep --within '^(add|strided)$'
#
# This page, and a GPU's results kept for it:
#
# .. code-block:: console
#
#    $ python examples/19_which_limiter.py
#    $ python -m nsightkit record --only limiters --only ceilings

# fold: The two reports, as files
import tempfile
from pathlib import Path

from nsightkit.trace import ncu

folder = tempfile.TemporaryDirectory()
planted_csv = ncu.write(example, Path(folder.name, "six-kernels.csv"))
downloads = {
    "twelve launches on an A10G": ladder.path,
    "six kernels, synthetic": planted_csv,
}

# %%
# Exercises
# ---------
# Both reports are downloads above, and ``nsightkit ncu`` reads them.
#
# 1. In the report from the A10G, what limits the occupancy of most kernels?
#    Would you raise it?
#
#    .. dropdown:: Answer
#
#       Registers, alone or with others, in
#       :measured:`19_which_limiter.by_registers` of
#       :measured:`19_which_limiter.launches` launches. Raising it would take
#       registers from the tiles that made these kernels fast. Look at the grid
#       first.
#
# 2. If every multiprocessor got its share of ``warptiling``'s blocks, how much
#    faster could it get at most, and would it then beat cuBLAS?
#
#    .. dropdown:: Answer
#
#       :measured:`19_which_limiter.fill:.2f` times, the multiprocessors over
#       the blocks. It would need :measured:`19_which_limiter.behind:.2f`, so
#       no: the grid explains most of the distance, and not all of it.
#
# 3. In the synthetic report, which kernel would gain most from a change of its
#    memory accesses, and how do you know?
#
#    .. dropdown:: Answer
#
#       The strided addition: its loads use a small part of each sector that
#       they move, which ``nsightkit ncu --within strided`` cites. Its percent
#       of DRAM looks as good as that of the plain addition.

# %%
# Measured here
# -------------
# .. own-run::
#
# All six kernels, one after the other, are a step. Where there is a GPU they
# run once more under Nsight Compute. First without counters: times against the
# roofs of this machine.

# fold: How the kernels are judged
import math

from nsightkit.investigations import headline, measure
from nsightkit.investigations.pages import climb

before = measure("limiters", "before")
after = measure("limiters", "after")
ran = {name: measure("ceilings", name) for name in ("before", "fp32", "copy")}
found = [sol.ceiling(r.parameters, r.median("step_ns")) for r in ran.values()]
card = climb.card_of(before)
roofs = [sol.datasheet(card)] if card else []
roofs.append(sol.ceilings(found, "measured here"))
first, second = six_kernels.times(before.trace), six_kernels.times(after.trace)
mine = six_kernels.operations(before.parameters, first.index)
without = sol.judge(mine, first, roofs[0], roofs[-1])
title = f"Six kernels under their roofs ({before.mode})"
plots.roofline(without, roofs, "bf16", title=title)
before

# %%
# Counters, where the driver permits them:

# fold: How the figures are made
was = six_kernels.counted(before.ncu_report)
now = six_kernels.counted(after.ncu_report)
for run in (before, after):
    if run.ncu_notice:
        said = f"{run.part}: no counters, or not all: {run.ncu_notice}."
        print(textwrap.fill(said))
if len(was):
    plots.limiter_map(was, title=f"Six kernels, six limiters ({before.mode})")
    title = f"What their warps wait for ({before.mode})"
    plots.share_bars(six_kernels.waits(before.ncu_report, was), title=title)
plots.table(was[["name", "classification", *SHOWN[1:]]]) if len(was) else None

# %%
# Times of both runs:

# fold: How the table is made
took = pd.DataFrame({"few rows": first, "many rows": second})
shown = (took / 1e3).add_suffix(" (µs)")
shown["ratio"] = took["many rows"] / took["few rows"]
plots.table(shown.rename_axis("name").reset_index())

# %%
# The second run, with rows for every multiprocessor:

after

# %%
# What the two runs say:


# fold: How the answer is put together
def classes_of(table):
    """Limiter by name."""
    return dict(zip(table["name"], table["classification"], strict=True))


add, strided, few = took["few rows"].reindex(["add", "strided", "softmax"])
rows_many = took["many rows"].get("softmax", math.nan)
sector, number = 32, 4  # bytes
wasted = (sector + number) / (number + number)
seen, then = classes_of(was), classes_of(now)
right = [name for name in seen if seen[name] == six_kernels.CASES[name]]
effect = (
    f"numbers from sectors of their own take {strided / add:.1f} times as "
    f"long to add (by the bytes: {wasted:.1f}), and the softmax over few rows "
    f"{few / rows_many:.1f} times as long as over many"
)
said = f"{effect}. There were no counters, so the rule says nothing here."
if seen and then:
    ends = (seen.get("softmax", "unknown"), then.get("softmax", "unknown"))
    moves = f"goes from {ends[0]} to {ends[1]}"
    if ends[0] == ends[1]:
        moves = f"stays {ends[0]}"
    said = (
        f"the rule gives {len(right)} of {len(seen)} kernels the limiter they "
        f"were built for; {effect}. With many rows its limiter {moves}."
    )
tiles = launches.loc["warptiling"]
registers = judged["occupancy_limiter"].astype(str).str.contains("registers")
findings = headline(
    said,
    before,
    after,
    otherwise=(
        f"a report of twelve launches on an A10G has no counters of "
        f"throughput, so NVIDIA's rule gives no answer. Its launch sizes say "
        f"something: the best kernel of the ladder, at "
        f"{tiles[columns[0]]:.0%} of cuBLAS's speed, starts "
        f"{tiles['grid_blocks']:.0f} blocks on {tiles['sm_count']:.0f} "
        f"multiprocessors. It has room for "
        f"{fits['warptiling']:.0%} of the warps that a "
        f"multiprocessor holds, the slowest for {fits['basic']:.0%}: "
        f"occupancy is a means."
    ),
    badge=ladder.label,
    by_registers=int(registers.sum()),
    launches=len(judged),
    fill=float(tiles["sm_count"] / tiles["grid_blocks"]),
    behind=float(tiles["time_ns"] / best_ns),
)
