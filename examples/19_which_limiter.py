"""
What limits this kernel?
========================

One kernel takes most of the time. Does it wait for arithmetic, for memory, or
for something else? Nsight Compute has hundreds of counters. Which of them
answer that, and what if they are not there?

.. in-short::
"""

# %%
# The symptom: equally busy, unequally fast
# -----------------------------------------
# Four kernels add a million fp32 numbers to a million others on a Tesla T4. In
# the first, a thread adds one pair. In the others it adds four or eight:
# *adjacent* ones, or *strided* ones that are far apart. The author published a
# report of each. The files state no licence, so we cannot include them: these
# are *reported* figures, as ``nsightkit ncu`` reads them.

# record: 180 s
# sphinx_gallery_thumbnail_number = 1
# fold: How the table is made
import pandas as pd
from _lib import counters as synthetic_counters
from _lib import figures, limiters, published, six_kernels

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import counters
from nsightkit.guide import case, headline, measure

added = published.counted(published.ADDITIONS)
columns = {"name": "numbers per thread", "time_us": "time (µs)"}
columns |= {"memory_pct": "memory busy (%)", "classification": "limiter"}
plots.table(
    added[list(columns)].rename(columns=columns),
    {"time (µs)": "{:.1f}", "memory busy (%)": "{:.0f}"},
)

# %%
# Predict: which of them waste bandwidth?
# ---------------------------------------
# All four read two numbers and write one for each result, so all need the same
# :measured:`19_which_limiter.needed_mb:.0f` MB, or
# :measured:`19_which_limiter.needed_us:.1f` µs at the T4's bandwidth. Memory
# moves in sectors of eight such numbers, and the 32 threads of a warp load
# together. Which kernels use whole sectors? And does high memory
# utilization mean that a kernel uses memory well?
#
# .. dropdown:: Answer
#
#    The strided kernel looks worse and is better: in each of its loads,
#    neighbouring threads read neighbouring numbers. If each thread takes
#    adjacent numbers, the warp's threads are several numbers apart in any one
#    load, and most of each sector is unused. Utilization hides this, because
#    the memory is just as busy with unused bytes.

# %%
# Evidence: what do two counters show?
# ------------------------------------
# NVIDIA's rule uses two numbers, the utilization of the busiest compute unit
# and of the busiest part of the memory. If both are below sixty percent, the
# kernel is latency-bound. Otherwise the busier one is the limiter, unless the
# two are within ten points of each other and below eighty: then they are
# balanced.

# fold: How the figure is made
figures.limiter_map(added, title="Four additions on a Tesla T4 (reported)")

# %%
# Three kernels are memory-bound, at nearly the same place. The fourth is the
# surprise. With eight adjacent numbers it moves the most bytes,
# :measured:`19_which_limiter.eight_mb:.1f` MB, and keeps the memory only
# :measured:`19_which_limiter.eight_pct:.0f`\ % busy. By the rule it waits
# (``latency-bound``); these reports do not show on what.
#
# So the rule is only the first question. The bytes used of each sector, in a
# table further down in the same report, show what to change.

# %%
# Change one thing: which thread adds which number
# ------------------------------------------------
# Two of the additions have the same grid and the same blocks, and a thread
# adds four numbers in both. They differ in which four:
#
# .. code-block:: diff
#
#    -int i = 4 * thread + k;          // adjacent numbers for one thread
#    +int i = thread + k * threads;    // adjacent numbers for adjacent threads
#     sum[i] = a[i] + b[i];

# fold: How the table is made
pair = added.set_index("name").loc[["4, adjacent", "4, strided"]]
columns = {"time_us": "time (µs)", "dram_mb": "moved (MB)"}
columns |= {"used": "used of 32 bytes", "memory_pct": "memory busy (%)"}
shown = pair[list(columns)].rename(columns=columns)
looks = {"time (µs)": "{:.1f}", "moved (MB)": "{:.1f}"}
looks["memory busy (%)"] = "{:.0f}"
plots.table(shown.rename_axis("kernel").reset_index(), looks)

# %%
# The time falls with the bytes, by a factor of
# :measured:`19_which_limiter.faster:.2f`, and the memory stays as busy as
# before. A repaired memory-bound kernel looks like this: the same limiter, and
# fewer bytes to move. The slow kernel uses only a quarter of each sector, so
# why is its traffic to DRAM not four times as high, but only
# :measured:`19_which_limiter.traffic:.2f`\ x? The next three loads of a thread
# need the same sectors, and the caches still hold most of them.

# %%
# And a report without counters?
# ------------------------------
# Often the two numbers are missing, because they were not collected or the
# driver did not permit it. Here are ten kernels for one fp32 matmul on an
# A10G, from a naive one to warp tiles, and cuBLAS. nsightkit names no limiter
# for any of them (``not-enough-data``), because a kernel's name is no
# evidence. But every report has times, launch sizes and the limits of
# occupancy:

# fold: How the figure is made
ladder = case("ncu-esmm", "sgemm")
judged = counters.summary(ladder.report)
launches = published.matmuls(ladder.report)
SHARES = ["share of cuBLAS's speed", "share of warp slots", "blocks per SM"]
plots.panels(launches, SHARES, title="One matmul, eleven kernels (case file)")
ladder

# %%
# Two things are visible without a counter. Occupancy is a means: the fastest
# kernels have room for half the warps of the slowest, because each thread
# keeps a larger tile in registers. And from ``two_blocktiling`` on the grid is
# too small: ``warptiling`` has :measured:`19_which_limiter.blocks:.0f` blocks
# for :measured:`19_which_limiter.sms:.0f` multiprocessors, so some are idle.
#
# Would the counters have agreed? Half a year earlier, the same author
# published a report of four of these kernels with counters:

# fold: How the table is made
counted = published.counted(published.PRODUCTS)
columns = {"name": "kernel", "time_us": "time (µs)", "sm_pct": "compute (%)"}
columns |= {"memory_pct": "memory (%)", "waves": "waves"}
columns["classification"] = "limiter"
looks = dict.fromkeys(["time (µs)", "compute (%)", "memory (%)"], "{:.0f}")
plots.table(
    counted[list(columns)].rename(columns=columns), looks | {"waves": "{:.1f}"}
)

# %%
# They do: the three kernels with less than a wave of blocks are
# ``latency-bound``, which means that they wait. Each row is
# faster than the one before it, yet the first has by far the highest
# percentages. A percentage shows how busy a unit was, whether or not its work
# was needed.

# %%
# Verdict
# -------
# Two utilizations show which unit limits a kernel. They do not show why. For a
# memory-bound kernel, look at the bytes it moves and at how many of each
# sector it uses. For one that waits, look at the grid first. Without counters
# we cannot name the limiter, but the report has the grid. Before you open
# Nsight Compute, make sure that a single kernel is the problem. The chapter
# :doc:`/guide/inside_one_kernel` explains the counters one by one.

# %%
# Limits
# ------
# * Every real figure here is of one launch. Those on the T4 and the four with
#   counters on the A10G were read once, from reports that are not kept here
#   (their sources are in the table below).
# * The four launches with counters and the twelve without are from two
#   versions of one program: compare their shapes, not their times.
# * *Permission.* Ordinary users cannot read the counters unless an
#   administrator allows it; otherwise Nsight Compute reports
#   ``ERR_NVGPUCTRPERM``. ``nsightkit doctor`` checks this in advance.
# * *Replay.* Each launch runs many times, with its memory restored and the
#   caches flushed. Times under Nsight Compute differ from those of the
#   program.
# * *Clocks.* By default Nsight Compute locks them to base. ``nsightkit capture
#   ncu`` leaves them alone.

# fold: How the table is made
sources = pd.concat([added, counted]).groupby("source", sort=False)
files = sources["file"].agg(lambda names: ", ".join(names.unique()))
plots.table(files.reset_index())

# %%
# Run it yourself
# ---------------
# Counters of the kernels inside a range ``softmax`` of your program, and what
# limits them:
#
# .. code-block:: console
#
#    $ nsightkit doctor
#    $ nsightkit capture ncu -o softmax --nvtx --nvtx-include softmax/ \
#        -- python train.py
#    $ nsightkit ncu softmax.ncu-rep
#
# On a GPU, this page's script also measures six kernels, each built to have
# another limiter. Without a GPU it runs a tiny CPU version:
#
# .. code-block:: console
#
#    $ python examples/19_which_limiter.py
#
# Reading a ``.ncu-rep`` requires ``ncu`` or NVIDIA's ``ncu-report``; a CSV of
# its counters requires neither. The second report is synthetic and never ran
# on a GPU. We chose the limiter of each kernel in it, and the rule finds
# :measured:`19_which_limiter.right`.

# fold: The two reports, as files
import tempfile
from pathlib import Path

from nsightkit.trace import ncu

example, truth = synthetic_counters.counters()
answers = six_kernels.counted(example)
chosen = [truth[name]["bound"] for name in answers["name"]]
folder = tempfile.TemporaryDirectory()
synthetic_csv = ncu.write(example, Path(folder.name, "six-kernels.csv"))
downloads = {
    "twelve launches on an A10G": ladder.path,
    "six kernels, synthetic": synthetic_csv,
}

# %%
# Exercises
# ---------
# Both files are downloads above, and ``nsightkit ncu`` reads them.
#
# 1. In the report from the A10G, what limits the occupancy of the kernels?
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
# 2. If every multiprocessor had an equal share of ``warptiling``'s blocks, how
#    much faster could it get at most, and would it then beat cuBLAS?
#
#    .. dropdown:: Answer
#
#       :measured:`19_which_limiter.fill:.2f`\ x, the multiprocessors over the
#       blocks. It would need :measured:`19_which_limiter.behind:.2f`\ x, so
#       no: the grid explains most of the distance.
#
# 3. In the synthetic report, why does the softmax wait, and what would you
#    change? Ask ``nsightkit ncu --within softmax``.
#
#    .. dropdown:: Answer
#
#       It has one block for each of its few rows, so most multiprocessors get
#       no work. With many rows and the same total size, the memory goes from
#       :measured:`19_which_limiter.few:.0f` to
#       :measured:`19_which_limiter.many:.0f` percent of its peak, and the
#       limiter from :measured:`19_which_limiter.few_is` to
#       :measured:`19_which_limiter.many_is`. (The report with many rows is
#       synthetic as well: it never ran on a GPU.)

# fold: The numbers of the third answer
filled = six_kernels.counted(synthetic_counters.counters(many_rows=True)[0])
few_rows = answers.set_index("name").loc["softmax"]
many_rows = filled.set_index("name").loc["softmax"]

# %%
# Measured here
# -------------
# .. own-run::
#
# Six kernels with six limiters, timed and counted with Nsight Compute; in the
# second run the softmax has many rows.

# On an H100: 1.1 TFLOP in bf16 take about 1.7 ms, and 0.14 TFLOP in FP32
# 2.7 ms; both fill the card. The vectors have 268 MB, more than any cache:
# add moves 8 bytes for each number (0.16 ms), strided a sector of 32 to read
# 4 and 4 to write (0.72 ms, 4.5x as long). A block takes a row of the softmax:
# 16 rows leave 116 of 132 multiprocessors idle, 16,384 rows none. A hop of the
# chase misses the caches, because its table has 268 MB as well.
kernel_sizes = dict(side=8192, side_fp32=4096, elements=2**26, stride=8)
kernel_sizes |= dict(programs=1024, hops=128, table=2**26)
little = dict(side=256, side_fp32=128, elements=2**18, stride=8)
little |= dict(programs=16, hops=16, table=2**16)

few_run = measure(
    "limiters/before",
    limiters.run,
    gpu=dict(**kernel_sizes, rows=16),
    small=dict(**little, rows=4),
    warmup=20,
    profile="ncu",
)
many_run = measure(
    "limiters/after",
    limiters.run,
    gpu=dict(**kernel_sizes, rows=16_384),
    small=dict(**little, rows=256),
    warmup=20,
    profile="ncu",
)
few_run

# %%

# fold: How the figures are made
was = six_kernels.counted(few_run.ncu_report)
now = six_kernels.counted(many_run.ncu_report)
under, rates = six_kernels.under(few_run)
if few_run and many_run and rates:
    title = f"Six kernels under their roofs ({few_run.mode})"
    plots.roofline(under, rates, "bf16", title=title)
if len(was):
    figures.limiter_map(was, title=f"Six kernels ({few_run.mode})")
    title = f"What their warps wait for ({few_run.mode})"
    plots.stacks(six_kernels.waits(few_run.ncu_report, was), title=title)
many_run

# %%

# fold: How the answer is put together
took = six_kernels.compared(few_run, many_run)
said = six_kernels.answer(took, was, now) if few_run and many_run else ""
tiles = launches.loc["warptiling"]
registers = judged["occupancy_limiter"].astype(str).str.contains("registers")
eight = added.set_index("name").loc["8, adjacent"]
slow, fast = pair.to_dict("records")
needed_mb = 3 * 4 * 1_000_000 / 1e6
findings = headline(
    said,
    few_run,
    many_run,
    otherwise=(
        f"Two utilization counters show whether a kernel is compute- or "
        f"memory-bound, but not why. Of two memory-bound T4 kernels "
        f"(reported), one is {slow['time_us'] / fast['time_us']:.2f}x slower. "
        f"It uses {slow['used']:.0f} of every 32 bytes that it fetches, and "
        f"its memory is {slow['memory_pct']:.0f}% busy, the other's "
        f"{fast['memory_pct']:.0f}%. Without counters the launch sizes help: "
        f"a matmul on an A10G has "
        f"{tiles['grid_blocks']:.0f} blocks for {tiles['sm_count']:.0f} "
        f"multiprocessors."
    ),
    badge=f"{ladder.label}; reported, Tesla T4",
    needed_mb=needed_mb,
    needed_us=needed_mb / hardware.find("T4").gb_per_s * 1e3,
    eight_mb=eight["dram_mb"],
    eight_pct=eight["memory_pct"],
    faster=slow["time_us"] / fast["time_us"],
    traffic=slow["dram_mb"] / fast["dram_mb"],
    blocks=tiles["grid_blocks"],
    sms=tiles["sm_count"],
    right=f"{(answers['classification'] == chosen).sum()} of {len(chosen)}",
    by_registers=int(registers.sum()),
    launches=len(judged),
    fill=float(tiles["sm_count"] / tiles["grid_blocks"]),
    behind=1 / tiles["share of cuBLAS's speed"],
    few=float(few_rows["memory_pct"]),
    many=float(many_rows["memory_pct"]),
    few_is=few_rows["classification"],
    many_is=many_rows["classification"],
)
plots.table(took) if len(took) else None
