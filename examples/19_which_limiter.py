"""
Which limiter does Nsight Compute see?
======================================

A kernel takes its time. Is it held back by arithmetic, by memory or by
waiting? Two counters of Nsight Compute answer that, a few more say what to do
about it, and even a report without them has something to tell.

.. in-short::
"""

# %%
# Predict: one addition, four kernels
# -----------------------------------
# A million numbers in FP32 are added to a million others on a Tesla T4. Four
# kernels do it. In the first, a thread adds one pair. In the others it adds
# several: a few neighbours, or numbers that lie far apart, one in each stride
# over the whole array. All of them read two numbers and write one for each
# result, so they have the same bound:

# sphinx_gallery_thumbnail_number = 1
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import counters
from nsightkit.investigations import case
from nsightkit.investigations.pages import published

t4 = hardware.find("T4")
needed_mb = 3 * 4 * 1_000_000 / 1e6
print(f"{needed_mb:.0f} MB, at least {needed_mb / t4.gb_per_s * 1e3:.1f} µs")

# %%
# Which of the kernels waste bandwidth? And does a high use of the memory show
# that a kernel uses it well?
#
# .. dropdown:: Answer
#
#    Memory moves in sectors that hold eight such numbers, and the 32 threads
#    of a warp load together. If each thread takes neighbours, the warp's
#    threads are several numbers apart in any one load, and most of each sector
#    is not used.
#    The strided kernel looks worse and is not: in each of its loads,
#    neighbouring threads read neighbouring numbers. A high use of the memory
#    shows none of this, because the memory is just as busy with bytes that
#    nobody asked for.
#
# NVIDIA's rule goes by two numbers, the use of the busiest unit of compute and
# of the busiest part of the memory, each in percent of its peak. Either above
# a first threshold names the limiter. Both below a second one mean waiting. In
# between the higher one counts, if they are far enough apart.

# %%
# Evidence: four reports with counters
# ------------------------------------
# The author of these kernels published a report of each. The files name no
# licence, so they are not part of this site: these are *reported* figures, as
# ``nsightkit ncu`` reads them.

added = published.counted(published.ADDITIONS)
plots.limiter_map(added, title="Four additions on a Tesla T4 (reported)")

# %%
# Three kernels are memory-bound and lie side by side, but one of the three
# takes much longer:

# fold: How the table is made
shown = pd.DataFrame(
    {
        "numbers for a thread": added["name"],
        "time (µs)": added["time_us"],
        "memory (%)": added["memory_pct"],
        "moved (MB)": added["dram_mb"],
        "used of 32 bytes": added["used"],
        "limiter": added["classification"],
    }
)
plots.table(
    shown,
    {"time (µs)": "{:.1f}", "memory (%)": "{:.0f}", "moved (MB)": "{:.1f}"},
)

# %%
# With four neighbours for a thread, loads use a quarter of each sector that
# they touch. The caches save part of the waste. What is left goes through the
# memory. With eight neighbours, an eighth is used, and so many requests queue
# up that the memory's percentage *falls*: the rule now says that the kernel
# waits. So the rule is the first question and not the last. Bytes used of each
# sector, in the next table of the same report, name the fault.

# %%
# Evidence: a report without counters
# -----------------------------------
# Here are twelve launches on an A10G: ten kernels of somebody's ladder for one
# FP32 product, from a naive one to tiles of warps, and cuBLAS twice.

ladder = case("ncu-esmm", "sgemm")
judged = counters.summary(ladder.report)
ladder

# %%
# The two numbers of the rule were not collected, so there is no answer, and
# none is guessed from a kernel's name:

# fold: How the text is printed
import textwrap

for found, count in judged["classification"].value_counts().items():
    print(f"{count} of {len(judged)}: {found}")
for text in judged["evidence"].iloc[0] + judged["next_steps"].iloc[0]:
    print(textwrap.fill(text, break_on_hyphens=False))

# %%
# But every report has times, launch sizes and the limits of occupancy:

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
# *The grid is too small.* From ``two_blocktiling`` on, the ladder's kernels
# have fewer blocks than the card has multiprocessors, so some of those have
# nothing to do.
#
# Would the counters have said the same? Half a year before, the same author
# published a report of four of these kernels that has them:

# fold: How the table is made
climbed = published.counted(published.PRODUCTS)
shown = pd.DataFrame(
    {
        "kernel": climbed["name"],
        "time (µs)": climbed["time_us"],
        "compute (%)": climbed["sm_pct"],
        "memory (%)": climbed["memory_pct"],
        "waves": climbed["waves"],
        "limiter": climbed["classification"],
    }
)
whole = dict.fromkeys(["time (µs)", "compute (%)", "memory (%)"], "{:.0f}")
plots.table(shown, whole | {"waves": "{:.1f}"})

# %%
# They would: the three kernels with less than a wave of blocks wait. Each rung
# is faster than the one before, and yet the first has by far the highest
# percentages. A percentage says how busy a unit was, and not whether its work
# was needed.

# %%
# A drill with a known answer
# ---------------------------
# No real report here has all limiters in it. So here are six kernels with
# synthetic counters, from ``nsightkit.workloads.planted_counters``. They never
# ran on a GPU: how much each uses of a made-up card was chosen. What was
# planted must be found:

from nsightkit.investigations.pages import six_kernels
from nsightkit.workloads import planted_counters as planted

example, truth = planted.counters()
answers = six_kernels.counted(example)
planted_as = [truth[name]["bound"] for name in answers["name"]]
right = (answers["classification"] == planted_as).sum()
print(f"found as planted: {right} of {len(answers)}")
plots.limiter_map(answers, title="Six kernels, six limiters (synthetic)")

# %%
# The two additions are as close as the real ones above. The two products are
# both limited by arithmetic, and only one does it on tensor cores. What their
# warps wait for tells them apart:

# fold: How the figure is made
plots.share_bars(
    six_kernels.waits(example, answers),
    title="What their warps wait for (synthetic)",
)

# %%
# ``long_scoreboard`` is memory, ``gmma`` the result of a tensor core,
# ``math_pipe_throttle`` a busy pipe. ``not_selected`` warps could run, but
# another did; ``selected`` is the one cycle in which a warp issues.
#
# One check is worth making on any report before you believe it: the cycles
# between two instructions of a warp are the scheduler's active warps over its
# issue rate.

# fold: The check, on these six
shown = example.launches[
    ["active_warps", "issue_pct", "latency_cycles"]
].copy()
shown.insert(0, "name", example.launches["ranges"].str[-1])
shown["by the rule"] = shown["active_warps"] / shown["issue_pct"] * 100
named = {"active_warps": "active warps", "issue_pct": "issue rate (%)"}
named |= {"latency_cycles": "cycles between"}
plots.table(shown.rename(columns=named))

# %%
# Change one thing: which thread adds which number
# ------------------------------------------------
# Two of the additions have the same grid and the same blocks, and a thread
# adds four numbers in both. What differs is which four:
#
# .. code-block:: diff
#
#    -int i = 4 * thread + k;          // neighbours for one thread
#    +int i = thread + k * threads;    // neighbours for neighbouring threads
#     sum[i] = a[i] + b[i];

rows = added.set_index("name")
before, after = rows.loc["4, adjacent"], rows.loc["4, strided"]
times = before.time_us, after.time_us
print("{:.1f} µs, then {:.1f} µs".format(*times))
print(f"{times[0] / times[1]:.2f} times as fast")
print(f"{before.dram_mb / after.dram_mb:.2f} times as many bytes before")
print(f"memory: {before.memory_pct:.0f} % busy, then {after.memory_pct:.0f} %")

# %%
# The time falls as the bytes do, and the memory is as busy as before. That is
# what a repaired memory-bound kernel looks like: the same limiter, with less
# to move.

# %%
# Verdict
# -------
# Two numbers name the limiter, and the counters below them say what to do
# about it. Without the two numbers there is no answer, but launch sizes are in
# every report, and here they pointed where the counters did.

# %%
# Limits
# ------
# * Every real figure here is of one launch. Those on the T4 and the four with
#   counters on the A10G were read once, from reports that are not kept here.
# * The four launches with counters and the twelve without are of two versions
#   of one program: compare their shapes, not their times.
# * The synthetic counters obey the rules that real ones do, and no more. They
#   show how to read a report, not what a card does.
# * *Permission.* The counters are closed to ordinary users unless an
#   administrator opens them; Nsight Compute then says ``ERR_NVGPUCTRPERM``.
#   ``nsightkit doctor`` looks before.
# * *Replay.* Each launch runs many times, with its memory put back and the
#   caches emptied. Times under Nsight Compute are not those of the program.
# * *Clocks.* By default Nsight Compute locks them to base. ``nsightkit capture
#   ncu`` leaves them alone.

# %%
# Run it yourself
# ---------------
# The six kernels of the drill; save this as ``kernels.py``:
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
#    $ nsightkit capture ncu -o softmax --nvtx --nvtx-include softmax/ \
#        -- python kernels.py
#    $ nsightkit ncu softmax.ncu-rep
#    $ nsightkit capture ncu -o all --nvtx --nvtx-include step/ --set full \
#        -- python kernels.py
#    $ nsightkit ncu all.ncu-rep --within '^(add|strided)$'
#
# This page, and a GPU's results kept for it:
#
# .. code-block:: console
#
#    $ python examples/19_which_limiter.py
#    $ python -m nsightkit record --only limiters --only ceilings

# fold: Where the reported figures come from
plots.table(
    pd.concat([added, climbed])[["name", "file", "source"]].rename(
        columns={"name": "launch"}
    )
)

# %%
# A report needs ``ncu`` or NVIDIA's ``ncu-report`` to be read; a table of one
# needs neither:

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
# Both files are downloads above, and ``nsightkit ncu`` reads them.
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
# 3. In the synthetic report, why does the softmax wait, and what would you
#    change? Ask ``nsightkit ncu --within softmax``.
#
#    .. dropdown:: Answer
#
#       It has a block for each of its few rows, so most multiprocessors get
#       no work. With many rows of as many numbers together, the memory goes
#       from :measured:`19_which_limiter.few:.0f` to
#       :measured:`19_which_limiter.many:.0f` percent of its peak, and the
#       limiter from :measured:`19_which_limiter.few_is` to
#       :measured:`19_which_limiter.many_is`. (The second one was planted as
#       well: synthetic, and never ran on a GPU.)

# fold: The numbers of the third answer
filled = six_kernels.counted(planted.counters(many_rows=True)[0])
SHOWN = ["classification", "sm_pct", "memory_pct"]
few_rows, many_rows = (
    one.set_index("name").loc["softmax", SHOWN] for one in (answers, filled)
)

# %%
# Measured here
# -------------
# .. own-run::
#
# The six kernels of the drill, one after the other, are a step. In a second
# run the softmax has many rows. Where there is a GPU they run once more under
# Nsight Compute. First without counters: times against the roofs of this
# machine.

# fold: How the kernels are judged
import math

from nsightkit.analysis.roofline import sol
from nsightkit.investigations import headline, measure
from nsightkit.investigations.pages import climb

few_run = measure("limiters", "before")
many_run = measure("limiters", "after")
ran = {name: measure("ceilings", name) for name in ("before", "fp32", "copy")}
found = [sol.ceiling(r.parameters, r.median("step_ns")) for r in ran.values()]
card = climb.card_of(few_run)
roofs = [sol.datasheet(card)] if card else []
roofs.append(sol.ceilings(found, "measured here"))
first, second = (
    six_kernels.times(few_run.trace),
    six_kernels.times(many_run.trace),
)
mine = six_kernels.operations(few_run.parameters, first.index)
without = sol.judge(mine, first, roofs[0], roofs[-1])
title = f"Six kernels under their roofs ({few_run.mode})"
plots.roofline(without, roofs, "bf16", title=title)
few_run

# %%
# Counters, where the driver permits them:

# fold: How the figures are made
was = six_kernels.counted(few_run.ncu_report)
now = six_kernels.counted(many_run.ncu_report)
for run in (few_run, many_run):
    if run.ncu_notice:
        said = f"{run.part}: no counters, or not all: {run.ncu_notice}."
        print(textwrap.fill(said))
if len(was):
    plots.limiter_map(was, title=f"Six kernels, six limiters ({few_run.mode})")
    title = f"What their warps wait for ({few_run.mode})"
    plots.share_bars(six_kernels.waits(few_run.ncu_report, was), title=title)
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

many_run

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
    few_run,
    many_run,
    otherwise=(
        f"the best of twelve launches on an A10G (case file), apart from "
        f"cuBLAS, starts {tiles['grid_blocks']:.0f} blocks on "
        f"{tiles['sm_count']:.0f} multiprocessors and reaches "
        f"{tiles[columns[0]]:.0%} of cuBLAS's speed: launch sizes say that "
        f"much without counters. With counters, two kernels that add the same "
        f"numbers on a T4 (reported) keep the memory "
        f"{before['memory_pct']:.0f}% and {after['memory_pct']:.0f}% busy, "
        f"and the first takes {before['time_us'] / after['time_us']:.2f} "
        f"times as long, because it uses {before['used']:.0f} of the 32 bytes "
        f"in each sector."
    ),
    badge=ladder.label,
    by_registers=int(registers.sum()),
    launches=len(judged),
    fill=float(tiles["sm_count"] / tiles["grid_blocks"]),
    behind=float(tiles["time_ns"] / best_ns),
    few=float(few_rows["memory_pct"]),
    many=float(many_rows["memory_pct"]),
    few_is=few_rows["classification"],
    many_is=many_rows["classification"],
)
