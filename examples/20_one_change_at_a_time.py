"""
Did my change help, and what else did it change?
================================================

Two captures never agree. Which of their differences are the change, which
are the noise of steps, and which would another run of the same program show?

What is measured: a training step that reads its batches itself, then the same
with worker processes, each in two processes and in turns. What came out:
:measured:`20_one_change_at_a_time.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# What the change should do: when one process loads and learns, the two times
# add up; with workers the slower of the two sets the pace. Nothing else should
# change. The same kernels run, as often and as long.
#
# How many steps it takes to say so: suppose that every step after the change
# is faster than every step before it. Chance alone orders them like this in
# one of all the ways to pick which steps are which, or the other way round.

# sphinx_gallery_thumbnail_number = -1
from math import comb

for steps in (2, 3, 4, 5, 8, 10):
    chance = 2 / comb(2 * steps, steps)
    enough = "can tell" if chance < 0.05 else "cannot tell"
    print(f"{steps:2} steps a side: chance {chance:.3%}, {enough}")

# %%
# How many rows are looked at: of a hundred kernels, ranges and causes of idle
# time that did *not* change, a test that errs once in twenty calls a few
# changed. The more rows there are, the surer each has to be:

rows = 100
print(f"expected by chance: {0.05 * rows:.0f} of {rows} rows")
print(f"for one false row in twenty comparisons: each at {0.05 / rows:.2%}")

# %%
# ``diff`` does what lies between. Of the rows that it calls more than noise it
# keeps the expected share of false ones below one in twenty. They are called
# ``significant`` where a side was captured more than once. With one capture
# each they are ``exceeds step spread``: what runs differ by is not known then.

# %%
# Measure
# -------
# The program as it is.

from nsightkit.investigations import measure

before = measure("one-change", "before")
before

# %%
# Read
# ----
# Before changing anything: what should the change give? The step waits for
# its batch; on the clock of the CPU the rest would remain.

wait_ns = before.median("data_wait_ns")
step_ns = before.median("step_ns")
share = wait_ns / step_ns
print(f"a step takes {step_ns / 1e6:.1f} ms ({before.mode})")
print(f"it waits for {wait_ns / 1e6:.1f} ms of them, {share:.0%}")
print(f"the rest alone would be {1 / (1 - share):.1f} times as fast")

# %%
# On a GPU that is not the gain. The GPU may have worked during the wait, and
# then it holds the step up next. So the trace is played again without the
# waits, and the prediction is written down before anything is changed. The
# last column says how far the replay without a change is from what was
# recorded. A smoke run has no GPU work to play.

import pandas as pd

from nsightkit import plots
from nsightkit.analysis.replay import whatif

(replay,) = whatif.summary(before.trace, ["no-input-wait"])
NAMES = {"speedup": "times as fast", "replay_error": "share off, unchanged"}
plots.table(pd.DataFrame([replay]).rename(columns=NAMES), missing="not known")

# %%
# A worked example with a known answer
# ------------------------------------
# These traces are synthetic: ``nsightkit.workloads.planted`` wrote them and
# they never ran on a GPU. In the first a loader was planted that is slower
# than the step, in the second it is not. All durations have their own noise,
# so the two agree nowhere exactly. What was lost to each cause, as planted and
# as ``diff`` found it:

import tempfile
from pathlib import Path

import nsightkit
from nsightkit.analysis.compare import diff
from nsightkit.workloads import planted

folder = tempfile.TemporaryDirectory()
synthetic, truths = {}, {}
for seed, (name, fault) in enumerate((("slow", "starved"), ("quick", None))):
    path = Path(folder.name, f"{name}.sqlite")
    truths[name] = planted.training(path, fault, seed=seed)
    synthetic[name] = nsightkit.load(path)

known = diff.compare(synthetic["slow"], synthetic["quick"])
causes = known.gaps[["cause"]].copy()
for side, name in (("before", "slow"), ("after", "quick")):
    truth = [truths[name]["gaps"].get(c, 0) / 1e3 for c in causes["cause"]]
    causes[f"{side}, planted (µs)"] = truth
    causes[f"{side}, found (µs)"] = known.gaps[f"{side}_total_ns"] / 1e3
plots.table(causes, dict.fromkeys(causes.columns[1:], "{:,.1f}"))

# %%
# Every row has its place around no change: the loader's range and the idle
# time that it caused went, the kernels stayed where they were. Rows that are
# too small to show in a step are left out.


def changed(found):
    """Figures, causes and ranges of a comparison, one below the other."""
    parts = [
        found.figures,
        found.gaps.rename(columns={"cause": "name"}),
        found.kernels.head(5),
        found.ranges,
    ]
    rows = pd.concat([part.astype(object) for part in parts if len(part)])
    rows = rows[rows["significance"] != "negligible"]
    rows["name"] = rows["name"].str.removesuffix("_ns")
    return rows.reset_index(drop=True)


title = "A loader that no longer holds up the step (synthetic)"
plots.change_intervals(changed(known), title=title, top=14)

# %%
# What the replay of the slow trace predicts is for all steps together. The
# first one waits longest, since nothing was loaded ahead of it, and ``diff``
# goes by the median step:

from nsightkit.analysis.timeline import overview

(promised,) = whatif.summary(synthetic["slow"], ["no-input-wait"])
whole = {k: overview.summary(t)["window_ns"] for k, t in synthetic.items()}
print(f"all steps, predicted: {1 / promised['speedup'] - 1:+.1%}")
print(f"all steps, as written: {whole['quick'] / whole['slow'] - 1:+.1%}")
print(f"the median step, by diff: {known.figures.iloc[0]['change']:+.1%}")

# %%
# Change one thing
# ----------------
# One argument of the loader, and nothing else:
#
# .. code-block:: python
#
#    loader = DataLoader(dataset, batch_size=batch, num_workers=12)
#
# Two changes at once give one difference, and no way to say whose it is.

# %%
# Measure again
# -------------
# After the change; then before it once more, and after it once more. Taken in
# turns, a machine that grows warm or busy does not look like the change.

after = measure("one-change", "after")
after

# %%

again = measure("one-change", "again")
again

# %%

after_again = measure("one-change", "after-again")
after_again

# %%
# Step times, without a profiler; each point is a step.

runs = {"before": before, "after": after, "before, again": again}
runs["after, again"] = after_again
plots.step_times(
    {name: run.values("step_ns") for name, run in runs.items()},
    title=f"In turns ({after.mode})",
)

# %%
# What no change looks like
# -------------------------
# The two captures of the program as it was. Whatever differs here is not the
# change, so a difference of this size proves nothing further down either.

MS = {"before_ns": "before (ms)", "after_ns": "after (ms)"}


def readable(found):
    """The rows of a comparison as a table, a step's times in milliseconds."""
    columns = ["name", "clock", *MS, "change", "significance"]
    rows = changed(found).reindex(columns=columns)
    rows[list(MS)] = rows[list(MS)].astype(float) / 1e6
    rows["name"] = [n if len(n) < 36 else f"{n[:35]}…" for n in rows["name"]]
    formats = dict.fromkeys(MS.values(), "{:,.3f}") | {"change": "{:+.1%}"}
    return plots.table(rows.rename(columns=MS), formats)


same = diff.compare(before.trace, again.trace)
readable(same)

# %%
# The change
# ----------
# Now the two sides, with both captures of each. A change must be larger than
# the noise of steps and larger than what captures of one program differ by.

found = diff.compare(
    before.trace,
    after.trace,
    also_before=[again.trace],
    also_after=[after_again.trace],
)
readable(found)

# %%
# The same as a picture: how far each row moved, and how sure that is.

title = f"Before and after ({after.mode})"
plots.change_intervals(changed(found), title=title, top=14)

# %%
# For the pull request
# --------------------
# What ``nsightkit diff --markdown`` writes: the time of a step, what differs
# besides the change, whether the bottleneck moved, and what got worse.

from nsightkit.analysis.compare import words as diff_text

summary = found.summary()
print(diff_text.markdown(summary, top=3))

# %%
# Verdict
# -------
# Computed from the captures, for each way it can come out:

import textwrap

gpus = {(run.provenance["gpu"] or {}).get("name") for run in runs.values()}
modes = {run.mode for run in runs.values()}
comparable = len(modes) == 1 and len(gpus) == 1
where = "in a smoke run on a CPU" if after.mode == "smoke" else "on a GPU"
unchanged = same.summary()["outcome"]
apart = again.median("step_ns") / before.median("step_ns") - 1
agreed = {
    "no change": "agree within the noise of their steps",
    "cannot tell": "have too few steps each to be distinguished",
    "faster": "differ by more than their steps do",
    "slower": "differ by more than their steps do",
}[unchanged]
wall = found.figures.iloc[0]
outcome = {
    "faster": "the change made a step faster",
    "slower": "the change made a step slower",
    "no change": "no change of a step's time is beyond the noise",
    "cannot tell": "the steps are too few to tell what became of their time",
}[summary["outcome"]]
if found.kernels.empty:
    rest = "Kernels, and what limits the GPU, are not shown here."
else:
    beyond = ("significant", "small")
    moved = found.kernels["significance"].isin(beyond)
    count = f"{moved.sum()} of {len(moved)} kernels"
    rest = f"{count} changed by more than noise. "
    rest += summary["bottleneck"]["text"]
by_replay = "not known"
if replay["speedup"]:
    by_replay = f"{1 / replay['speedup'] - 1:+.1%}"
verdict = (
    f"{where}, two captures of one program {agreed} ({apart:+.1%} without a "
    f"profiler); {outcome} ({wall['change']:+.1%}; predicted by replay: "
    f"{by_replay}). {rest}"
)
if not comparable:
    verdict = "the runs are not of the same machine; nothing to compare."
findings = {"verdict": verdict, "change": wall["change"], "apart": apart}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# Two captures of each side know little of what runs differ by, so the rule
# leans on what is usual and sees less than it might. A change that is too
# small for them needs more captures, not more steps.
#
# A profiler slows the CPU down. Where the CPU sets the pace, the step times
# above are right and those of the profile are not; what a profile is for is
# to say where the difference comes from.
#
# What a change does to the loss, to memory and to other sizes is not a part of
# this comparison. Memory has its own: ``diff`` of two memory snapshots.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{name}, {run.mode}, as a timeline": run.trace
    for name, run in runs.items()
}
for name, trace in synthetic.items():
    downloads[f"{name} loader, synthetic, as a timeline"] = trace

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/20_one_change_at_a_time.py
#
# Captures of your own, and a text for the pull request:
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output before -- python train.py
#    $ nsightkit whatif before.sqlite no-input-wait
#    $ nsightkit capture nsys --output after -- python train.py --workers 12
#    $ nsightkit diff before.sqlite after.sqlite
#    $ nsightkit diff before.sqlite after.sqlite --markdown
#
# With further captures of each side, taken in turns:
#
# .. code-block:: console
#
#    $ nsightkit diff before.sqlite after.sqlite \
#        --also-before before-2.sqlite --also-after after-2.sqlite
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only one-change
