"""
One rank is late: which, and why?
=================================

In data-parallel training all ranks wait for each other in every step. When
one is late, all traces look alike: long collectives, everywhere but there.

.. in-short::
"""

# %%
# The symptom
# -----------
# One step of a recommendation model on eight GPUs, a trace each. The line
# that all ranks meet in is one that every training loop has:
#
# .. code-block:: python
#
#    loss.backward()  # gradients are all-reduced: nobody goes on alone

# sphinx_gallery_thumbnail_number = 1
from nsightkit import plots
from nsightkit.analysis.ranks import job as ranks
from nsightkit.investigations import case

eight = [case("v100-eight-ranks", f"worker{rank}") for rank in range(8)]
eight[0]

# %%
# Predict: what does the late rank look like?
# -------------------------------------------
# A collective ends when the last rank has come. Which rank has the *longest*
# collectives, the one that is late or the ones that are not? And who would a
# profiler of that rank alone make you suspect?
#
# .. dropdown:: Answer
#
#    All but the late one. Who comes last waits for nobody, so its collectives
#    are the shortest, and its own profile shows nothing but work. The others'
#    profiles blame the network.
#
# One rank is always last. Two ranks take a dozen steps, and the same one is
# last in all of them. How likely is that by chance?
#
# .. dropdown:: Answer
#
#    One in two thousand or so: two ways out of all sequences of twelve. Last
#    now and then is not a finding. Last nearly always is.

# %%
# Evidence: eight GPUs
# --------------------
# A row is a rank. A bar runs from its arrival at a collective to the end. The
# rank with the shortest bars is the one that the others wait for:

job = ranks.survey([run.path for run in eight], workers=0)
plots.rank_arrivals(job.arrivals, title="One step, eight V100 (case file)")

# %%
# In order, with the rank that came last:

import textwrap

order = zip(job.collectives["kind"], job.collectives["last_rank"], strict=True)
named = ", ".join(f"{kind} (rank {last})" for kind, last in order)
print(textwrap.fill(named))

# %%
# Rank 7 comes last to the first five. To the last three another rank does, but
# rank 7 still comes late. Late against which rank? Against the middle one:
# *late* is how much later a rank came than the middle rank of the eight,
# summed over the collectives. *Waited* is how long it stood in them before the
# last one came:

table = job.ranks[["rank"]].copy()
for name in ("communication", "waited", "late"):
    table[f"{name} (ms)"] = job.ranks[f"{name}_ns"] / 1e6
plots.table(table, dict.fromkeys(table.columns[1:], "{:.2f}"))

# %%
# Is it chance, and why is it late? A rank is named if chance explains its
# lateness in less than one job in a hundred:

for sentence in job.findings():
    print(textwrap.fill(sentence), end="\n\n")

# %%
# The cause stays open here: these traces do not show what the rank did before
# it came. That, too, is an answer, and it says what to record next.

# %%
# Evidence: a job whose truth is known
# ------------------------------------
# These traces are synthetic: ``nsightkit.workloads.planted_ranks`` wrote them
# and they never ran on a GPU. Of six ranks, one has a slower GPU, another gets
# its data late, and each has a clock of its own, some of them seconds apart.

# fold: How the job is planted
import tempfile
from pathlib import Path

import pandas as pd

from nsightkit.analysis.ranks import lateness
from nsightkit.workloads import planted_ranks as planted

folder = tempfile.TemporaryDirectory()
clock = {1: 2_500_000, 2: -1_750_000_000, 4: 4_000_000_000, 5: 730}
faults = {2: "slow", 4: "data"}
shape = {"kind": "kineto", "ranks": 6, "layers": 3}
truth = planted.job(folder.name, faults, offsets_ns=clock, **shape)
known = ranks.survey(folder.name, workers=0)
plots.rank_lateness(
    known.arrivals,
    lateness.lateness(known.arrivals),
    title="How late each rank comes (synthetic)",
)

# %%
# The clocks are measured against each other: the ends of a collective come to
# all ranks at nearly the same time. *Exposed* is communication beside which
# the rank did nothing else. Beside what was planted, in ms:

# fold: How the table is put together
beside = pd.DataFrame(
    {
        "rank": known.ranks["rank"],
        "clock, planted": [clock.get(rank, 0) / 1e6 for rank in range(6)],
        "clock, found": known.ranks["clock_offset_ns"] / 1e6,
        "exposed, planted": pd.Series(truth["exposed_ns"].values()) / 1e6,
        "exposed, found": known.ranks["exposed_ns"] / 1e6,
    }
)
plots.table(beside, dict.fromkeys(beside.columns[1:], "{:,.3f}"))

# %%
# And both late ranks are named, with their causes:

for sentence in known.findings()[:2]:
    print(textwrap.fill(sentence), end="\n\n")

# %%
# Change one thing: the work, or the data?
# ----------------------------------------
# Two programs with two devices each, in one trace. In one, the second device
# has more to compute; in the other it gets its batches late. Both are
# synthetic: a simulator *played* them, and they never ran on a GPU. ``whatif``
# predicts the gain from the trace; the simulator then plays the changed
# program, which is the truth.

# fold: How the table is worked out
import nsightkit
from nsightkit.analysis.replay import whatif
from nsightkit.workloads import simulated_programs, simulator

changes = ("equal-ranks", "no-input-wait")
rows = []
for name in ("uneven-ranks", "late-rank"):
    program = simulated_programs.PROGRAMS[name]
    path = Path(folder.name, f"{name}.sqlite")
    trace = nsightkit.load(simulator.play(program).write(path))
    truly = simulated_programs.true_gains(program, changes=changes)
    for change in changes:
        (row,) = whatif.summary(trace, [change])
        rows.append((name, change, row["speedup"], truly[change]))
names = ["program", "change", "predicted", "played"]
plots.table(
    pd.DataFrame(rows, columns=names),
    dict.fromkeys(names[2:], "{:.2f} times"),
)

# %%
# Each change helps one program and leaves the other as it is. A rank that is
# late for want of data gains nothing from less work: find the cause before you
# balance the load.

# %%
# Verdict
# -------
# The late rank shows in the others' traces, and by its short collectives in
# its own. Naming it takes all traces of one job, and saying why takes what the
# CPU of that rank did.

# %%
# Limits
# ------
# * The eight traces hold one step. It shows who was late, not that it always
#   is.
# * The gain says what is lost to waiting, not that the rank can be on time.
#   Of two late ranks the one that is less late is worth nothing alone.
# * Where ranks wait for each other in several groups, one late rank makes
#   others late; ``nsightkit ranks`` says who is held up by whom.
# * Pipelines send to one rank and receive from another. Whose partner is whose
#   is not in the trace, and nothing is said about them.

# %%
# Run it yourself
# ---------------
# On ranks of your own, a file each in one folder:
#
# .. code-block:: console
#
#    $ nsightkit ranks traces/
#    $ nsightkit ranks traces/ --each --format csv > collectives.csv
#
# This page, which measures with a GPU and else runs small on the CPU:
#
# .. code-block:: console
#
#    $ python examples/22_one_rank_is_late.py

downloads = {
    f"rank {rank} of the eight": run.trace
    for rank, run in enumerate(eight)
    if rank in (1, 7)
}
downloads["a late rank, synthetic"] = Path(truth["paths"][2])

# %%
# Exercises
# ---------
# 1. Open the timelines of ranks 1 and 7 above. In which of them does the
#    network look slow?
#
#    .. dropdown:: Answer
#
#       In that of rank 1: its first all-to-all is by far the longest event of
#       the step. Nearly all of it is waiting. Rank 7 has the same collective,
#       and there it is hardly visible.
#
# 2. By the table, how much of rank 1's communication is waiting, and what does
#    a faster network save?
#
#    .. dropdown:: Answer
#
#       Almost all of it, :measured:`22_one_rank_is_late.waiting:.0%`. Links
#       that are twice as fast would halve only the rest.
#
# 3. All ranks do the same work, and each step takes a few per cent longer
#    than on one GPU, with no rank late. Where does the time go?
#
#    .. dropdown:: Answer
#
#       Times vary, and all wait for the slowest of each step. The more ranks,
#       the slower the slowest is: with times that vary by two per cent,
#       512 ranks lose :measured:`22_one_rank_is_late.slowest:.0%` that way.

# %%
# Measured here
# -------------
# .. own-run::
#
# Training in two processes on one machine, of which the second gets its
# batches late; then the same with both on time. Every rank profiles the same
# steps of itself. The ranks talk through Gloo, or through NCCL where each can
# have a GPU of its own.

# fold: How traces are made of what each rank recorded
import numpy as np

from nsightkit.trace import Trace, TraceMeta
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


from nsightkit.investigations import headline, measure

before, after = (measure("late-rank", part) for part in ("before", "after"))
runs = (before, after)
own, calmer = (ranks.survey(traces(run)) for run in runs)
title = f"Who waits for whom ({before.mode})"
plots.rank_arrivals(own.arrivals, title=title)
before

# %%
# With both on time:

# fold: How the figures are drawn
plots.rank_arrivals(calmer.arrivals, title=f"With both on time ({after.mode})")
plots.step_times(
    {run.part: run.values("step_ns") for run in runs},
    title=f"Steps of the first rank ({after.mode})",
)
after

# %%
# What the runs say:

# fold: How the answer is put together
planted_rank = before.parameters["late_rank"]
named = own.stragglers["rank"].tolist()
saved_ms = (before.median("step_ns") - after.median("step_ns")) / 1e6
bound_ms = own.gain_ns / max(len(own.steps), 1) / 1e6
if named == [planted_rank]:
    row = own.stragglers.iloc[0]
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
said = (
    f"{found}. Its traces promised at most {bound_ms:.1f} ms of each "
    f"profiled step; on time it saved {saved_ms:.1f} ms of each of the other "
    f"steps, which no profiler watched: {held}. Afterwards {still}."
)
late = job.stragglers.iloc[0]
first = job.ranks.iloc[1]
steps = np.random.default_rng(0).normal(1, 0.02, (2000, 512))
findings = headline(
    said,
    *runs,
    otherwise=(
        f"of eight GPUs, rank {late['rank']} came late to "
        f"{late['late_units']} of {late['units']} {late['unit']}s. It has the "
        f"shortest collectives of all; rank {first['rank']} waited longest, "
        f"{first['waited_ns'] / 1e6:.1f} ms. Had rank {late['rank']} been in "
        f"time, the step would be at most {job.gain_ns / 1e6:.1f} ms shorter."
    ),
    badge=eight[0].label,
    waiting=float(first["waited_ns"] / first["communication_ns"]),
    slowest=float(steps.max(axis=1).mean() - 1),
)
