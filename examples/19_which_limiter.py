"""
Which limiter does Nsight Compute see?
======================================

A kernel takes its time. Is it held back by arithmetic, by memory or by
waiting? Nsight Compute's counters know, if they are read by the right rule.

What is measured: six kernels, each held back by something else on purpose,
and their counters, where the driver lets them be read. What came out:
:measured:`19_which_limiter.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version; to repeat it an NVIDIA GPU, PyTorch, Nsight Compute and permission to
read the counters.
"""

# %%
# Expectation
# -----------
# Six operations: a product of matrices on tensor cores and one without them;
# an addition of long vectors, and the same with each number it reads in a
# sector of memory of its own; a softmax over a few long rows; and a walk, each
# of whose addresses is what was read at the one before.
#
# What they must compute and move follows from their shapes. Intensity is the
# ratio of the two, and the ridge point is that of what the card can do: above
# it arithmetic takes longer, below it memory.

# sphinx_gallery_thumbnail_number = 2
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import sol
from nsightkit.investigations import parts as investigations
from nsightkit.workloads.limiters import CASES, HELD


def operations(sizes):
    """The least that each must compute and move."""
    numbers, walks = sizes["elements"], sizes["programs"]
    held = 128 * HELD  # numbers that each walk keeps in its registers
    walked = 4 * walks * (sizes["hops"] + held)
    return {
        "product": sol.gemm_cost(*[sizes["side"]] * 3, "bf16"),
        "product_fp32": sol.gemm_cost(*[sizes["side_fp32"]] * 3, "fp32"),
        "add": sol.Operation("", numbers, 8 * numbers, "fp32"),
        "strided": sol.Operation("", numbers, 8 * numbers, "fp32"),
        "softmax": sol.elementwise_cost(
            "softmax", sizes["rows"], numbers // sizes["rows"], "fp32"
        ),
        "chase": sol.Operation("", 2 * walks * held, walked, "fp32"),
    }


def named(sizes, names):
    """The operations of some names."""
    known = operations(sizes)
    return [known[name].renamed(name) for name in names]


h200 = hardware.find("H200")
sizes = investigations.find("limiters", "before").gpu
table = sol.bounds(named(sizes, CASES), sol.datasheet(h200))
table["ridge"] = [h200.ridge(op.unit) for op in named(sizes, CASES)]
table["bound (µs)"] = table["bound_ns"] / 1e3
columns = ["name", "intensity", "ridge", "bound", "bound (µs)"]
plots.table(table[columns], {"bound (µs)": "{:,.0f}"})

# %%
# So the products should be limited by arithmetic. The four others look alike
# here, limited by memory. Shapes do not say how memory is accessed, how many
# multiprocessors get work, and how much is under way at a time:

sector, number = 32, 4  # bytes
latency_ns = 600  # from memory to a register: an order of magnitude
wasted = (sector + number) / (number + number)
busy = sizes["rows"] / h200.multiprocessors
blocks = 65_536 // (128 * HELD)  # registers of a multiprocessor, of a block
under_way = blocks * h200.multiprocessors * sector
needed = h200.gb_per_s * latency_ns

print(f"strided: a sector for each number, {wasted} times the bytes")
print(f"softmax: a block a row, {busy:.0%} of the multiprocessors")
print(f"chase: {blocks} blocks a multiprocessor, by their registers,")
print(f"  with {under_way:,} bytes under way; {needed:,.0f} fill the memory")

# %%
# The strided addition should use all of the bandwidth and waste most of it:
# limited by memory still, in a way that the share of bandwidth does not show.
# The softmax and the walk should use neither arithmetic nor memory: they wait.
#
# NVIDIA's rule goes by two numbers, the use of the busiest unit of compute and
# that of the busiest part of the memory, each in percent of its peak. Either
# above a first threshold names the limiter; both below a second one mean
# waiting; in between the higher one counts, if they are far enough apart.
# ``nsightkit.analysis.roofline.counters.classify`` is that rule. What it
# should give:

from nsightkit.analysis.roofline import counters as ncu

EXPECTED = pd.DataFrame({"name": list(CASES), "expected": CASES.values()})
plots.table(EXPECTED)

# %%
# Measure
# -------
# All six, one after the other, are a step. Where there is a GPU they run once
# more, in a process of their own, under Nsight Compute.

from nsightkit.investigations import measure

before = measure("limiters", "before")
before

# %%
# Read
# ----
# First without counters, which rented machines seldom permit. Times are from
# PyTorch's profile: what the GPU did in each operation's range; on a CPU, what
# the CPU did. The ceilings are those of this machine.

from nsightkit.analysis.timeline import ranges
from nsightkit.errors import UsageError

ran = {name: measure("ceilings", name) for name in ("before", "fp32", "copy")}
found = [sol.ceiling(r.parameters, r.median("step_ns")) for r in ran.values()]
ceilings = sol.ceilings(found, "measured here")
try:
    card = hardware.find((before.provenance["gpu"] or {})["name"])
    roofs = [sol.datasheet(card), ceilings]
except (KeyError, UsageError):
    roofs = [ceilings]


def times(run):
    """Nanoseconds of each operation in a step."""
    names = "|".join(CASES)
    table = ranges.summary(run.trace, match=f"^({names})$").set_index("name")
    each = table["median_ns"]
    if run.trace.recorded("kernels"):
        each = table["gpu_ns"] / table["count"]
    return each[[name for name in CASES if name in each.index]]


def judged(run):
    """What each reached of what its shapes allow."""
    took = times(run)
    ops = named(run.parameters, took.index)
    return sol.judge(ops, took, roofs[0], ceilings)


without = judged(before)
shown = without[["name", "intensity", "bound"]].copy()
shown["time (µs)"] = without["time_ns"] / 1e3
if len(roofs) > 1:
    shown["share of datasheet"] = without["sol_datasheet"]
shown["share of ceiling"] = without["sol_measured"]
plots.table(shown, {"time (µs)": "{:,.0f}"})

# %%
# The same under the roofs, with shares of the first one. A kernel far below
# them is not limited by what the roof stands for, and no more can be said
# without counters.

title = f"Six kernels under their roofs ({before.mode})"
plots.roofline(without, roofs, "bf16", title=title)

# %%
# With counters
# ~~~~~~~~~~~~~
# For each operation the launch that took longest, and what the rule gives it.
# The occupancy limiter is the least of four numbers: the blocks that fit on a
# multiprocessor by registers, shared memory, warps and blocks.

import math
import textwrap


def counted(report):
    """The longest launch of each operation; nothing without a report."""
    around = report.launches["ranges"].explode() if report else []
    rows = [
        {"name": name, **ncu.summary(report, within=f"^{name}$").iloc[0]}
        for name in CASES
        if name in set(around)
    ]
    return pd.DataFrame(rows, columns=["name", *ncu.COLUMNS])


def figures(table):
    """Each operation beside what was expected of it."""
    columns = {
        "name": "name",
        "classification": "found",
        "sm_pct": "compute %",
        "memory_pct": "memory %",
        "dram_pct": "DRAM %",
        "occupancy_pct": "occupancy %",
        "occupancy_limiter": "its limiter",
    }
    chosen = table[list(columns)].rename(columns=columns)
    return EXPECTED.merge(chosen, how="left", on="name")


was = counted(before.ncu_report)
if before.ncu_notice:
    print(textwrap.fill(f"No counters, or not all: {before.ncu_notice}."))
plots.table(figures(was)) if len(was) else None

# %%
# On the map of the rule, in a run with counters, and below it why warps
# waited: the shares of the time between two instructions of a warp.


def waits(report, table, most=5):
    """Shares of the longest waits of each operation."""
    found = {}
    for name, kernel in zip(table["name"], table["kernel"], strict=True):
        stalls = ncu.stalls(report, within=f"^{name}$")
        stalls = stalls[stalls["kernel"] == kernel]
        found[name] = stalls.groupby("reason")["share"].mean()
    whole = pd.DataFrame(found).fillna(0)
    order = whole.sum(axis=1).sort_values(ascending=False).index
    top, rest = whole.loc[order[:most]], whole.loc[order[most:]].sum()
    top.loc["(other)"] = rest
    return {name: top[name] for name in found}


if len(was):
    plots.limiter_map(was, title=f"Six kernels, six limiters ({before.mode})")
    title = f"What their warps wait for ({before.mode})"
    plots.share_bars(waits(before.ncu_report, was), title=title)

# %%
# A step of the walk is a round trip to the memory. The blocks that do not fit
# at once take turns, so a walk's time is that of its steps, a few times over:

if "chase" in set(was["name"]):
    around = before.ncu_report.launches["ranges"].str[-1]
    waves = before.ncu_report.launches.loc[around == "chase", "waves"].iloc[0]
    turns = before.parameters["hops"] * math.ceil(waves)
    print(f"a round trip: {times(before)['chase'] / turns:,.0f} ns")
else:
    print("how many blocks fit at once is not known without counters")

# %%
# And why, for each: every sentence cites the counters it rests on, by the
# names that Nsight Compute has for them.


def explain(row):
    """Print what speaks for a kernel's limiter, and what to try."""
    print(f"{row['name']}: {row['classification']}")
    for sign, texts in ("-", row["evidence"]), (">", row["next_steps"]):
        wrap = textwrap.TextWrapper(79, f"{sign} ", "  ")
        wrap.break_on_hyphens = wrap.break_long_words = False
        for text in texts:
            print(wrap.fill(text.replace(" %", "\N{NO-BREAK SPACE}%")))
    print()


for row in was.to_dict("records"):
    explain(row)
if was.empty:
    print("no counters; the example below has some")

# %%
# A worked example with a known answer
# ------------------------------------
# This report is synthetic: ``nsightkit.workloads.planted_counters`` wrote it
# and it never ran on a GPU. Its launches are those of this page on a card that
# does not exist, and how much each uses of it was chosen. Planted and found:

from nsightkit.workloads import planted_counters as planted

example, truth = planted.counters()
answers = counted(example)
compared = answers[["name"]].copy()
compared["planted"] = [truth[name]["bound"] for name in answers["name"]]
compared["found"] = answers["classification"]
compared["planted limiter of occupancy"] = [
    truth[name]["limiter"] for name in answers["name"]
]
compared["found limiter"] = answers["occupancy_limiter"]
plots.table(compared)

# %%
# The map shows what the rule sees, and what it does not: the two additions lie
# side by side, and one of them wastes most of what it moves. The two products
# are both limited by arithmetic, and only one does it on tensor cores.

plots.limiter_map(answers, title="Six kernels, six limiters (synthetic)")

# %%
# So the rule is the first question and not the last. The next ones depend on
# its answer: which level of the memory, and is what it moves used? Which pipe?
# Enough blocks, enough warps, and what do they wait for?

for name in ("product_fp32", "strided", "chase"):
    explain(answers.set_index("name", drop=False).loc[name])

# %%
# The limits of occupancy, in blocks on a multiprocessor: for each launch the
# least of the four counts, whatever the others are.

limits = {f"limit_{limit}_blocks": f"by {limit}" for limit in ncu.LIMITS}
fitting = example.launches[list(limits)].rename(columns=limits)
fitting.insert(0, "name", example.launches["ranges"].str[-1])
plots.table(fitting)

# %%
# And what the warps of each wait for: ``long_scoreboard`` is memory, ``gmma``
# the result of a tensor core, ``math_pipe_throttle`` a busy pipe.
# ``not_selected`` warps could run, but another did; ``selected`` ones ran.

title = "What their warps wait for (synthetic)"
plots.share_bars(waits(example, answers), title=title)

# %%
# Change one thing
# ----------------
# The softmax gets rows for every multiprocessor, of as many numbers together.
#
# .. code-block:: python
#
#    x = x.view(16384, -1)
#    torch.softmax(x, -1)
#
# Everything else stays as it is, and is a control: nothing about it should
# change.

# %%
# Measure again
# -------------

after = measure("limiters", "after")
after

# %%
# Times of both runs, and two ratios that bytes predict: the strided addition
# moves more than the other by its sectors, and the softmax over many rows as
# much as the addition.

took = pd.DataFrame({"few rows": times(before), "many rows": times(after)})
shown = (took / 1e3).round().astype("Int64").add_suffix(" (µs)")
shown["ratio"] = took["many rows"] / took["few rows"]
plots.table(shown.rename_axis("name").reset_index(), {"ratio": "{:.2f}"})

# %%
# Predicted and measured:

add, strided, few = took["few rows"].reindex(["add", "strided", "softmax"])
many = took["many rows"].get("softmax", math.nan)
pairs = {
    "strided to plain addition": (wasted, strided / add),
    "softmax over many rows to addition": (1.0, many / add),
}
ratios = pd.DataFrame(pairs, index=["by their bytes", "measured"]).T
plots.table(
    ratios.rename_axis("times").reset_index(),
    dict.fromkeys(ratios.columns, "{:.2f}"),
)

# %%
# The limiters of both runs:

now = counted(after.ncu_report)
both = EXPECTED[["name"]]
for rows, table in (("few rows", was), ("many rows", now)):
    chosen = figures(table)[["name", "found", "compute %", "memory %"]]
    chosen = chosen.set_index("name").add_suffix(f", {rows}")
    both = both.join(chosen, on="name")
if after.ncu_notice:
    print(textwrap.fill(f"No counters, or not all: {after.ncu_notice}."))
plots.table(both) if len(was) or len(now) else None

# %%
# The map again, for what has moved:

if len(now):
    plots.limiter_map(now, title=f"Rows for every one ({after.mode})")

# %%
# Verdict
# -------
# Computed from the two runs:


def classes(table):
    """Limiter by name."""
    return dict(zip(table["name"], table["classification"], strict=True))


gpus = [(run.provenance["gpu"] or {}).get("name") for run in (before, after)]
comparable = before.mode == after.mode and gpus[0] == gpus[1]
where = "in a smoke run on a CPU" if after.mode == "smoke" else "on a GPU"
seen, moved = classes(was), classes(now)
right = [name for name, limiter in seen.items() if limiter == CASES[name]]
first, last = (found.get("softmax", "unknown") for found in (seen, moved))
moves = f"stays {last}" if first == last else f"goes from {first} to {last}"
effect = (
    f"numbers from sectors of their own take {strided / add:.1f} times as "
    f"long to add (by the bytes: {wasted:.1f}), and the softmax over few rows "
    f"{few / many:.1f} times as long as over many"
)
if seen and moved:
    verdict = (
        f"{where}, the rule gives {len(right)} of {len(seen)} kernels the "
        f"limiter they were built for; {effect}. With many rows its limiter "
        f"{moves}."
    )
else:
    verdict = (
        f"{where}, {effect}. There were no counters, so what the rule says of "
        "them is not shown here."
    )
if not comparable:
    verdict = "the two runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "right": len(right),
    "strided": float(strided / add),
    "few_rows": float(few / many),
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# *Permission.* The counters are closed to ordinary users unless an
# administrator opens them, and on most rented machines nobody does: Nsight
# Compute then says ``ERR_NVGPUCTRPERM`` at the first kernel. What is left are
# times and shapes, as in the first table. ``nsightkit doctor`` looks before.
#
# *Replay.* Each launch runs dozens of times, until all its counters are read,
# with its memory put back and the caches emptied in between. What would find
# its data in a cache looks cold here, and times of a run under Nsight Compute
# are not those of the program. The times on this page are from another run.
#
# *Clocks.* By default Nsight Compute locks them to base, where memory is fast
# beside arithmetic and percentages of both differ. The counters here are from
# clocks left alone, as is ``nsightkit capture ncu``'s default.
#
# *What the percentages are not.* Percent of memory throughput is that of the
# busiest level, not of the DRAM's bandwidth. A high percentage is no
# achievement: the strided addition has one, and so has the product on the
# wrong unit. Occupancy is a means; the quickest product has little of it.
#
# The softmax over many rows is another function than that over few. A kernel
# that splits long rows among blocks would leave the function as it is.
# The thresholds of the rule are NVIDIA's; those of the questions below it are
# judgements. One launch of each kernel is shown, the longest.
#
# A smoke run's sizes are small, and what lies in a CPU's caches passes the
# roof of its memory. Its ratios are those of a CPU, and of its other work.

# %%
# The counters and timelines of this page. The counters open with ``nsightkit
# ncu``.

downloads = {}
for run in (before, after):
    if run.ncu_path:
        downloads[f"{run.part}, {run.mode}, counters"] = run.ncu_path
    downloads[f"{run.part}, {run.mode}, as a timeline"] = run.trace

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU;
# counters need ``ncu`` on the ``PATH``, or ``NSIGHTKIT_NCU`` to name it:
#
# .. code-block:: console
#
#    $ python examples/19_which_limiter.py
#
# The kernels themselves; save this as ``kernels.py``:
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
#    $ nsightkit capture ncu --nvtx softmax -o softmax -- python kernels.py
#    $ nsightkit ncu softmax.ncu-rep
#    $ nsightkit capture ncu --nvtx step --set full -o all -- python kernels.py
#    $ nsightkit ncu all.ncu-rep --within '^(add|strided)$'
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only limiters --only ceilings
