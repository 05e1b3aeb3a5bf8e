"""
One rank is late: which, and why?
=================================

In data-parallel training all ranks wait for each other in every step. When
one is late, all traces look alike: long collectives, everywhere but there.

What is measured: training in two processes on one machine, of which the
second gets its batches late; then the same with both in time. What came out:
:measured:`22_one_rank_is_late.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# A collective ends when the last rank has come. So a rank that is late by
# some time makes the step longer by that time, on every rank, unless the
# others have something else to do meanwhile. And it is the only one that does
# not wait: its collectives are the shortest.
#
# One rank is always last. If the ranks' times merely vary, all wait for the
# slowest of them, a little longer with each rank more. How long, for times
# that vary by two per cent, without any fault:

# sphinx_gallery_thumbnail_number = 1
import tempfile
import textwrap
from pathlib import Path

import numpy as np

rng = np.random.default_rng(0)
for ranks in (2, 8, 64, 512):
    slowest = rng.normal(1, 0.02, (2000, ranks)).max(axis=1)
    print(f"{ranks:3} ranks: steps {slowest.mean() - 1:.1%} longer")

# %%
# So being last now and then is not a finding. Being last nearly always is: if
# chance decided, one of two ranks would be last in all of so many steps with
# a probability of:

for steps in (4, 8, 12):
    print(f"{steps:2} steps: {2 * 0.5**steps:.2%}")

# %%
# On eight real GPUs
# ------------------
# One step of a recommendation model on eight V100 GPUs, a trace each. The
# traces look alike at first: long collectives. Which rank is waited for?

from nsightkit import Trace, plots
from nsightkit.analysis.ranks import job as ranks
from nsightkit.investigations import case, measure

eight = [case("v100-eight-ranks", f"worker{rank}") for rank in range(8)]
eight[0]

# %%
# The one whose collectives are the shortest. Times are of the step that was
# recorded; *late* is how much later a rank came than the first one, summed.

of_eight = ranks.survey([run.path for run in eight], workers=0)
waits = of_eight.ranks[["rank"]].assign(
    **{
        f"{name} (ms)": of_eight.ranks[f"{name}_ns"] / 1e6
        for name in ("communication", "waited", "late")
    }
)
plots.table(waits, dict.fromkeys(waits.columns[1:], "{:.2f}"))

# %%
# One step shows who was late, not that it always is. That needs more steps:

late = of_eight.stragglers.iloc[0]
print(f"rank {late['rank']}: late in {late['late_units']} of {late['units']}")
print(f"in time, it would have saved at most {of_eight.gain_ns / 1e6:.1f} ms")

# %%
# Measure
# -------
# Every rank profiles the same steps of itself. This page's own process is the
# first rank; the ranks talk through Gloo, or through NCCL where each can have
# a GPU of its own.

before = measure("late-rank", "before")
before

# %%
# Read
# ----
# Usually there is one file a rank, and ``nsightkit ranks`` takes the folder.
# Here the begins and ends that each rank recorded are made traces again.

import pandas as pd

from nsightkit.analysis.ranks import lateness as stragglers
from nsightkit.trace import TraceMeta
from nsightkit.trace.nesting import nesting

TABLES = {
    "ranges": ["step", "data", "forward", "backward", "optimizer", "gloo"],
    "ops": ["operators"],
    "kernels": ["kernels", "nccl"],
}
NAMES = {"gloo": "gloo:all_reduce", "nccl": "ncclDevKernel_AllReduce"}


def events(run, rank, what):
    """Begins and ends of one kind of event on one rank."""
    sides = (f"rank{rank}_{what}_{side}_ns" for side in ("start", "end"))
    start, end = (run.values(side).astype("int64") for side in sides)
    names = [f"step {i}" for i in range(len(start))]
    return pd.DataFrame(
        {
            "start_ns": start,
            "end_ns": end,
            "name": names if what == "step" else NAMES.get(what, what),
            "process": rank,
            "thread": rank << 24 | (what == "gloo"),
        }
    )


def traces(run):
    """One trace a rank, of what it recorded of itself."""
    for rank in range(run.parameters["ranks"]):
        frames = {}
        for table, kinds in TABLES.items():
            parts = [events(run, rank, what) for what in kinds]
            found = pd.concat(parts, ignore_index=True)
            if len(found):
                frames[table] = found.astype({"name": "category"})
        marks = frames["ranges"]
        places = (marks[c] for c in ("thread", "start_ns", "end_ns"))
        marks["level"], marks["parent"] = nesting(*places)
        meta = TraceMeta(tool=run.mode, missing=["memops", "graphs"])
        if "kernels" not in frames:
            meta.missing.append("kernels")
        meta.distributed = {"rank": rank, "world_size": 2}
        yield Trace.from_frames(frames, meta)


job = ranks.survey(traces(before))
plots.rank_arrivals(job.arrivals, title=f"Who waits for whom ({before.mode})")

# %%
# A row is a rank, a bar runs from its arrival at an all-reduce to the end.
# The rank that waits for nobody is the one that all wait for. In milliseconds
# a step: how long each rank waited, and how much later than the other it came.

whole = ["compute", "communication", "waited", "late"]
each = job.ranks[["rank"]].assign(step=job.ranks["step_ns"] / 1e6)
for name in whole:
    each[name] = job.ranks[f"{name}_ns"] / job.ranks["steps"] / 1e6
each = each.dropna(axis=1, how="all")
plots.table(each, dict.fromkeys(["step", *whole], "{:,.2f}"))

# %%
# Both traces are of one machine, so their clocks should agree. Nothing says
# so to ``nsightkit``: it takes the ends of collectives, which come to all
# ranks at nearly the same time, and measures the clocks against each other:

clocks = job.ranks[["rank"]].assign(collectives=job.ranks["matched"])
clocks["offset (µs)"] = job.ranks["clock_offset_ns"] / 1e3
clocks["known to (µs)"] = job.ranks["clock_error_ns"] / 1e3
plots.table(clocks, dict.fromkeys(clocks.columns[2:], "{:,.1f}"))

# %%
# Is it chance, and why is it late? A rank is named if chance explains its
# lateness in less than one job in a hundred. The cause is what it spends more
# time on than the others.

for sentence in job.findings():
    print(textwrap.fill(sentence), end="\n\n")

# %%
# A worked example with a known answer
# ------------------------------------
# These traces are synthetic: ``nsightkit.workloads.planted_ranks`` wrote them
# and they never ran on a GPU. Six ranks, each with a clock of its own, some
# of them seconds apart. One rank's GPU is slower in every step, another gets
# its data late. What was planted, beside what was found:

from nsightkit.workloads import planted_ranks as planted

folder = tempfile.TemporaryDirectory()
clock = {1: 2_500_000, 2: -1_750_000_000, 4: 4_000_000_000, 5: 730}
truth = planted.job(
    folder.name,
    {2: "slow", 4: "data"},
    kind="kineto",
    ranks=6,
    layers=3,
    offsets_ns=clock,
)
known = ranks.survey(folder.name, workers=0)
beside = known.ranks[["rank", "clock_offset_ns", "exposed_ns"]].copy()
beside.insert(1, "planted_offset_ns", [clock.get(r, 0) for r in range(6)])
beside.insert(3, "planted_exposed_ns", truth["exposed_ns"].values())
plots.table(beside)

# %%
# The offsets are right to a fraction of what the ends of a collective differ
# by, the exposed times to the nanosecond. Then who is late, step by step:

plots.rank_lateness(
    known.arrivals,
    stragglers.lateness(known.arrivals),
    title="How late each rank comes (synthetic)",
)

# %%

for sentence in known.findings():
    print(textwrap.fill(sentence), end="\n\n")

# %%
# Of two late ranks the one that is less late is worth nothing alone: the other
# would still be waited for. Hence the line for all of them. The same job was
# also written without late ranks; the time that this one takes more is the
# truth, and what is said to be saved at most must not be less:


def wall_ns(job):
    """From the first arrival at a collective to the last end."""
    each = job["collectives"]
    first = min(t for c in each for t in c["starts"].values())
    return max(t for c in each for t in c["ends"].values()) - first


calm = planted.job(folder.name, {}, kind="kineto", ranks=6, layers=3)
print(f"at most: {known.gain_ns / 1e6:.2f} ms")
print(f"planted: {(wall_ns(truth) - wall_ns(calm)) / 1e6:.2f} ms")

# %%
# Two devices in one trace
# ------------------------
# These traces are synthetic as well: a simulator *played* two devices that
# meet in collectives, and they never ran on a GPU. In one program the second
# device has more to compute, in the other it gets its batches late. One trace
# holds both devices, so ``whatif`` can play it again with the work shared
# equally, and without waits for data. The simulator plays the changed program
# itself, which is the truth:

import nsightkit
from nsightkit.analysis.replay import whatif
from nsightkit.workloads import played, simulator

changes = ("equal-ranks", "no-input-wait")
rows = []
for name in ("uneven-ranks", "late-rank"):
    program = played.PROGRAMS[name]
    path = Path(folder.name, f"{name}.sqlite")
    trace = nsightkit.load(simulator.play(program).write(path))
    truly = played.gains(program, changes=changes)
    for change in changes:
        (row,) = whatif.summary(trace, [change])
        rows.append((name, change, row["speedup"], truly[change]))
names = ["program (simulated)", "change", "predicted", "played"]
plots.table(pd.DataFrame(rows, columns=names))

# %%
# Each change helps one program and leaves the other as it is: a rank that is
# late for want of data gains nothing by sharing the work. With a trace for
# each rank there is no replay of the job. What follows is held against the
# bound of ``nsightkit ranks``.

# %%
# Two ranks of a real job
# -----------------------
# Traces of real jobs are worse. These are the collectives of two ranks, of
# the hundred and twenty-eight that there were, from the test data of
# HolisticTraceAnalysis (MIT licence). Somebody left out events at random, and
# nothing numbers the collectives. Kind, stream, begin and end in microseconds:

real = {
    0: """all_to_all 84 94377 125046, all_to_all 84 125052 187835,
    all_reduce 84 295662 307389, all_reduce 84 348496 396148,
    all_gather 203 585321 627817, all_to_all 84 741096 808923,
    all_to_all 84 854684 875808, all_reduce 84 1131066 1143185,
    all_reduce 84 1146327 1182485, all_gather 203 1185890 1249534""",
    1: """all_to_all 84 129911 187835, all_to_all 84 234342 275717,
    all_reduce 84 298964 307334, all_reduce 84 512687 530301,
    all_gather 203 585405 628149, all_to_all 84 701451 741081,
    all_reduce 84 899992 904616, all_to_all 84 1038545 1129316,
    all_reduce 84 1168655 1182493, all_gather 203 1187182 1249345""",
}


def kernels(rank, text):
    """A trace of nothing but these kernels."""
    rows = [line.split() for line in text.split(",")]
    frame = pd.DataFrame(rows, columns=["name", "stream", "start", "end"])
    for side in ("start", "end"):
        frame[f"{side}_ns"] = frame.pop(side).astype("int64") * 1000
    frame["name"] = "nccl " + frame["name"]
    frame = frame.astype({"name": "category", "stream": "int64"})
    meta = TraceMeta(distributed={"rank": rank, "world_size": 128})
    return Trace.from_frames({"kernels": frame}, meta)


pair = ranks.survey(kernels(*item) for item in real.items())
each = pair.collectives[["kind", "last_rank"]].copy()
each["start (ms)"] = pair.collectives["start_ns"] / 1e6
each["apart at the start (ms)"] = pair.collectives["skew_ns"] / 1e6
plots.table(each, dict.fromkeys(each.columns[2:], "{:,.3f}"))

# %%
# Those collectives are the same whose ends coincide, and they are half of
# what each rank has. The second rank came last to all of them. Is it a
# straggler?

lost = [f"{len(one['ranks'])} ranks: {one['reason']}." for one in pair.lost]
for sentence in [*pair.findings(), *pair.notes, *lost]:
    print(textwrap.fill(sentence), end="\n\n")

# %%
# Change one thing
# ----------------
# The data of the second rank, in time. In a program of one's own that may be
# a loader with more workers, a disk that is not shared, a node that another
# job does not use. Here it is one switch:
#
# .. code-block:: python
#
#    LateConfig(late=False)

# %%
# Measure again
# -------------

after = measure("late-rank", "after")
after

# %%
# The same picture, and the steps of the first rank, without a profiler. It
# never was late itself.

calmer = ranks.survey(traces(after))
plots.rank_arrivals(calmer.arrivals, title=f"With both in time ({after.mode})")

# %%

runs = (before, after)
plots.step_times(
    {run.part: run.values("step_ns") for run in runs},
    title=f"Steps of the first rank ({after.mode})",
)

# %%
# Verdict
# -------
# Computed from both runs, for each way it can come out:

gpus = {(run.provenance["gpu"] or {}).get("name") for run in runs}
comparable = len(gpus) == 1 and before.mode == after.mode
where = "in a smoke run on a CPU" if after.mode == "smoke" else "on a GPU"
planted_rank = before.parameters["late_rank"]
named = job.stragglers["rank"].tolist()
saved_ms = (before.median("step_ns") - after.median("step_ns")) / 1e6
bound_ms = job.gain_ns / max(len(job.steps), 1) / 1e6
if named == [planted_rank]:
    row = job.stragglers.iloc[0]
    found = (
        f"the late rank was named, and no other: late in {row['late_units']} "
        f"of {row['units']} {row['unit']}s (cause: {row['cause']})"
    )
elif planted_rank in named:
    found = f"the late rank was named, but so was another ({named})"
elif named:
    found = f"the wrong rank was named ({named})"
else:
    found = "nobody was named, though one rank was late"
still = "nobody was named any more"
if len(calmer.stragglers):
    who = calmer.stragglers["rank"].tolist()
    still = f"rank {who[0]} was named, though none was made late"
held = "no more than that"
if saved_ms > bound_ms:
    held = f"{saved_ms / bound_ms - 1:.0%} more" if bound_ms else "more"
verdict = (
    f"{where}, {found}. Its traces promised at most {bound_ms:.1f} ms of each "
    f"profiled step; in time it saved {saved_ms:.1f} ms of each of the other "
    f"steps, which no profiler watched: {held}. Afterwards {still}."
)
if not comparable:
    verdict = "the runs are not of the same machine; nothing to compare."
if before.mode == after.mode == "smoke":
    print("This page's own run:", textwrap.fill(verdict), sep="\n")
    verdict = (
        f"on {eight[0].source['gpu']} (case file), rank {late['rank']} came "
        f"late to {late['late_units']} of {late['units']} {late['unit']}s; in "
        f"time, it would have saved at most {of_eight.gain_ns / 1e6:.1f} ms "
        "of the step."
    )
findings = {"verdict": verdict, "saved_ms": saved_ms, "bound_ms": bound_ms}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# Two processes on one machine share it: what one computes slows the other.
# Through Gloo a collective is work of the CPU, and its ends spread by what
# threads wait for a core. Over a network there are links, and ranks that are
# neighbours.
#
# The bound says what is lost to waiting, not that the rank can be in time. It
# holds for the steps that were profiled; others vary about it. Where ranks
# wait for each other in several groups, one late rank makes others late;
# ``nsightkit ranks`` says who is held up by whom.
#
# Pipelines send to one rank and receive from another. Whose partner is whose
# is not in the trace, and nothing is said about them.

# %%
# Two of the synthetic traces, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"rank {rank}, synthetic, as a timeline": Path(path)
    for rank, path in enumerate(truth["paths"])
    if rank in (0, 2)
}

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/22_one_rank_is_late.py
#
# Ranks of your own, a file each in one folder:
#
# .. code-block:: console
#
#    $ nsightkit ranks traces/
#    $ nsightkit ranks traces/ --each --format csv > collectives.csv
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only late-rank
