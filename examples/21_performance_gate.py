"""
Can a CI job tell a slowdown from noise?
========================================

A job measures a program and compares it with yesterday's number. It fails
although the program did not change, or lets a slowdown pass. Which rule does
better?

.. in-short::
"""

# %%
# The symptom
# -----------
# Most jobs start with this rule:
#
# .. code-block:: python
#
#    if mean(steps_now) > 1.05 * mean(steps_yesterday):
#        sys.exit("slower")
#
# With many steps per run, the mean of a run is well known. But the run as a
# whole is a single draw: of a clock, of a memory placement, of the machine's
# other work. More steps do not help against that.

# %%
# Predict: how often is the alarm false?
# --------------------------------------
# Let runs of one program differ by a standard deviation of one per cent, two
# or four. A job compares one run with another, with a tolerance of five per
# cent. How many unchanged runs does it fail, and how many runs that are eight
# per cent slower does it let pass?
#
# .. dropdown:: Answer
#
#    The difference of two runs varies by the root of two times the spread of a
#    run. From that the two shares follow; with four per cent the rule is
#    little better than a coin:
#
#    .. list-table::
#       :header-rows: 1
#
#       * - runs differ by
#         - fails though unchanged
#         - lets a slower run pass
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
# Evidence: how do two rules do on runs whose noise we know?
# ----------------------------------------------------------
# We simulate runs with a known spread, two per cent from run to run and three
# from step to step, and make some of them slower. We judge each run twice: by
# the mean of one run against the mean of another, and by the rule of
# ``nsightkit check`` with several runs in its baseline. That rule fails a run
# when it exceeds the tolerance *and* noise does not explain it.

# record: 60 s
# sphinx_gallery_thumbnail_number = 1
import numpy as np

from nsightkit.analysis.compare import baseline, check
from nsightkit.analysis.compare import runs as run_metrics

rng = np.random.default_rng(21)


def made(slower=1.0, spread=0.02, steps=30):
    """Step times of one run, ns: a pace per run, and noise around it."""
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
# A good rule has its two curves far apart: it fails almost no unchanged runs
# and most slower ones. Each curve is a share of two hundred simulated runs, so
# it scatters by one or two per cent around the exact value, which for the
# first rule is in the answer above.

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
axes.set_title("Runs that differ by two per cent (simulated)", loc="left")
axes.spines[["top", "right"]].set_visible(False)
figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
figure.set_label(
    f"Share of checks that fail against the tolerance, of simulated runs. At "
    f"{TOLERANCE:.0%}, of unchanged runs: one mean {unchanged[0][at]:.1%}, "
    f"the gate {unchanged[1][at]:.1%}; of slower ones: {slowed[0][at]:.0%} "
    f"and {slowed[1][at]:.0%}."
)

# %%
# At the marked tolerance the gate catches
# :measured:`21_performance_gate.gate_caught:.0%` of the slower runs, where one
# mean catches :measured:`21_performance_gate.mean_caught:.0%`. In return it
# fails only :measured:`21_performance_gate.gate_alarm:.1%` of the unchanged
# ones. With this much noise no rule can have both. If the gate cannot decide,
# it reports *inconclusive*, together with the smallest change that it could
# have seen.

# %%
# Change one thing: several runs in the baseline
# ----------------------------------------------
# We add runs instead of steps: two, five, or ten, each in a new process:
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
# Each share comes from two hundred simulated runs, drawn anew for each row, so
# we know it to a few per cent only. Within that, the rows agree. Two baseline
# runs already show that runs differ. More of them cannot change that there is
# a single new run, and that it is a draw as well.

# %%
# Evidence: does it catch a recorded slowdown?
# --------------------------------------------
# We take the guide's worked example, ResNet-50 with four loader workers
# (:doc:`02_starved_input_pipeline`), as the baseline. Then ``num_workers=0``
# slips into a commit. The job sees one run of six steps:

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
# The step's time fails. Counts barely vary between runs, so one run of each is
# enough for them. The number of kernels fell a little, because a library chose
# other ones; that is within the tolerance.
#
# To find out *what* changed, ask ``nsightkit diff``:
# :doc:`20_one_change_at_a_time`.

# %%
# Verdict
# -------
# A gate needs several baseline runs, and a third answer: *inconclusive*. With
# those we can trust it to fail a job.

# %%
# Limits
# ------
# * The curves are simulated and assume normally distributed runs. Runs made
#   one after the other miss how the machine behaves at another hour, or after
#   a driver update: make a baseline at several times.
# * A few runs give a rough idea of their spread. The gate pulls it towards
#   typical values, and so detects less than it could.
# * On a shared machine, runs may differ by more than the slowdown. A gate that
#   lets it pass there is not broken.

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
# whole file and its requirements:
#
# .. literalinclude:: /ci/performance-gate.yml
#    :language: yaml
#    :start-at: - name: Measure
#    :end-before: # The new baseline is an artifact
#
# Exit code 2 is neither a pass nor a failure: the check could not decide. The
# job then measures once more before it asks a person. To run this page's
# script (without a GPU it runs a tiny CPU version):
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
#       table it lists metrics for information: time lost between launches
#       grew. That does not fail the job, because a faster step is not a
#       regression.
#
# 2. Runs of your program differ by four per cent. You want to notice when it
#    gets five per cent slower. What do you measure instead?
#
#    .. dropdown:: Answer
#
#       A metric that barely varies: kernels per step, bytes copied, peak
#       memory, or the time on the GPU. Or find the cause of the differences
#       and hold it fixed: clocks, the machine's other work, the data.
#
# 3. A job measures four programs and fails if any of them is slower, each at
#    one chance in twenty. How often is its alarm false?
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
# which are easy to add without looking at the time.

from nsightkit.guide import headline, measure
from nsightkit.workloads import lm

# Two more layers of 24 are 8 % more work: an unplanned slowdown.
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
# The answer from the runs:

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
        f"{shares['alarm_2']:.1%} of unchanged runs. A gate with several "
        f"baseline runs failed {unchanged[1][at]:.1%} in a simulation, and on "
        f"recorded traces it fails a step that takes {worse['ratio'] - 1:.0%} "
        "longer."
    ),
    badge=good.label,
    any_of_four=1 - 0.95**4,
    gate_alarm=float(unchanged[1][at]),
    gate_caught=float(slowed[1][at]),
    mean_caught=float(slowed[0][at]),
    **shares,
)
downloads = {
    f"{each.name}, as a timeline": each.trace
    for each in (before, after)
    if each.mode in ("measured", "recorded")
}
