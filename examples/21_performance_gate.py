"""
Can a CI job tell a slowdown from noise?
========================================

A job measures a program and compares it with yesterday's figure. How often
does it fail although nothing changed, and what does it let pass?

What is measured: a training step in several fresh processes, then the same
with one more layer in a dozen. What came out:
:measured:`21_performance_gate.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# The slowdown first. A layer more is FLOPs more, and parameters for the
# optimizer; if the machine does both at its usual rate, a step takes longer
# by about as much:

# sphinx_gallery_thumbnail_number = 2
import pandas as pd

from nsightkit import plots
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import Configuration
from nsightkit.investigations import parts as investigations

SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads")
SIZES = (*SIZES, "vocabulary")


def cost(part, mode):
    """FLOPs and parameters of the step that a part runs."""
    cell = investigations.find("gate", part).parameters(mode)
    sizes = {name: cell[name] for name in SIZES}
    one = envelope(Configuration(name="step", intent="", **sizes))
    return pd.Series({"FLOPs": one.train_flops, "parameters": one.params})


for mode in ("live", "smoke"):
    added = cost("after", mode) / cost("before", mode) - 1
    where = "on a GPU" if mode == "live" else "on a CPU"
    more = " and ".join(f"{added[n]:.1%} more {n}" for n in added.index)
    print(f"{where}: {more}")

# %%
# Then the noise. The steps of a run can be many, and their median is then
# known well. But a run as a whole is one draw: of a clock, of a placement in
# memory, of what else the machine does. Let runs differ by a standard
# deviation ``s``. A job that compares one run with one other sees their
# difference, which varies by ``s`` times the root of two. With a tolerance
# it fails too often when ``s`` is large, and it also misses what it is for:

from statistics import NormalDist

tolerance, slowdown = 0.05, 0.08
rows = []
for s in (0.005, 0.01, 0.02, 0.04):
    difference = NormalDist(0, s * 2**0.5)
    rows.append(
        {
            "s": s,
            "false alarms": 1 - difference.cdf(tolerance),
            "slowdowns missed": difference.cdf(tolerance - slowdown),
        }
    )
print(f"a tolerance of {tolerance:.0%}, a slowdown of {slowdown:.0%}")
rows = pd.DataFrame(rows)
plots.table(rows, dict.fromkeys(rows, "{:.1%}"))

# %%
# Measure
# -------
# The same program several times. A fresh process each time is what makes a
# run: steps of one process would share what should be allowed to differ.

from nsightkit.investigations import measure

before = measure("gate", "before")
before

# %%
# Read
# ----
# The runs beside each other. The small version makes fewer of them.

import numpy as np

names = ["before-2", "before-3", "before-4"]
names = names[:2] if before.mode == "smoke" else names
runs = {"before": before, **{name: measure("gate", name) for name in names}}
steps = {name: run.values("step_ns") for name, run in runs.items()}
plots.step_times(steps, title=f"The same program, each run ({before.mode})")

# %%
# How far apart are steps of a run, and how far apart are runs? The middle half
# of the steps, and each run's median in relation to that of all:


def row(name, values, typical):
    """One row of the table."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {
        "run": name,
        "steps": len(values),
        "median (ms)": median / 1e6,
        "middle half": (high - low) / median,
        "off": median / typical - 1,
    }


medians = np.array([np.median(values) for values in steps.values()])
typical = float(np.median(medians))
plots.table(
    pd.DataFrame([row(*pair, typical) for pair in steps.items()]),
    {"median (ms)": "{:.2f}", "middle half": "{:.1%}", "off": "{:+z.1%}"},
)

# %%
# How often would it fail?
# ------------------------
# Take these steps and runs for the noise of this machine, and make many runs
# of them: a pace drawn with the spread of the medians, and steps drawn from
# those that were measured. Some are made slower by as much as the layer
# should cost. Each is compared twice: as the mean of one run with the mean of
# another, and by nsightkit's rule with as many runs as were measured, which
# needs the tolerance to be exceeded *and* noise not to explain it.

from nsightkit.analysis.compare import baseline, check
from nsightkit.analysis.compare import runs as run_metrics

rng = np.random.default_rng(21)
pace = np.log(medians)
around = np.concatenate([v / np.median(v) for v in steps.values()])
count = len(steps["before"])
expected = cost("after", before.mode) / cost("before", before.mode)


def made(slower=1.0):
    """Steps of a run that was not measured, with this machine's noise."""
    level = np.exp(pace.mean() + rng.normal(0, pace.std(ddof=1)))
    return slower * level * rng.choice(around, count)


def run_of(values):
    """A run as the gate takes it."""
    return run_metrics.of_samples({"step_ns": values})


def compared(slower):
    """Ratio of two means; and the gate's ratio, 0 where noise explains it."""
    held = [made() for _ in runs]
    now = made(slower)
    kept = baseline.make([run_of(values) for values in held])
    [found] = check.compare(kept, [run_of(now)])["gates"]
    sure = found["low"] is not None and found["low"] > 1
    return now.mean() / held[-1].mean(), found["ratio"] if sure else 0


tolerances = np.linspace(0, 0.2, 81)
curves = {}
for what, slower in (("unchanged", 1.0), ("slower", expected["FLOPs"])):
    ratios = np.array([compared(slower) for _ in range(200)])
    for rule, found in zip(("one mean", "the gate"), ratios.T, strict=True):
        beyond = found[:, None] > 1 + tolerances
        curves[f"{what}, {rule}"] = beyond.mean(axis=0)

# %%
# A good rule has its two curves far apart: next to nothing of what is
# unchanged fails, and all of what is slower.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
styles = {"unchanged": "-", "slower": "--"}
colours = {"one mean": "#d9690f", "the gate": "#2f7fc1"}
for name, shares in curves.items():
    what, rule = name.split(", ")
    axes.plot(
        tolerances, shares, styles[what], color=colours[rule], lw=2, label=name
    )
axes.axvline(tolerance, color="#7d8590", lw=1, label="the tolerance above")
axes.set_xticks(tolerances[::20])
axes.xaxis.set_major_formatter("{x:.0%}")
axes.yaxis.set_major_formatter("{x:.0%}")
axes.set_xlim(0, tolerances[-1])
axes.set_ylim(0, 1.05)
axes.set_xlabel("tolerance")
axes.set_ylabel("checks that fail")
axes.set_title(f"With the noise of these runs ({before.mode})", loc="left")
axes.spines[["top", "right"]].set_visible(False)
figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=3)
at = int(np.argmin(abs(tolerances - tolerance)))
said = ", ".join(f"{name} {shares[at]:.1%}" for name, shares in curves.items())
figure.set_label(
    f"Share of checks that fail against the tolerance, for runs made of the "
    f"measured noise ({before.mode}). At {tolerance:.0%}: {said}."
)

# %%
# Change one thing
# ----------------
# Nothing, at first: once more the same program, and not one of those that the
# baseline was made of. A gate must let it pass.

again = measure("gate", "again")
again

# %%
# Then the layer, as somebody may add it without looking at the time:
#
# .. code-block:: python
#
#    layers = 26  # were 24

# %%
# Measure again
# -------------

after = measure("gate", "after")
after

# %%
# What the gate says of both. ``limit`` is the change from which it would say
# that the program is slower, as these runs vary.

held = baseline.make([run_of(values) for values in steps.values()])
verdicts = {}
for name, run in (("again", again), ("after", after)):
    found = check.compare(held, [run_of(run.values("step_ns"))], tolerance)
    verdicts[name] = found["gates"][0]
columns = ["status", "before", "after", "ratio", "low", "high", "limit"]
table = pd.DataFrame(
    [
        {"run": name, **{c: row[c] for c in columns}}
        for name, row in verdicts.items()
    ]
)
times = {"before": "baseline (ms)", "after": "now (ms)"}
table[list(times)] = table[list(times)].astype(float) / 1e6
formats = dict.fromkeys(("ratio", "low", "high", "limit"), "{:.3f}")
formats |= dict.fromkeys(times.values(), "{:.2f}")
plots.table(table.rename(columns=times), formats, missing="too few steps")

# %%
# The job
# -------
# The steps of a job that does this, for GitHub Actions; :doc:`the gate's page
# </gate>` has the whole file and says what it needs.
#
# .. literalinclude:: /ci/performance-gate.yml
#    :language: yaml
#    :start-at: - name: Measure
#    :end-before: # The new baseline is an artifact
#
# Exit code 2 is neither a pass nor a failure: it cannot be said. The job then
# measures once more before it asks a person.

# %%
# Verdict
# -------
# Computed from the runs, for each way it can come out:

import textwrap

everything = [*runs.values(), again, after]
gpus = {(run.provenance["gpu"] or {}).get("name") for run in everything}
comparable = len({run.mode for run in everything}) == 1 == len(gpus)
where = "in a smoke run on a CPU" if after.mode == "smoke" else "on a GPU"
apart = medians.max() / medians.min() - 1
words = {
    "ok": "lets {} pass",
    "improvement": "calls {} faster",
    "regression": "calls {} slower",
    "undecided": "cannot tell whether {} is slower",
}
unchanged = words[verdicts["again"]["status"]].format("an unchanged run")
slowed = words[verdicts["after"]["status"]].format("the deeper one")
limit = verdicts["after"]["limit"]
known = (
    "has too few steps to see any change"
    if limit is None
    else f"sees changes from {limit - 1:.0%} on"
)
share = {name: shares[at] for name, shares in curves.items()}
verdict = (
    f"{where}, medians of {len(runs)} runs of one program lie {apart:.1%} "
    f"apart. Knowing them, a gate with a tolerance of {tolerance:.0%} "
    f"{known}. It {unchanged} ({verdicts['again']['ratio'] - 1:+.1%}) and "
    f"{slowed} ({verdicts['after']['ratio'] - 1:+.1%}). With this "
    f"noise, comparing means of single runs would fail "
    f"{share['unchanged, one mean']:.1%} of unchanged runs, the gate "
    f"{share['unchanged, the gate']:.1%}; of slower ones the means would "
    f"catch {share['slower, one mean']:.0%}, the gate "
    f"{share['slower, the gate']:.0%}."
)
if not comparable:
    verdict = "the runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "apart": apart,
    "false_alarms": share["unchanged, the gate"],
    "caught": share["slower, the gate"],
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# Few runs, made one after the other, do not know what the machine does at
# another hour or after an update of its driver; a baseline should be made at
# several times. The curves take the runs' spread for normal and their steps
# for independent. A few runs also give a rough idea of that spread, which is
# why the gate draws it towards what is usual and so sees less than it might.
#
# On a CPU that others use, runs differ by more than the slowdown. A gate that
# lets it pass there is not broken: what it says is that nobody could tell.
# Counts do not have this problem. Kernels of a step, bytes copied and peak
# memory are the same in each run, and a gate on them needs one.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{run.part}, {run.mode}, as a timeline": run.trace
    for run in (before, after)
}

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/21_performance_gate.py
#
# A baseline of some runs of a benchmark, and a check against it:
#
# .. code-block:: console
#
#    $ nsightkit bench --size small --steps 30 --out-json run-1.json
#    $ nsightkit check run-1.json --baseline baseline.json --update
#    $ nsightkit bench --size small --steps 30 --out-json run-2.json
#    $ nsightkit check run-2.json --baseline baseline.json --add
#    $ nsightkit bench --size small --steps 30 --out-json now.json
#    $ nsightkit check now.json --baseline baseline.json
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only gate
