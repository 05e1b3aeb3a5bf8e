"""
Did my change help, and will it stay?
=====================================

Two captures never agree exactly. Which of their differences come from the
change, and how does a CI job keep a gain without false alarms?

.. in-short::
"""

# %%
# The symptom: two pairs of traces
# --------------------------------
# Both pairs were published as *before* and *after* a change. The first is the
# guide's worked example (:ref:`step 5 <example-changed>`), ResNet-50 on one
# GPU, whose data loader got workers. The second is a job on two GPUs, a window
# of each run. Which of the two changes helped?

# record: 60 s
# sphinx_gallery_thumbnail_number = 1
# fold: How the table is made
import textwrap

import pandas as pd
from _lib import figures, pairs

from nsightkit import plots
from nsightkit.analysis.compare import baseline, check, diff
from nsightkit.analysis.compare import runs as run_metrics
from nsightkit.guide import case, headline, measure
from nsightkit.workloads import training

first = [case("v100-starved-loader", f"workers-{n}") for n in (0, 4)]
sides = ("before", "after")
second = [case("pair-that-proves-nothing", side) for side in sides]
rows = []
for name, pair in (("ResNet-50", first), ("two-GPU job", second)):
    was, now = (run.trace.summary() for run in pair)
    row = {"pair": name}
    for what in ("wall_ns", "kernel_ns", "idle_ns"):
        change = round(now[what] / was[what] - 1, 2)
        row[what.replace("_ns", " time")] = change or 0.0
    row["steps"] = len(pair[0].trace.steps())
    rows.append(row)
changes = pd.DataFrame(rows)
looks = dict.fromkeys(changes.columns[1:-1], "{:+.0%}")
plots.table(changes, looks)

# %%
# Kernel time fell only in the second pair. We will see that only the first
# pair is evidence.

second[0]

# %%
# Predict: how many steps are enough?
# -----------------------------------
# Suppose that every step after a change is faster than every step before it.
# Even if the change did nothing, chance would sometimes order the steps like
# that. How many steps per side make that less likely than one in twenty?
#
# .. dropdown:: Answer
#
#    :measured:`20_one_change_at_a_time.enough` per side, if the two sides do
#    not overlap: of all ways to pick which steps are *before*, two separate
#    them like that. Steps that overlap need more.

# %%
# Evidence: what does the first pair show?
# ----------------------------------------
# ``diff`` compares two traces. It gives the change of each row with an
# interval and calls it *changed*, *within noise* or *inconclusive*:


# fold: How the figure is drawn
of_first = diff.compare(*(run.trace for run in first))
title = "A data loader with four workers (V100, case file)"
figures.change_intervals(pairs.changed(of_first), title=title, top=9)

# %%
# Idle time fell far beyond the noise, because waiting for data
# (``input-pipeline``) vanished from the median step. The GPU's own work
# (``busy``) barely changed. That comparison is valid only if the program did
# the same work on both sides, which ``diff`` checks:


def show(summary):
    """Print the first lines of ``nsightkit diff``."""
    moved = summary["bottleneck"]["text"]
    for text in (summary["headline"], moved, *summary["warnings"]):
        print(textwrap.fill(text, 76, initial_indent="- "))


show(of_first.summary())

# %%
# The steps took :measured:`20_one_change_at_a_time.whole:.0%` less time in
# all, as in the first table. ``diff`` reports
# :measured:`20_one_change_at_a_time.step:.0%` less for the median step,
# because it sets two outliers of the second run aside, its first and its fifth
# step. Both are true, but only the second describes the change.
#
# Watch for lines like the last one above: a library chose other convolution
# kernels in the second run. They took about as long here. Had they been slower
# or faster, we would have credited the loader with the difference.

# %%
# Evidence: and the second pair?
# ------------------------------

of_second = diff.compare(*(run.trace for run in second)).summary()
show(of_second)

# %%
# Kernels took :measured:`20_one_change_at_a_time.kernels_less:.0%` less time
# *after*, and attention :measured:`20_one_change_at_a_time.attention_less:.0%`
# less. That would make a fine headline, and it would be wrong: the second
# capture has fewer launches. Both are windows of about the same length, cut
# out of a job without step ranges, so we cannot compare step with step. For
# the same reason, other differences between the two windows, such as their
# bottlenecks, show nothing about the change.

# %%
# Change one thing: capture steps, alternately
# --------------------------------------------
# The second pair has no step ranges. One line in the program adds them:
#
# .. code-block:: diff
#
#     for batch in loader:
#    +    with nvtx.annotate("step"):
#             train(batch)
#
# Then make a single change, and capture alternately: before, after, before,
# after. A machine that gets warm or busy then affects both sides, and the two
# captures of *one* program show the size of run-to-run differences:
#
# .. code-block:: console
#
#    $ nsightkit diff before.sqlite after.sqlite \
#          --also-before before2.sqlite --also-after after2.sqlite

# %%
# Keep the gain: a gate in CI
# ---------------------------
# A later commit can undo a gain unnoticed. Most CI jobs compare the
# mean of one run with yesterday's, with a tolerance of five percent. Runs of
# one program differ: say with a standard deviation of one percent, two, or
# four. How many unchanged runs does the job fail, and how many runs that are
# eight percent slower does it let pass?
#
# .. dropdown:: Answer
#
#    The difference of two runs varies by the root of two times the spread of
#    a run. From that the two shares follow. With four percent,
#    :measured:`20_one_change_at_a_time.alarm_4:.0%` of the unchanged runs fail
#    and :measured:`20_one_change_at_a_time.missed_4:.0%` of the slow runs
#    pass. More steps per run do not help: a run as a whole is a single draw
#    of a clock, a memory placement and the machine's other work.
#
#    .. list-table::
#       :header-rows: 1
#
#       * - runs differ by
#         - fails though unchanged
#         - lets a slower run pass
#       * - one percent
#         - :measured:`20_one_change_at_a_time.alarm_1:.1%`
#         - :measured:`20_one_change_at_a_time.missed_1:.1%`
#       * - two percent
#         - :measured:`20_one_change_at_a_time.alarm_2:.1%`
#         - :measured:`20_one_change_at_a_time.missed_2:.1%`
#       * - four percent
#         - :measured:`20_one_change_at_a_time.alarm_4:.1%`
#         - :measured:`20_one_change_at_a_time.missed_4:.1%`

# fold: The arithmetic
from statistics import NormalDist

TOLERANCE, SLOWDOWN = 0.05, 0.08
shares = {}
for percent in (1, 2, 4):
    difference = NormalDist(0, percent / 100 * 2**0.5)
    missed = difference.cdf(TOLERANCE - SLOWDOWN)
    shares[f"alarm_{percent}"] = 1 - difference.cdf(TOLERANCE)
    shares[f"missed_{percent}"] = missed

# %%
# ``nsightkit check`` compares a run with a baseline of several runs, each in a
# new process:
#
# .. code-block:: console
#
#    $ nsightkit check run-1.json --baseline baseline.json --update
#    $ nsightkit check run-2.json --baseline baseline.json --add
#    $ nsightkit check run-3.json --baseline baseline.json --add
#
# It fails a run that exceeds the tolerance *and* the noise of the baseline. If
# it cannot decide, it reports *inconclusive* with the smallest change that it
# could have seen, and the job measures once more.
#
# Does it catch a recorded slowdown? We take the first pair's second run, with
# four loader workers, as the baseline. Then ``num_workers=0`` slips into a
# commit, and the job sees one run of six steps:

bad, good = first
kept = baseline.make([run_metrics.of_trace(good.trace)])
checked = check.compare(kept, [run_metrics.of_trace(bad.trace)])
gates = pd.DataFrame(checked["gates"])
plots.table(
    gates[["metric", "status", "ratio", "limit"]],
    dict.fromkeys(("ratio", "limit"), "{:.3f}"),
)

# %%
# The step's time fails: the median step goes from
# :measured:`20_one_change_at_a_time.good_ms:.1f` back to
# :measured:`20_one_change_at_a_time.bad_ms:.1f` ms. (This is the same change
# seen from the fast side, with the outliers.) ``limit`` is the ratio from
# which a metric fails. For the step's time it is wider than the tolerance of
# :measured:`20_one_change_at_a_time.tolerance:.0%`, because six steps with two
# outliers leave that much noise.
#
# Counts barely vary between runs, so one run of each is enough for them. The
# number of kernels fell a little, because a library chose other ones; that is
# within the tolerance.

# %%
# Verdict
# -------
# The first pair shows the effect of the change, on the step and on what the
# GPU waits for. Each side was captured once, so it cannot show how much two
# runs of the same program differ. The second pair shows nothing about its
# change. Before a gate may fail a job, it needs several baseline runs and a
# third answer, *inconclusive*.

# %%
# Limits
# ------
# * Two captures per side tell us little about run-to-run differences, so the
#   rule relies on typical values and misses small effects. A small change
#   needs more captures, not more steps.
# * A profiler slows down the CPU. Where the CPU sets the pace, measure the
#   step without a profiler, and use the profile to locate the difference.
# * The comparison ignores the loss, memory and other sizes.
# * The arithmetic of the false alarms assumes normally distributed runs. Runs
#   made one after the other miss how the machine behaves at another hour, or
#   after a driver update: make a baseline at several times.
# * On a shared machine, runs may differ by more than the slowdown. A gate that
#   lets it pass there is not broken.

# %%
# Run it yourself
# ---------------
# On the first pair, which comes with nsightkit:
#
# .. code-block:: console
#
#    $ nsightkit demo
#    $ cd nsightkit-demo
#    $ nsightkit diff workers-0.parquet workers-4.parquet
#    $ nsightkit check workers-4.parquet --baseline b.json --update
#    $ nsightkit check workers-0.parquet --baseline b.json
#
# The steps of a job on GitHub Actions; :doc:`the gate's page </gate>` has the
# whole file and its requirements:
#
# .. literalinclude:: /ci/performance-gate.yml
#    :language: yaml
#    :start-at: - name: Measure
#    :end-before: # The new baseline is an artifact
#
# On a GPU, this page's script also captures a training step with and without
# loader workers, twice each. Without a GPU it runs a tiny CPU version:
#
# .. code-block:: console
#
#    $ python examples/20_one_change_at_a_time.py

downloads = {
    "before, of the pair that shows nothing": second[0].trace,
    "after, of the pair that shows nothing": second[1].trace,
}

# %%
# Exercises
# ---------
# 1. Run ``diff`` on the demo's traces the other way round, *after* first. What
#    must change in the answer, and what must not?
#
#    .. dropdown:: Answer
#
#       The signs change, and *faster* becomes *slower*. The percentage also
#       changes: a step that takes half the time takes twice as long on the way
#       back. The warnings stay.
#
# 2. In the second pair, did attention really get faster? Divide its time by
#    its launches on each side.
#
#    .. dropdown:: Answer
#
#       No. In milliseconds, a launch takes
#       :measured:`20_one_change_at_a_time.launch_before:.2f` before and
#       :measured:`20_one_change_at_a_time.launch_after:.2f` after. There are
#       only fewer launches.
#
# 3. A colleague shows one step before and one after, thirty percent faster.
#    What do you ask for?
#
#    .. dropdown:: Answer
#
#       A second capture of the *unchanged* program. If that differs by the
#       same amount, there is nothing to explain yet.
#
# 4. Runs of your program differ by four percent. You want to notice when it
#    gets five percent slower. What do you measure instead?
#
#    .. dropdown:: Answer
#
#       A metric that barely varies: kernels per step, bytes copied, peak
#       memory, or the time on the GPU. Or find the cause of the differences
#       and hold it fixed: clocks, the machine's other work, the data.

# fold: The numbers of the second answer
rows = pd.DataFrame(of_second["kernels"])
attention = rows[rows["category"] == "attention"].iloc[0]
launch_ms = {
    f"launch_{side}": float(
        attention[f"{side}_total_ns"] / attention[f"{side}_count"] / 1e6
    )
    for side in sides
}
took = [run.trace.kernels(by="category") for run in second]
took = [one.set_index("category")["total_ns"] for one in took]
less = {
    "kernels_less": 1 - took[1].sum() / took[0].sum(),
    "attention_less": 1 - took[1]["attention"] / took[0]["attention"],
}

# %%
# Measured here
# -------------
# .. own-run::
#
# A training step without loader workers and with them, captured alternately.
# The two captures with workers are the baseline of the gate.

# One process decodes a batch in about 80 ms, and a step takes an H100 20 to
# 25 ms. Twelve workers deliver a batch every 7 ms.
sizes = dict(vocabulary=32_000, hidden=1024, layers=8, heads=16)
sizes |= dict(context=512, batch=16, precision="bf16")
loading = dict(decode_bytes=1_000_000, read_ms=1.0)
small = dict(decode_bytes=20_000, read_ms=5.0)


def run(part, workers, small_workers):
    """Measure the step with some workers."""
    return measure(
        f"one-change/{part}",
        training.run,
        gpu=dict(**sizes, **loading, workers=workers),
        small=dict(**small, workers=small_workers),
    )


before = run("before", 0, 0)
after = run("after", 12, 2)
again = run("again", 0, 0)
after_again = run("after-again", 12, 2)
runs = {"before": before, "after": after}
runs |= {"again": again, "after again": after_again}
before

# %%

# fold: How the figures are drawn
said = ""
if all(runs.values()):
    plots.step_times(
        {name: each.values("step_ns") for name, each in runs.items()},
        title=f"Alternating captures ({after.mode})",
    )
    found = pairs.alternating(runs)
    title = f"Before and after, two captures each ({after.mode})"
    figures.change_intervals(pairs.changed(found), title=title, top=14)
    said = pairs.answer(runs, found)
after

# %%

# fold: How the answer is put together
from math import comb

step = of_first.tables["figures"].iloc[0]
worse = gates.set_index("metric").loc["step/time_ns"]
enough = next(n for n in range(2, 99) if 2 / comb(2 * n, n) < 0.05)
findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"Of two published before/after pairs, only one holds up: a step of "
        f"ResNet-50 takes {-step['change']:.0%} less time, beyond the noise. "
        f"The other pair compares different amounts of work and shows "
        f"nothing. A gate with the first pair's fast run as its baseline "
        f"fails a commit that undoes the change."
    ),
    badge=first[0].label,
    enough=enough,
    whole=-changes["wall time"][0],
    step=-step["change"],
    tolerance=worse["tolerance"],
    good_ms=worse["before"] / 1e6,
    bad_ms=worse["after"] / 1e6,
    **shares,
    **launch_ms,
    **less,
)
