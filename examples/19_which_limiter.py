"""
Which limiter does Nsight Compute see?
======================================

Is a kernel limited by compute, by memory or by waiting? Two of Nsight
Compute's counters answer that, a few more suggest the fix, and even a report
without them is useful.

.. in-short::
"""

# %%
# Predict: one addition, four kernels
# -----------------------------------
# We add a million fp32 numbers to a million others on a Tesla T4, with four
# kernels. In the first, a thread adds one pair. In the others it adds several:
# a few neighbours, or numbers that are far apart, one from each stride over
# the whole array. Every kernel reads two numbers and writes one for each
# result, so all have the same bound:

# record: 180 s
# sphinx_gallery_thumbnail_number = 1
import pandas as pd
from _lib import figures, published

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import counters, sol
from nsightkit.guide import case

t4 = hardware.find("T4")
needed_mb = 3 * 4 * 1_000_000 / 1e6
print(f"{needed_mb:.0f} MB, at least {needed_mb / t4.gb_per_s * 1e3:.1f} µs")

# %%
# Which of the kernels waste bandwidth? And does high memory utilization mean
# that a kernel uses memory well?
#
# .. dropdown:: Answer
#
#    Memory moves in sectors of eight such numbers, and the 32 threads of a
#    warp load together. If each thread takes neighbours, the warp's threads
#    are several numbers apart in any one load, and most of each sector is
#    unused. The strided kernel looks worse and is better: in each of its
#    loads, neighbouring threads read neighbouring numbers. Memory utilization
#    hides all of this, because the memory is just as busy with unused bytes.
#
# NVIDIA's rule uses two numbers, the utilization of the busiest compute unit
# and of the busiest part of the memory, each in percent of its peak. If either
# is above a first threshold, it is the limiter. If both are below a second
# one, the kernel waits. In between the higher one counts, if they are far
# enough apart.

# %%
# Evidence: what do four reports with counters show?
# --------------------------------------------------
# The author of these kernels published a report of each. The files state no
# licence, so we cannot include them: these are *reported* figures, as
# ``nsightkit ncu`` reads them.

added = published.counted(published.ADDITIONS)
figures.limiter_map(added, title="Four additions on a Tesla T4 (reported)")

# %%
# Three kernels are memory-bound with nearly the same utilization, but one of
# the three takes much longer:

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
# With four neighbours per thread, loads use a quarter of each sector that they
# touch. The caches absorb part of the waste, and the rest goes through the
# memory. With eight neighbours, an eighth is used, and so many requests queue
# up that the memory's percentage *falls*: by the rule, the kernel now waits.
# So the rule is the first question. The next table of the same report has the
# bytes used per sector, which name the fault.

# %%
# Evidence: and a report without counters?
# ----------------------------------------
# Here are twelve launches on an A10G: ten kernels of a published ladder for
# one fp32 matmul, from a naive kernel to warp tiles, and cuBLAS twice.

ladder = case("ncu-esmm", "sgemm")
judged = counters.summary(ladder.report)
ladder

# %%
# The rule's two numbers were not collected, so nsightkit gives no answer. It
# does not guess one from a kernel's name:

# fold: How the text is printed
import textwrap

for limiter, count in judged["classification"].value_counts().items():
    print(f"{count} of {len(judged)}: {limiter}")
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
plots.panels(launches, columns, title="One matmul, eleven kernels (case file)")

# %%
# *Occupancy is a means.* The fastest kernels have room for half the warps of
# the slowest, because each thread keeps a larger tile in registers.
#
# *The grid is too small.* From ``two_blocktiling`` on, the ladder's kernels
# have fewer blocks than the card has multiprocessors, so some multiprocessors
# are idle.
#
# Would the counters have agreed? Half a year earlier, the same author
# published a report of four of these kernels with counters:

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
# They agree: the three kernels with less than a wave of blocks wait. Each rung
# is faster than the one before it, yet the first has by far the highest
# percentages. A percentage shows how busy a unit was, whether or not its work
# was needed.

# %%
# Can we trust the rule? A drill with known answers
# -------------------------------------------------
# No real report here covers all limiters, so we made six kernels with
# synthetic counters. They never ran on a GPU: we chose how much of an imagined
# card each one uses. The rule must find the limiters that we chose:

from _lib import counters as synthetic_counters
from _lib import six_kernels

example, truth = synthetic_counters.counters()
answers = six_kernels.counted(example)
chosen = [truth[name]["bound"] for name in answers["name"]]
right = (answers["classification"] == chosen).sum()
print(f"classified correctly: {right} of {len(answers)}")
figures.limiter_map(answers, title="Six kernels, six limiters (synthetic)")

# %%
# The two additions are as close together as the real ones above. The two
# matmuls are both compute-bound, but only one uses tensor cores. Their warps
# wait for different things:

# fold: How the figure is made
plots.share_bars(
    six_kernels.waits(example, answers),
    title="What their warps wait for (synthetic)",
)

# %%
# ``long_scoreboard`` is a wait for L1TEX memory operations (global, local or
# texture), ``gmma`` for the result of a tensor core, ``math_pipe_throttle``
# for a busy pipe. A ``not_selected`` warp could have run, but the scheduler
# picked another; ``selected`` is the one cycle in which a warp issues.
#
# Make one check on any report before you believe it: the cycles between two
# instructions of a warp equal the scheduler's active warps divided by its
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
# adds four numbers in both. They differ in which four:
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
print(f"{times[0] / times[1]:.2f}x faster")
print(f"bytes moved: {before.dram_mb:.1f} MB, then {after.dram_mb:.1f} MB")
print(f"memory: {before.memory_pct:.0f} % busy, then {after.memory_pct:.0f} %")

# %%
# The time falls with the bytes, and the memory stays as busy as before. A
# repaired memory-bound kernel looks like this: the same limiter, with fewer
# bytes to move.

# %%
# Verdict
# -------
# Two numbers name the limiter, and the counters below them suggest the fix.
# Without the two numbers there is no answer, but launch sizes are in every
# report, and here they pointed to the same cause as the counters. Before you
# open Nsight Compute, make sure that a single kernel is the problem: in the
# guide's :ref:`worked example <example-left>` it was not. The
# chapter :doc:`/guide/inside_one_kernel` explains the counters one by one.

# %%
# Limits
# ------
# * Every real figure here is of one launch. Those on the T4 and the four with
#   counters on the A10G were read once, from reports that are not kept here.
# * The four launches with counters and the twelve without are from two
#   versions of one program: compare their shapes, not their times.
# * The synthetic counters obey the same identities as real ones. They teach
#   how to read a report, not how a card behaves.
# * *Permission.* Ordinary users cannot read the counters unless an
#   administrator allows it; otherwise Nsight Compute reports
#   ``ERR_NVGPUCTRPERM``. ``nsightkit doctor`` checks this in advance.
# * *Replay.* Each launch runs many times, with its memory restored and the
#   caches flushed. Times under Nsight Compute differ from those of the
#   program.
# * *Clocks.* By default Nsight Compute locks them to base. ``nsightkit capture
#   ncu`` leaves them alone.

# %%
# Run it yourself
# ---------------
# To run the six kernels of the drill, save this as ``examples/kernels.py`` in
# a checkout of nsightkit:
#
# .. code-block:: python
#
#    from _lib import limiters
#
#    sizes = dict(side=8192, side_fp32=4096, elements=2**26, rows=16)
#    sizes |= dict(stride=8, programs=1024, hops=128, table=2**26)
#    with limiters.run("cuda", **sizes) as run:
#        for _ in range(3):
#            run.step()
#
# .. code-block:: console
#
#    $ nsightkit doctor
#    $ nsightkit capture ncu -o softmax --nvtx --nvtx-include softmax/ \
#        -- python examples/kernels.py
#    $ nsightkit ncu softmax.ncu-rep
#    $ nsightkit capture ncu -o all --nvtx --nvtx-include step/ --set full \
#        -- python examples/kernels.py
#    $ nsightkit ncu all.ncu-rep --within '^(add|strided)$'
#
# To run this page's script (without a GPU it runs a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/19_which_limiter.py

# fold: Where the reported figures come from
plots.table(
    pd.concat([added, climbed])[["name", "file", "source"]].rename(
        columns={"name": "launch"}
    )
)

# %%
# Reading a ``.ncu-rep`` requires ``ncu`` or NVIDIA's ``ncu-report``; a CSV of
# its counters requires neither:

# fold: The two reports, as files
import tempfile
from pathlib import Path

from nsightkit.trace import ncu

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
# 2. If every multiprocessor had an equal share of ``warptiling``'s blocks, how
#    much faster could it get at most, and would it then beat cuBLAS?
#
#    .. dropdown:: Answer
#
#       :measured:`19_which_limiter.fill:.2f` times faster, the multiprocessors
#       over the blocks. It would need :measured:`19_which_limiter.behind:.2f`\
#       x, so no: the grid explains most of the distance.
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
filled_example, _ = synthetic_counters.counters(many_rows=True)
filled = six_kernels.counted(filled_example)
few_rows = answers.set_index("name").loc["softmax"]
many_rows = filled.set_index("name").loc["softmax"]

# %%
# Measured here
# -------------
# .. own-run::
#
# One step runs the six kernels of the drill, one after the other. In a second
# run the softmax has many rows. On a GPU, both runs are repeated under Nsight
# Compute.
#
# The sizes decide whether each kernel meets the limiter it was built for:

from _lib import climb, limiters

from nsightkit.guide import headline, measure
from nsightkit.workloads import ceilings

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
# The second run, with enough rows for every multiprocessor:

many_run

# %%
# The ceilings for the comparison, measured on the same GPU:


def product(part, precision, warmup):
    """Measure a large GEMM."""
    return measure(
        f"ceilings/{part}",
        ceilings.gemm,
        gpu=dict(m=8192, n=8192, k=8192, precision=precision),
        small=dict(m=256, n=256, k=256, precision=precision),
        steps=200,
        warmup=warmup,
    )


roof_runs = [product("before", "bf16", 800), product("fp32", "fp32", 60)]
roof_runs.append(
    measure(
        "ceilings/copy",
        ceilings.copy,
        gpu=dict(megabytes=4_000, kind="copy"),
        small=dict(megabytes=16, kind="copy"),
        steps=200,
        warmup=300,
    )
)
roof_runs[0]

# %%
# Without counters: the times of the kernels under the roofs of this machine.

# fold: How the kernels are judged
few_times = six_kernels.times(few_run.trace)
many_times = six_kernels.times(many_run.trace)
rates = []
card = climb.gpu_of(few_run)
if card:
    rates.append(sol.datasheet(card))
if few_run and all(roof_runs):
    reached = []
    for run in roof_runs:
        if run.gpu == few_run.gpu:
            step_ns = run.median("step_ns")
            reached.append(sol.ceiling(run.parameters, step_ns))
    if len(reached) == len(roof_runs):
        rates.append(sol.ceilings(reached, "measured here"))
if few_run and many_run and rates:
    costs = six_kernels.operations(few_run.parameters)
    ran = [costs[name] for name in few_times.index]
    under = sol.judge(ran, few_times, rates[0], rates[-1])
    title = f"Six kernels under their roofs ({few_run.mode})"
    plots.roofline(under, rates, "bf16", title=title)

# %%
# Counters, where the driver permits them:

# fold: How the figures are made
COUNTERS = ["name", "classification", "sm_pct", "memory_pct"]
was = six_kernels.counted(few_run.ncu_report)
now = six_kernels.counted(many_run.ncu_report)
for run in (few_run, many_run):
    notice = run.provenance.get("ncu", {}).get("notice")
    if notice:
        print(textwrap.fill(f"{run.name}: no counters. {notice}"))
if len(was):
    figures.limiter_map(was, title=f"Six kernels ({few_run.mode})")
    title = f"What their warps wait for ({few_run.mode})"
    plots.share_bars(six_kernels.waits(few_run.ncu_report, was), title=title)
plots.table(was[COUNTERS]) if len(was) else None

# %%
# Times of both runs:

# fold: How the table is made
took = pd.DataFrame({"few rows": few_times, "many rows": many_times})
shown = (took / 1e3).add_suffix(" (µs)")
shown["ratio"] = took["many rows"] / took["few rows"]
shown = shown.rename_axis("name").reset_index()
plots.table(shown) if few_run and many_run else None

# %%
# The answer from the two runs:

# fold: How the answer is put together
said = ""
if few_run and many_run:
    sector, number = 32, 4  # bytes
    wasted = (sector + number) / (number + number)
    few_ns = took["few rows"]
    slower = few_ns["strided"] / few_ns["add"]
    softmax_ratio = few_ns["softmax"] / took.loc["softmax", "many rows"]
    said = (
        f"adding one number from each sector takes {slower:.1f}x as long "
        f"(bytes predict {wasted:.1f}x), and the softmax over few rows "
        f"{softmax_ratio:.1f}x as long as over many."
    )
    if len(was) and len(now):
        seen = was.set_index("name")["classification"]
        then = now.set_index("name")["classification"]
        as_built = sum(
            seen[name] == limiters.CASES[name] for name in seen.index
        )
        said += (
            f" The rule gives {as_built} of {len(seen)} kernels the limiter "
            f"they were built for. With few rows the softmax is "
            f"{seen.get('softmax', 'unknown')}, with many rows "
            f"{then.get('softmax', 'unknown')}."
        )
    else:
        said += " Counters were not available, so the rule gives no limiter."
tiles = launches.loc["warptiling"]
registers = judged["occupancy_limiter"].astype(str).str.contains("registers")
findings = headline(
    said,
    few_run,
    many_run,
    otherwise=(
        f"the fastest hand-written kernel on an A10G (case file) reaches "
        f"{tiles[columns[0]]:.0%} of cuBLAS's speed. Its "
        f"{tiles['grid_blocks']:.0f} blocks cannot fill "
        f"{tiles['sm_count']:.0f} multiprocessors, as launch sizes show "
        f"without counters. Counters explain two additions on a T4 "
        f"(reported), which keep the memory {before['memory_pct']:.0f}% and "
        f"{after['memory_pct']:.0f}% busy: the first takes "
        f"{before['time_us'] / after['time_us']:.2f}x as long, because it "
        f"uses {before['used']:.0f} of the 32 bytes in each sector."
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
