"""
One rank is late: which, and why?
=================================

In data-parallel training all ranks wait for each other in every step. When
one is late, the traces of all other ranks look alike: long collectives. How
do we find the late one?

.. in-short::
"""

# %%
# The symptom
# -----------
# We have one step of a recommendation model on eight GPUs, one trace per rank.
# The ranks meet in a line that every training loop has:
#
# .. code-block:: python
#
#    loss.backward()  # gradients are all-reduced: every rank waits here

# record: 60 s
# sphinx_gallery_thumbnail_number = 1
from _lib import figures

from nsightkit import plots
from nsightkit.analysis.ranks import job as ranks
from nsightkit.guide import case

eight = [case("v100-eight-ranks", f"worker{rank}") for rank in range(8)]
eight[0]

# %%
# Predict: what does the late rank look like?
# -------------------------------------------
# A collective ends when the last rank has arrived. Which rank has the
# *longest* collectives, the late one or the punctual ones? And what would you
# suspect from a profile of that rank alone?
#
# .. dropdown:: Answer
#
#    All but the late one. The last rank to arrive never waits, so its
#    collectives are the shortest, and its profile shows only work. The
#    profiles of the others blame the network.
#
# One rank is always last. Suppose that in a job of two ranks the same one is
# last in twelve steps. How likely is that by chance?
#
# .. dropdown:: Answer
#
#    About one in two thousand: two ways out of all sequences of twelve. Being
#    last now and then is not a finding. Being last nearly always is.

# %%
# Evidence: who waits for whom on eight GPUs?
# -------------------------------------------
# One row per rank. A bar runs from the rank's arrival at a collective to its
# end. The others wait for the rank with the shortest bars:

job = ranks.survey([run.path for run in eight], workers=0)
figures.rank_arrivals(job.arrivals, title="One step, eight V100s (case file)")

# %%
# In order, with the last rank of each:

import textwrap

order = zip(job.collectives["kind"], job.collectives["last_rank"], strict=True)
named = ", ".join(f"{kind} (rank {last})" for kind, last in order)
print(textwrap.fill(named))

# %%
# Rank 7 arrives last at :measured:`22_one_rank_is_late.last` of the eight
# collectives, and after the median rank at all eight. Being last once proves
# little, since some rank always is. Being behind the median every time is a
# pattern. In the table, *late* is how much later than the median rank, summed
# over the collectives, and *waited* is the time in them before the last rank
# arrived:

table = job.ranks[["rank"]].copy()
lasts = job.collectives["last_rank"].value_counts()
table["last to"] = table["rank"].map(lasts).fillna(0).astype(int)
for name in ("communication", "waited", "late"):
    table[f"{name} (ms)"] = job.ranks[f"{name}_ns"] / 1e6
plots.table(table, dict.fromkeys(table.columns[2:], "{:.2f}"))

# %%
# Is it chance, and why is it late? nsightkit names a rank if chance explains
# its lateness in less than one percent of jobs:

for sentence in job.findings():
    print(textwrap.fill(sentence), end="\n\n")

# %%
# How do these numbers fit together?
# :measured:`22_one_rank_is_late.median_us:.0f` µs is the median over the eight
# collectives. Most of the :measured:`22_one_rank_is_late.late_ms:.2f` ms in
# the table is one all-to-all, at which rank 7 arrives
# :measured:`22_one_rank_is_late.most_ms:.2f` ms after the median rank. Ranks 2
# and 6 are nearly as late there, only
# :measured:`22_one_rank_is_late.next_ms:.2f` ms ahead of rank 7. The gain
# counts the time for which all others wait for rank 7 alone, and over the
# whole step that is :measured:`22_one_rank_is_late.gain_ms:.1f` ms.
#
# The cause stays open: these traces do not show how rank 7 spent the time
# before it arrived. To find out, record that rank with its CPU side: loader,
# Python ranges and OS calls.

# %%
# Can we trust it? A job whose truth we know
# ------------------------------------------
# These traces are synthetic and never ran on a GPU. Of six ranks, one has a
# slower GPU, and another gets its data late, both by the same amount in every
# step.

# fold: How the job is made
import pandas as pd
from _lib import synthetic

from nsightkit.analysis.ranks import lateness

known = ranks.survey(synthetic.ranks({2: "slow", 4: "data"}, count=6))
figures.rank_lateness(
    known.arrivals,
    lateness.lateness(known.arrivals),
    title="How late each rank comes (synthetic)",
)

# %%
# Both late ranks are named, with their causes:

for sentence in known.findings()[:2]:
    print(textwrap.fill(sentence), end="\n\n")

# %%
# Change one thing: the work, or the data?
# ----------------------------------------
# Two jobs of two ranks. In one, the second rank's kernels take longer; in the
# other it gets its batches late. Both are synthetic and never ran on a GPU. We
# compare the predicted gain with the true one, from the same job without the
# fault:

# fold: How the table is worked out
repaired = ranks.survey(synthetic.ranks({}, count=2))
rows = []
for fault in ("slow", "data"):
    faulty = ranks.survey(synthetic.ranks({1: fault}, count=2))
    late = faulty.stragglers.iloc[0]
    truth_ns = faulty.ranks["span_ns"].max() - repaired.ranks["span_ns"].max()
    rows.append(
        {
            "fault": fault,
            "late rank": late["rank"],
            "cause found": late["cause"],
            "gain found (ms)": faulty.gain_ns / 1e6,
            "true gain (ms)": truth_ns / 1e6,
        }
    )
plots.table(pd.DataFrame(rows))

# %%
# Both ranks are equally late, but only one has more to compute. A rank that
# waits for its data gains nothing from less work: find the cause before you
# balance the load. For a late data loader, see
# :doc:`02_starved_input_pipeline`.

# %%
# Verdict
# -------
# A late rank makes the collectives of all other ranks long, and its own short.
# To name it we need the traces of all ranks. To explain it we need
# the CPU side of that rank. On the eight GPUs we know who is late, but not
# why; in the synthetic jobs we know both. The chapter
# :doc:`/guide/many_gpus` continues from here.

# %%
# Limits
# ------
# * The eight traces hold one step. They show which rank was late in it, not
#   that it always is.
# * The gain is the time lost to waiting. It does not show that the rank can be
#   on time. Of two late ranks, fixing only the less late one gains nothing.
# * Where ranks wait for each other in several groups, one late rank makes
#   others late; ``nsightkit ranks`` lists which rank delays which.
# * The trace does not identify send/recv peers, so pipelines are not analysed.

# %%
# Run it yourself
# ---------------
# On your own job, with one file per rank in a folder:
#
# .. code-block:: console
#
#    $ nsightkit ranks traces/
#    $ nsightkit ranks traces/ --format csv > ranks.csv
#
# On a GPU, this page's script also trains in two processes, one of them late.
# Without a GPU it runs a tiny CPU version:
#
# .. code-block:: console
#
#    $ python examples/22_one_rank_is_late.py

downloads = {
    f"rank {rank} of the eight": run.trace
    for rank, run in enumerate(eight)
    if rank in (1, 7)
}

# %%
# Exercises
# ---------
# 1. Open the timelines of ranks 1 and 7 above. In which of them does the
#    network look slow?
#
#    .. dropdown:: Answer
#
#       In rank 1's: its first all-to-all is by far the longest event of the
#       step, and nearly all of it is waiting. Rank 7 has the same collective,
#       and there it is barely visible.
#
# 2. According to the table, how much of rank 1's communication is waiting, and
#    what would a faster network save?
#
#    .. dropdown:: Answer
#
#       Almost all of it, :measured:`22_one_rank_is_late.waiting:.0%`. Links
#       with twice the bandwidth would halve only the rest.
#
# 3. All ranks do the same work, and each step takes a few per cent longer than
#    on one GPU, with no rank late. Where does the time go?
#
#    .. dropdown:: Answer
#
#       Times vary, and all wait for the slowest rank of each step. The more
#       ranks, the slower the slowest is: with times that vary by two per cent,
#       512 ranks lose :measured:`22_one_rank_is_late.slowest:.0%` that way.

# %%
# Measured here
# -------------
# .. own-run::
#
# Training in two processes, of which the second gets its batches late; then
# the same with both on time.

from _lib import late_rank

from nsightkit.guide import headline, measure

# 8 x 1024 x 1024 gradients in fp32 are 34 MB, which Gloo sends through the
# host: a step takes 30 to 60 ms, and 20 ms of lateness show.
sizes = dict(ranks=2, hidden=1024, layers=8, batch=512, bucket_mb=8.0)
sizes |= dict(data_ms=2.0, late_ms=20.0, steps=20, profiled=16)
small = dict(ranks=2, hidden=128, layers=4, batch=32, bucket_mb=0.1)
small |= dict(data_ms=2.0, late_ms=40.0, steps=5, profiled=16)

before = measure(
    "late-rank/before",
    late_rank.run,
    gpu=dict(**sizes, late=True),
    small=dict(**small, late=True),
)
after = measure(
    "late-rank/after",
    late_rank.run,
    gpu=dict(**sizes, late=False),
    small=dict(**small, late=False),
)
if before and after:
    own = ranks.survey(late_rank.traces(before.rows))
    calmer = ranks.survey(late_rank.traces(after.rows))
    title = f"Who waits for whom ({before.mode})"
    figures.rank_arrivals(own.arrivals, title=title)
before

# %%

# fold: How the figures are drawn
if before and after:
    title = f"With both on time ({after.mode})"
    figures.rank_arrivals(calmer.arrivals, title=title)
    steps_ns = [late_rank.step_ns(run.rows) for run in (before, after)]
    plots.step_times(
        dict(zip(("one rank late", "both on time"), steps_ns, strict=True)),
        title=f"Steps of the first rank ({after.mode})",
    )
after

# %%

# fold: How the answer is put together
import numpy as np


def named_ranks(own, late):
    """Compare the named ranks with the rank that we made late."""
    named = own.stragglers["rank"].tolist()
    if named == [late]:
        row = own.stragglers.iloc[0]
        return (
            f"the late rank was named, and no other: late in "
            f"{row['late_units']} of {row['units']} {row['unit']}s "
            f"(cause: {row['cause']})"
        )
    if late in named:
        return f"the late rank was named, but so was another ({named})"
    if named:
        return f"the wrong rank was named ({named})"
    return "no rank was named, though one was late"


said = ""
if before and after:
    saved_ms = (steps_ns[0].median() - steps_ns[1].median()) / 1e6
    bound_ms = own.gain_ns / max(own.ranks["steps"].max(), 1) / 1e6
    still = "no rank was named"
    if len(calmer.stragglers):
        who = calmer.stragglers["rank"].iloc[0]
        still = f"rank {who} was named, though none was made late"
    said = (
        f"{named_ranks(own, late=1)}. Its traces promised at most "
        f"{bound_ms:.1f} ms of each profiled step; being on time saved "
        f"{saved_ms:.1f} ms of each unprofiled step. "
        f"Afterwards {still}."
    )
late = job.stragglers.iloc[0]
first = job.ranks.iloc[1]
late_ns = lateness.lateness(job.arrivals)[job.arrivals["rank"] == late["rank"]]
collective = job.arrivals.loc[late_ns.idxmax(), "collective"]
worst = job.arrivals[job.arrivals["collective"] == collective]
next_ns = worst["wait_ns"].nsmallest(2).iloc[-1]
steps = np.random.default_rng(0).normal(1, 0.02, (2000, 512))
findings = headline(
    said,
    before,
    after,
    otherwise=(
        f"rank {late['rank']}: it waits the least, so its collectives are the "
        f"shortest. It arrives after the median rank at "
        f"{late['late_units']} of {late['units']} {late['unit']}s. With rank "
        f"{late['rank']} on time, the step would be at most "
        f"{job.gain_ns / 1e6:.1f} ms shorter. These traces "
        f"do not show why it is late; traces with the CPU side would (shown "
        f"on synthetic jobs)."
    ),
    badge=eight[0].label,
    last=f"{lasts[late['rank']]}",
    median_us=late["median_late_ns"] / 1e3,
    late_ms=late["late_ns"] / 1e6,
    most_ms=late_ns.max() / 1e6,
    next_ms=next_ns / 1e6,
    gain_ms=job.gain_ns / 1e6,
    waiting=float(first["waited_ns"] / first["communication_ns"]),
    slowest=float(steps.max(axis=1).mean() - 1),
)
