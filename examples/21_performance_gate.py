"""
Can a CI job tell a slowdown from noise?
========================================

A job measures a program and compares it with yesterday's figure. It fails
although nothing has changed, or lets a slowdown pass. Which rule does better?

.. in-short::
"""

# %%
# The symptom
# -----------
# The rule that most jobs begin with:
#
# .. code-block:: python
#
#    if mean(steps_now) > 1.05 * mean(steps_yesterday):
#        sys.exit("slower")
#
# The steps of a run can be many, and their mean is then known well. But a run
# as a whole is one draw: of a clock, of a placement in memory, of what else
# the machine does. More steps do not help against that.

# %%
# Predict: how often does it fail for nothing?
# --------------------------------------------
# Let runs of one program differ by a standard deviation of one per cent, two
# or four. A job compares one run with one other, with a tolerance of five per
# cent. How many unchanged runs does it fail, and how many of those that are
# eight per cent slower does it let pass?
#
# .. dropdown:: Answer
#
#    The difference of two runs varies by the root of two times as much as a
#    run. From that the two shares follow; with four per cent the rule is
#    little better than a coin:
#
#    .. list-table::
#       :header-rows: 1
#
#       * - runs differ by
#         - fails though unchanged
#         - lets a slower one pass
#       * - one per cent
#         - :measured:`21_performance_gate.alarm_1:.1%`
#         - :measured:`21_performance_gate.missed_1:.1%`
#       * - two per cent
#         - :measured:`21_performance_gate.alarm_2:.1%`
#         - :measured:`21_performance_gate.missed_2:.1%`
#       * - four per cent
#         - :measured:`21_performance_gate.alarm_4:.1%`
#         - :measured:`21_performance_gate.missed_4:.1%`

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
# Evidence: two rules on runs whose noise is known
# ------------------------------------------------
# Runs are made up here, with a known spread: two per cent from run to run, and
# three from step to step. Some are made slower. Each is judged twice: by
# the mean of one run against the mean of another, and by the rule of
# ``nsightkit check`` with several runs in its baseline. That rule fails a run
# when the tolerance is exceeded *and* noise does not explain it.

# record: 60 s
# sphinx_gallery_thumbnail_number = 1
import numpy as np

from nsightkit.analysis.compare import baseline, check
from nsightkit.analysis.compare import runs as run_metrics

rng = np.random.default_rng(21)


def made(slower=1.0, spread=0.02, steps=30):
    """Step times of one run, ns: a pace of its own, and noise around it."""
    pace = 1e7 * np.exp(rng.normal(0, spread))
    return slower * pace * np.exp(rng.normal(0, 0.03, steps))


def judged(slower, runs):
    """Ratio of two means; and the gate's ratio, 0 where noise explains it."""
    steps = [made() for _ in range(runs)] + [made(slower)]
    *held, now = (run_metrics.of_samples({"step_ns": each}) for each in steps)
    [found] = check.compare(baseline.make(held), [now])["gates"]
    sure = found["low"] is not None and found["low"] > 1
    return steps[-1].mean() / steps[0].mean(), found["ratio"] * sure


# %%
# A good rule has its two curves far apart: next to nothing of what is
# unchanged fails, and most of what is slower does.

# fold: How the figure is drawn
import matplotlib.pyplot as plt

RUNS = 5
tolerances = np.linspace(0, 0.2, 81)
at = int(np.argmin(abs(tolerances - TOLERANCE)))


def failing(slower, runs, times=200):
    """Share of checks that fail at each tolerance, by each rule."""
    ratios = np.array([judged(slower, runs) for _ in range(times)])
    return (ratios[:, :, None] > 1 + tolerances).mean(axis=0)


unchanged, slowed = failing(1, RUNS), failing(1 + SLOWDOWN, RUNS)
figure, axes = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
rules = {"one mean": "#2f7fc1", f"the gate, {RUNS} runs": "#d9690f"}
for number, (rule, colour) in enumerate(rules.items()):
    for what, share, style in (
        ("unchanged", unchanged, "-"),
        (f"{SLOWDOWN:.0%} slower", slowed, "--"),
    ):
        axes.plot(
            tolerances,
            share[number],
            style,
            color=colour,
            lw=2,
            label=f"{rule}: {what}",
        )
axes.axvline(TOLERANCE, color="#7d8590", lw=1)
axes.xaxis.set_major_formatter("{x:.0%}")
axes.yaxis.set_major_formatter("{x:.0%}")
axes.set(xlim=(0, 0.2), ylim=(0, 1.05), xticks=tolerances[::20])
axes.set(xlabel="tolerance", ylabel="checks that fail")
axes.set_title("Made-up runs that differ by two per cent (exact)", loc="left")
axes.spines[["top", "right"]].set_visible(False)
figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
figure.set_label(
    f"Share of checks that fail against the tolerance, of made-up runs. At "
    f"{TOLERANCE:.0%}, of unchanged runs: one mean {unchanged[0][at]:.1%}, "
    f"the gate {unchanged[1][at]:.1%}; of slower ones: {slowed[0][at]:.0%} "
    f"and {slowed[1][at]:.0%}."
)

# %%
# The gate gives up a few of the slow runs, and hardly ever fails an unchanged
# one. With this much noise no rule can have both: what it cannot decide it
# reports as *inconclusive*, with the change from which it would see one.

# %%
# Change one thing: several runs in the baseline
# ----------------------------------------------
# Not more steps. Two runs, five, or ten, of which each is a process of its
# own:
#
# .. code-block:: diff
#
#     $ nsightkit check run-1.json --baseline baseline.json --update
#    +$ nsightkit check run-2.json --baseline baseline.json --add
#    +$ nsightkit check run-3.json --baseline baseline.json --add

# fold: How the table is worked out
import pandas as pd

from nsightkit import plots

rows = []
for runs in (2, 5, 10):
    alarms, caught = failing(1, runs), failing(1 + SLOWDOWN, runs)
    rows.append((runs, alarms[1][at], caught[1][at]))
names = ["runs in the baseline", "fails though unchanged", "catches slower"]
plots.table(
    pd.DataFrame(rows, columns=names), dict.fromkeys(names[1:], "{:.1%}")
)

# %%
# Each share is of two hundred made-up runs, drawn anew for each row, so it is
# known to a few per cent only: by that, the rows agree. Two runs already show
# that runs differ. What more of them cannot change is that there is one new
# run, and that is a draw as well.

# %%
# Evidence: a slowdown that was recorded
# --------------------------------------
# Here is ResNet-50 with four loader workers as the baseline. Then somebody
# sets ``num_workers=0``. The job sees one run of six steps:

from nsightkit.guide import case

good, bad = (case("v100-starved-loader", f"workers-{n}") for n in (4, 0))
good

# %%

kept = baseline.make([run_metrics.of_trace(good.trace)])
found = check.compare(kept, [run_metrics.of_trace(bad.trace)])
gates = pd.DataFrame(found["gates"])
plots.table(
    gates[["metric", "status", "ratio", "limit"]],
    dict.fromkeys(("ratio", "limit"), "{:.3f}"),
)

# %%
# The step's time fails. Counts hardly vary between runs, so one run of each is
# enough for them. Here the number of kernels fell a little, because a library
# chose other ones; that is within the tolerance.
#
# To see *what* changed, ask ``nsightkit diff``:
# :doc:`20_one_change_at_a_time`.

# %%
# Verdict
# -------
# A gate needs several baseline runs, and a third answer: *inconclusive*. With
# those it can be left to fail a job.

# %%
# Limits
# ------
# * The curves take the runs' spread for normal. Runs made one after the other
#   do not know what the machine does at another hour, or after an update of
#   its driver: make a baseline at several times.
# * A few runs give a rough idea of their spread. The gate draws it towards
#   what is usual, and so sees less than it might.
# * On a machine that others use, runs differ by more than the slowdown. A gate
#   that lets it pass there is not broken.

# %%
# Run it yourself
# ---------------
# On the two traces that come with nsightkit:
#
# .. code-block:: console
#
#    $ nsightkit demo
#    $ cd nsightkit-demo
#    $ nsightkit check workers-4.parquet --baseline b.json --update
#    $ nsightkit check workers-0.parquet --baseline b.json
#
# The steps of a job on GitHub Actions; :doc:`the gate's page </gate>` has the
# whole file and says what it needs:
#
# .. literalinclude:: /ci/performance-gate.yml
#    :language: yaml
#    :start-at: - name: Measure
#    :end-before: # The new baseline is an artifact
#
# Exit code 2 is neither a pass nor a failure: the check could not decide. The
# job then measures once more before it asks a person. This page, which
# measures with a GPU and else runs small on the CPU:
#
# .. code-block:: console
#
#    $ python examples/21_performance_gate.py

# %%
# Exercises
# ---------
# 1. Check the demo's traces the other way round: *workers-0* as the baseline.
#    Does anything get worse?
#
#    .. dropdown:: Answer
#
#       The step's time is an improvement, and the check passes. Below the
#       table it lists what informs: time lost between launches grew. Nothing
#       fails for it, because a step that is faster is not a regression.
#
# 2. Runs of your program differ by four per cent. You want to notice when it
#    gets five per cent slower. What do you measure instead?
#
#    .. dropdown:: Answer
#
#       What hardly varies: kernels a step, bytes copied, peak memory, or the
#       time on the GPU. Or find what the runs differ by, and hold it still:
#       clocks, the machine's other work, the data.
#
# 3. A job measures four programs and fails if any of them is slower, each at
#    one chance in twenty. How often does it fail for nothing?
#
#    .. dropdown:: Answer
#
#       In :measured:`21_performance_gate.any_of_four:.0%` of all runs. All
#       metrics that can fail have to share one small chance, as they do in
#       ``check``.

# %%
# Measured here
# -------------
# .. own-run::
#
# A training step, measured four times; once more; then with two more layers,
# which somebody may add without looking at the time.

from nsightkit.guide import headline, measure
from nsightkit.workloads import lm

# Two more layers of 24 are 8 % more work: a slowdown that nobody planned.
sizes = dict(batch=8, context=512, d_model=1024, d_ff=4096, heads=16)
sizes |= dict(vocabulary=10_000, mode="train", precision="bf16")
small = dict(batch=4, context=16, d_model=64, d_ff=192, heads=4)
small |= dict(vocabulary=512, mode="train", precision="fp32")


def run(part, layers, small_layers):
    """Measure the step of a model with some layers."""
    return measure(
        f"gate/{part}",
        lm.run,
        gpu=dict(**sizes, layers=layers),
        small=dict(**small, layers=small_layers),
    )


before = run("before", 24, 12)
names = ("before-2", "before-3", "before-4")
runs = {"before": before} | {name: run(name, 24, 12) for name in names}
again = run("again", 24, 12)
after = run("after", 26, 13)
before

# %%
# Each point is a step:

# fold: How the runs are judged
everything = [*runs.values(), again, after]


def as_run(measurement):
    """A measurement as the gate takes it."""
    return run_metrics.of_samples({"step_ns": measurement.values("step_ns")})


if all(everything):
    held = baseline.make([as_run(each) for each in runs.values()])
    verdicts = {}
    for name, each in (("again", again), ("after", after)):
        compared = check.compare(held, [as_run(each)], TOLERANCE)
        verdicts[name] = compared["gates"][0]
    plots.step_times(
        {name: each.values("step_ns") for name, each in runs.items()},
        title=f"The same program, each run ({before.mode})",
    )
after

# %%
# What the runs say:

# fold: How the answer is put together
WORDS = {
    "ok": "lets {} pass",
    "improvement": "calls {} faster",
    "regression": "calls {} slower",
    "inconclusive": "cannot tell whether {} is slower",
}
said = ""
if all(everything):
    medians = np.array([each.median("step_ns") for each in runs.values()])
    apart = medians.max() / medians.min() - 1
    same, deeper = verdicts["again"], verdicts["after"]
    same_words = WORDS[same["status"]].format("an unchanged run")
    deeper_words = WORDS[deeper["status"]].format("the deeper model")
    sees = "has too few steps to see any change"
    if deeper["limit"] is not None:
        sees = f"sees changes from {deeper['limit'] - 1:.0%} on"
    said = (
        f"medians of {len(runs)} runs of one program lie {apart:.1%} apart. "
        f"Knowing them, a gate with a tolerance of {TOLERANCE:.0%} {sees}. "
        f"It {same_words} ({same['ratio'] - 1:+.1%}) and {deeper_words} "
        f"({deeper['ratio'] - 1:+.1%})."
    )
worse = gates.set_index("metric").loc["step/time_ns"]
findings = headline(
    said,
    *everything,
    otherwise=(
        f"where runs differ by two per cent, comparing two means fails "
        f"{unchanged[0][at]:.0%} of unchanged runs; the gate, which knows how "
        f"runs differ, fails {unchanged[1][at]:.1%}. On recorded traces it "
        f"fails a step that takes {worse['ratio'] - 1:.0%} longer."
    ),
    badge=good.label,
    any_of_four=1 - 0.95**4,
    **shares,
)
downloads = {
    f"{each.name}, as a timeline": each.trace
    for each in (before, after)
    if each.mode in ("measured", "recorded")
}
