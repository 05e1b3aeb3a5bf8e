"""
How much of the memory's bandwidth does decoding reach?
=======================================================

To make one token, a model reads all of its weights once and does almost no
arithmetic with them. So a layer takes at least as long as its weights take
through the memory. How near does a program come to that?

What is measured: one token through several layers, from eager code to kernels
written by hand, each rung predicted before it is run. What came out:
:measured:`18_decode_bandwidth.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# The operations of a layer for one token that sees a full cache, and their
# least times by the datasheet of one card. With one row, a matrix product does
# as little arithmetic a byte as an addition: memory is the bound of them all.

# sphinx_gallery_thumbnail_number = 1
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.replay import whatif
from nsightkit.analysis.roofline import sol
from nsightkit.investigations import parts as investigations
from nsightkit.investigations.pages import ladder
from nsightkit.workloads import layer as rungs

SHAPE = ("batch", "context", "hidden", "heads", "d_ff")
RUNGS = rungs.RUNGS["decode"]


def operations(sizes):
    """What one layer must do for one token, unfused."""
    wide = (sizes["hidden"], sizes["heads"], sizes["d_ff"])
    return sol.layer_costs(
        sizes["batch"], 1, *wide, "bf16", keys=sizes["context"]
    )


sizes = investigations.find("decode", "eager").gpu
listed = operations(sizes)
sheet = sol.datasheet(hardware.find("H200"))
bounds = sol.bounds(listed, sheet)
bounds["share of bytes"] = bounds["bytes"] / bounds["bytes"].sum()
UNITS = {"flops": "MFLOP", "bytes": "MB", "bound_ns": "bound (µs)"}
units = bounds.drop(columns="source")
units[list(UNITS)] /= [1e6, 1e6, 1e3]
plots.table(
    units.rename(columns=UNITS), dict.fromkeys(UNITS.values(), "{:,.2f}")
)

# %%
# The weights of one layer are several times the level-2 cache, and a step goes
# through several layers, each with weights and a cache of its own. Nothing is
# read from the cache because it was just used:

moved = bounds["bytes"].sum()
print(f"bytes of a layer: {moved / 1e6:,.1f} MB")
print(f"level-2 cache:    {sheet.l2_bytes / 1e6:,.0f} MB")
print(f"least time: {bounds['bound_ns'].sum() / 1e3:,.1f} µs")

# %%
# Eager code launches each written operation, and each launch costs the CPU
# some microseconds. That number is assumed here, and decides the first rungs:

LAUNCH_US = 5  # assumed: what one operation costs an eager program's CPU


def as_written(rung, of):
    """Launches of one layer of a rung, at these sizes."""
    only = {name: of[name] for name in SHAPE}
    return rungs.written(mode="decode", rung=rung, **only)


counted = []
for rung in ("eager", "fused"):
    launches = as_written(rung, sizes)
    counted.append(
        {
            "rung": rung,
            "launches": len(launches),
            "launching (µs, assumed)": LAUNCH_US * len(launches),
            "least time, GPU (µs)": ladder.launched_ns(launches, sheet) / 1e3,
        }
    )
plots.table(pd.DataFrame(counted))

# %%
# So the GPU waits. What each change can save at most:
#
# - **fused** removes some launches, each at the cost that one has had in the
#   rung before, and no bytes.
# - **compiled** and the graphs can remove all idle time: what the step takes
#   beyond the sum of its kernels.
# - **sums** and **triton** can bring the kernels to their bounds.
# - **streamed** keeps more loads under way, and gives each of as many programs
#   as run at once an even share of the rows: no last wave, half empty.
# - **overlapped** lets each kernel ask for its first weights while the one
#   before it ends, which hides what six starts and ends a layer cost. These
#   two together can save what is above the bound, and no more.
# - **one-mlp** reads the MLP's weights in one kernel, and needs a small one to
#   add up what its programs found. Six kernels remain six, and one of them has
#   less to do: at most a sixth of what is above the bound. Expect nothing.
#
# No change can go below the bound. How many bytes must be under way follows
# from the time that one load takes. The memory's latency is assumed here:

LATENCY_NS = 800  # assumed: what one load from this memory takes, under load

under_way = sheet.gb_per_s * LATENCY_NS
sms = hardware.find("H200").multiprocessors
print(f"bytes under way at the full rate: {under_way / 1e6:,.1f} MB")
print(f"for each of {sms} multiprocessors: {under_way / sms / 1e3:,.0f} kB")

# %%
# And a kernel of a few microseconds spends a part of them starting and ending,
# with the memory half idle: the more kernels, the further from the bound. The
# goals are most of the datasheet's bandwidth, then nearly all of it, and then
# what a plain sum of a large tensor reads on this very card:

goals = (0.85, 0.95)
said = " and ".join(f"{goal:.0%}" for goal in goals)
print(f"goals: {said} of the datasheet's bandwidth")

# %%
# Measure
# -------
# Eager code with fused attention; projections, norm and rotary positions as
# model code writes them.

from nsightkit.errors import UsageError
from nsightkit.investigations import measure

before = measure("decode", "eager")
before

# %%
# The ceilings of this very card: a copy, and a sum, which only reads. A smoke
# run has none.

smoke = before.mode == "smoke"
try:
    card = hardware.find((before.provenance["gpu"] or {})["name"])
except (KeyError, UsageError):
    card = None
sheet = sol.datasheet(card) if card else None
ceilings, ran, reached = None, {}, []
if not smoke:
    for name in ("before", "fp32", "copy", "triad", "read"):
        ran[name] = measure("ceilings", name)
    reached = [
        sol.ceiling(run.parameters, run.median("step_ns"))
        for run in ran.values()
    ]
    ceilings = sol.ceilings(reached, "measured on this card")
    for row in reached:
        if row["unit"] == "memory":
            print(f"{row['what']}: {row['gb_per_s']:,.0f} GB/s")
rates = ceilings or sheet

# %%
# Read
# ----
# A step, and what of it the GPU was busy for. The difference is idle time. On
# a CPU operators stand for kernels, and nothing idles.

layers = before.parameters["layers"]


def busy_ns(run):
    """Time of a layer's kernels."""
    return ladder.kinds(run.trace, layers).sum()


took = before.median("step_ns") / layers
print(f"a layer takes {took / 1e3:,.1f} µs")
print(f"of its work:  {busy_ns(before) / 1e3:,.1f} µs, profiled")
work = ladder.kinds(before.trace, layers)
by_kind = work.rename_axis("kind of work").reset_index()
by_kind["share"] = by_kind["time_ns"] / by_kind["time_ns"].sum()
plots.table(by_kind)

# %%
# Change one thing
# ----------------
# One change a rung, each to the rung that it names. A graph is recorded once
# and replayed:
#
# .. code-block:: python
#
#    graph = torch.cuda.CUDAGraph()
#    with torch.cuda.graph(graph):
#        output = model(token)
#    graph.replay()

changes = pd.DataFrame(
    [
        {"rung": name, "changes": rung.base or "-", "to": rung.change}
        for name, rung in RUNGS.items()
    ]
)
plots.table(changes)

# %%
# Measure again
# -------------
# First the most that a rung can save, computed from its base, then the
# measurement. A graph changes launches and no kernel, which is a change that
# the trace of its base can be played again with. A smoke run takes the first
# few, and a compiler that needs no other compiler and fuses nothing.


def most(name, runs):
    """What a rung can save of its base at most, in nanoseconds a layer."""
    base = runs[RUNGS[name].base]
    if rates is None or not base.trace.recorded("kernels"):
        return None
    took = base.median("step_ns") / layers
    bound = sum(rates.bound_ns(o) for o in operations(base.parameters))
    if name == "fused":
        written = (as_written(n, base.parameters) for n in ("eager", "fused"))
        was, is_now = (len(launches) for launches in written)
        return (was - is_now) * took / was
    if name in ("sums", "triton", "streamed", "overlapped"):
        return max(took - bound, 0)
    if name == "one-mlp":
        return max(took - bound, 0) / 6
    # A compiler also fuses small kernels, which take time for hardly a byte.
    left = bound if name == "compiled" else busy_ns(base)
    return max(took - left, 0)


def by_replay(name, runs):
    """What a rung that only launches saves of its base, played again."""
    if not name.startswith("graphed"):
        return None
    base = runs[RUNGS[name].base]
    (row,) = whatif.summary(base.trace, ["free-launches"])
    saved = row["speedup"] and 1 - 1 / row["speedup"]
    return saved and saved * base.median("step_ns") / layers


FEW = ["fused", "compiled"]
chosen = FEW if smoke else [name for name in RUNGS if name != "eager"]
runs, predicted, replayed = {"eager": before}, {}, {}
for name in chosen:
    predicted[name] = most(name, runs)
    replayed[name] = by_replay(name, runs)
    runs[name] = measure("decode", name)
after = runs["compiled"]
after

# %%
# Predicted and measured. The time is the median of a layer, the spread the
# range of the middle half of the steps; a difference inside the spread is
# none.

import numpy as np

samples = {name: run.values("step_ns") for name, run in runs.items()}
of_this = operations(before.parameters)
table = ladder.summary(of_this, samples, layers, sheet, ceilings)
by_rung = table.set_index("rung")
spread = by_rung["high_ns"] - by_rung["low_ns"]


def judged(name):
    """One change: what it was to save, what it saved."""
    base = RUNGS[name].base
    saved = by_rung.loc[base, "time_ns"] - by_rung.loc[name, "time_ns"]
    noise = max(spread[base], spread[name])
    bound = predicted[name]
    if abs(saved) <= noise:
        word = "no effect beyond the spread"
    elif saved < 0:
        word = "slower"
    elif bound is None:
        word = "faster"
    else:
        word = "within" if saved <= bound + noise else "more than predicted"
    return {
        "rung": name,
        "changes": base,
        "at most (µs)": np.nan if bound is None else bound / 1e3,
        "by replay (µs)": replayed[name] and replayed[name] / 1e3,
        "saved (µs)": saved / 1e3,
        "spread (µs)": noise / 1e3,
        "outcome": word,
    }


steps = pd.DataFrame([judged(name) for name in chosen])
US = ["at most (µs)", "by replay (µs)", "saved (µs)", "spread (µs)"]
steps = steps.astype(dict.fromkeys(US, float))
plots.table(steps, dict.fromkeys(US, "{:,.1f}"))

# %%
# As bandwidth: the bytes that a layer must move, by the time it took. A
# counter would say more, for it counts a byte as often as it is moved. A smoke
# run has no card to compare with.

moved = sum(operation.bytes for operation in of_this)
table["GB/s"] = moved / table["time_ns"]
US = {"time_ns": "time (µs)", "low_ns": "from (µs)", "high_ns": "to (µs)"}
named = US | {
    "times": "times as fast",
    "GB/s": "GB/s",
    "sol_datasheet": "share of datasheet",
    "sol_measured": "share of ceilings",
}
light = table[["rung", *named]].dropna(axis=1, how="all")
light[list(US)] /= 1e3
formats = dict.fromkeys(US.values(), "{:,.1f}") | {"times as fast": "{:.2f}"}
plots.table(light.rename(columns=named), formats, missing="none")

# %%
# What moved: the time by kind of work, and the least times as lines. What is
# not covered by work is idle. The parts are from profiled steps, the length of
# a bar and its spread are not.

floors = {}
for label, roof in (("ceilings", ceilings), ("datasheet", sheet)):
    if roof:
        least = sum(roof.bound_ns(operation) for operation in of_this)
        floors[f"all bytes once, {label}"] = least
spent = {name: ladder.kinds(run.trace, layers) for name, run in runs.items()}
plots.ladder_bars(
    table, spent, floors, title=f"One token through a layer ({after.mode})"
)

# %%
# The same as numbers, for each change: what its kinds of work gave or took.

gave = pd.DataFrame(
    {
        name: spent[name].sub(spent[RUNGS[name].base], fill_value=0) / 1e3
        for name in chosen
    }
)
gave = gave.fillna(0).rename_axis("kind of work, µs").reset_index()
plots.table(gave, dict.fromkeys(chosen, "{:+z,.1f}"))

# %%
# Each rung against the same weights and cache in float64: the norm of the
# difference over that of the result. Rounding is what the format costs at
# least, one layer's output rounded once.

checked = []
for name, run in runs.items():
    row = {"rung": name, "error": run.median("relative_error")}
    row |= {"largest": run.median("max_abs_error")}
    row |= {"rounding": run.median("rounding_error")}
    clock = run.median("sm_clock_mhz")
    if clock is not None:
        row |= {"clock (MHz)": clock, "power (W)": run.median("power_w")}
    row["ran instead"] = run.parameters["instead"] or "-"
    checked.append(row)
plots.table(pd.DataFrame(checked))

# %%
# The compiled rung as a timeline: what lies between its kernels is what a
# graph can remove.

plots.timeline(after.trace, title=f"Compiled ({after.mode})")

# %%
# Verdict
# -------
# Computed from the runs.

import textwrap

best = by_rung["time_ns"].idxmin()
null = steps.loc[steps["outcome"].str.startswith("no effect"), "rung"]
more = steps.loc[steps["outcome"].str.startswith("more"), "rung"]
wrong = by_rung.index[by_rung["impossible"]]
over = by_rung.index[by_rung["sol_measured"] > 1]


def share(rung):
    """Both shares of a rung, in words."""
    row = by_rung.loc[rung]
    said = f"{row['sol_measured']:.0%} of the measured ceilings"
    if not np.isnan(row["sol_datasheet"]):
        said += f" and {row['sol_datasheet']:.0%} of the datasheet"
    return said


gpus = {(run.provenance["gpu"] or {}).get("name") for run in runs.values()}
modes = {run.mode for run in [*runs.values(), *ran.values()]}
comparable = len(gpus) == 1 == len(modes)
where = "in a smoke run on a CPU" if smoke else "on a GPU"
first_ns, best_ns = (by_rung.loc[name, "time_ns"] for name in ("eager", best))
faster = first_ns - best_ns > max(spread["eager"], spread[best])
if faster:
    verdict = (
        f"{where}, a layer goes from {first_ns / 1e3:,.1f} to "
        f"{best_ns / 1e3:,.1f} µs a token ({best}), "
        f"{by_rung.loc[best, 'times']:.1f} times as fast."
    )
else:
    verdict = (
        f"{where}, no rung is faster than the first, {first_ns / 1e3:,.1f} µs "
        f"a layer, by more than the spread."
    )
if not smoke:
    end = f" to {share(best)}" if faster else ""
    verdict += (
        f" That is {'from ' if faster else ''}{share('eager')}{end}."
        f" Faster than predicted: {', '.join(more) or 'no rung'}."
    )
verdict += (
    f" Changes without effect of their own: {', '.join(null) or 'none'}."
)
if sheet:
    got = by_rung.loc[best, "sol_datasheet"]
    which = ("neither", "the first", "both")[sum(got >= g for g in goals)]
    verdict += (
        f" Of the goals of {goals[0]:.0%} and {goals[1]:.0%} of the "
        f"datasheet's bandwidth it reaches {which}."
    )
for row in reached:
    if row["what"].startswith("read"):
        rate = moved / by_rung.loc[best, "time_ns"] / row["gb_per_s"]
        verdict += f" It moves bytes at {rate:.0%} of a plain sum's rate."
if len(wrong):
    verdict += f" Faster than the card can be: {', '.join(wrong)}."
if len(over):
    verdict += (
        f" Faster than these ceilings (they are too low): {', '.join(over)}."
    )
if not comparable:
    verdict = "the runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "times": by_rung.loc[best, "times"],
    "null_results": len(null),
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# One token at a time is the extreme. With more sequences in a batch the same
# weights serve them all, and the arithmetic grows until it is the limit. A
# longer context adds to the cache, which each sequence reads for itself.
#
# The weights that one layer leaves in the level-2 cache are no use to the
# next. A model with few small layers would find them there, and reach more
# than the memory's bandwidth without deserving it.
#
# Other rungs run other kernels, and no replay of a trace predicts those. The
# cost of a launch is assumed before it is measured. A profiler makes the
# CPU slower, so idle time here is what an unprofiled step takes beyond the
# kernels of a profiled one.
#
# A kernel that begins before the one before it has ended is recorded from its
# beginning, so the kernels of such rungs overlap: their times add up to more
# than the layer's, and their bars are drawn in proportion.
#
# In a smoke run there is no memory bandwidth to reach: the layer fits a cache.
# What it shows is that the page works, and that the rungs compute the same.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{name}, {run.mode}, as a timeline": run.trace
    for name, run in runs.items()
}

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/18_decode_bandwidth.py
#
# Idle time, and the kernels between it, in a trace of your own:
#
# .. code-block:: console
#
#    $ nsightkit gaps trace.json.gz
#    $ nsightkit kernels trace.json.gz
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only decode
