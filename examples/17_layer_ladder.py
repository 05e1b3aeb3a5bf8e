"""
How close can a transformer layer come to the speed of light?
=============================================================

A layer written as a reference implementation writes it, and then one change
after another that should make it faster. What does each of them buy, and how
much is left in the end?

What is measured: the forward pass of a layer, from scores written out to
kernels written by hand, each rung predicted before it is run and held against
the same bounds. What came out: :measured:`17_layer_ladder.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# Every operation of the layer has a least time: its arithmetic at the rate of
# its unit, or its operands through the memory once, whichever is longer. The
# sum over this list is what every rung is held against; the list is never
# changed, so no rung can flatter itself with fewer operations. By the
# datasheet of one card:

# sphinx_gallery_thumbnail_number = 1
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.analysis.replay import whatif
from nsightkit.analysis.roofline import sol
from nsightkit.investigations import parts as investigations
from nsightkit.investigations.pages import ladder
from nsightkit.workloads import layer as rungs

SHAPE = ("batch", "context", "hidden", "heads", "d_ff")
RUNGS = rungs.RUNGS["prefill"]


def operations(sizes, precision="bf16"):
    """What one layer of these sizes must do, unfused."""
    return sol.layer_costs(*(sizes[name] for name in SHAPE), precision)


sizes = investigations.find("ladder", "naive").gpu
listed = operations(sizes)
h200 = sol.datasheet(hardware.find("H200"))
bounds = sol.bounds(listed, h200)
UNITS = {"flops": "GFLOP", "bytes": "MB", "bound_ns": "bound (µs)"}
units = bounds.drop(columns="source")
units[list(UNITS)] /= [1e9, 1e6, 1e3]
plots.table(
    units.rename(columns=UNITS), dict.fromkeys(UNITS.values(), "{:,.2f}")
)

# %%
# Causal attention counts as half of its square. The elementwise operations are
# in the sum, yet a compiler can fuse them into their neighbours, which no one
# can do to a matrix product. So there are two least times: the list, and below
# it a floor of matrix products and attention alone. A share of the list can
# exceed one; a share of the floor cannot. And a goal, for the list by ceilings
# that were measured:

whole, floor = bounds["bound_ns"].sum(), ladder.floor_ns(listed, h200)
print(f"the list:  {whole / 1e3:,.0f} µs on an H200 by its datasheet")
print(f"the floor: {floor / 1e3:,.0f} µs")
GOAL = 0.85
print(f"the goal:  {GOAL:.0%} of the list")

# %%
# The first rungs launch one kernel for each operation that is written. Those
# can be counted without a GPU, with the bytes that each reads and writes:


def as_written(rung, of):
    """Launches of one layer of a rung, at these sizes."""
    only = {name: of[name] for name in SHAPE}
    return rungs.written(mode="prefill", rung=rung, **only)


counted = []
for rung in ("naive", "sdpa", "fused"):
    launches = as_written(rung, sizes)
    least = ladder.launched_ns(launches, h200)
    counted.append(
        {
            "rung": rung,
            "launches": len(launches),
            "GB moved": sum(launch["bytes"] for launch in launches) / 1e9,
            "least time (µs)": least / 1e3,
            "share, at best": whole / least,
        }
    )
plots.table(pd.DataFrame(counted))

# %%
# The first row is where the layer can be at best before anything is changed.
# What each change can save follows from what it removes, and from nothing
# else. The sources of the bounds, which the code below computes from the rung
# before, once that is measured:
#
# - **sdpa** removes the scores' trips through the memory, and half of the two
#   products: the difference of two rows above, taken to run at the same share
#   of its bound as the whole rung did.
# - **fused** fills the last wave of a product's tiles better, with one GEMM
#   instead of several. GEMMs are taken to keep their share of their bound.
# - **compiled** can remove all elementwise work, at the very best.
# - **autotuned** can bring GEMMs to their ceiling.
# - **graphed** can remove idle time between kernels. Eager code launches a
#   layer of this size sooner than the GPU runs it: expect nothing.
# - **two-streams** runs gate and up side by side. Each fills the GPU by
#   itself: only the last wave of each is left to gain.
# - **flash** and **cudnn** can bring attention to its bound.
# - **triton**, like compiled, can remove what lies between the GEMMs.
# - **epilogue** can remove SwiGLU's own trip through the memory, if an own
#   GEMM is as good as the library's. It need not be.
# - **fp8** can halve the GEMMs. It is other arithmetic, so it has a speed-up
#   and no share of these bounds.
#
# The waves, for tiles of the size that large products use on this card:


def waves(sizes, multiprocessors):
    """Efficiency of each product's waves."""
    m, d, f = sizes["context"], sizes["hidden"], sizes["d_ff"]
    columns = {"q, k or v": d, "q, k, v": 3 * d}
    columns |= {"gate or up": f, "gate and up": 2 * f}
    return {
        name: ladder.wave_efficiency(m, n, multiprocessors)
        for name, n in columns.items()
    }


full = waves(sizes, hardware.find("H200").multiprocessors)
shown = pd.Series(full, name="share of full waves")
plots.table(shown.rename_axis("product").reset_index())

# %%
# Measure
# -------
# The first rung: three separate projections, scores written out, their softmax
# in fp32, a norm and rotary positions in elementary operations. A step passes
# through several layers with weights of their own, since weights that were
# just used would wait in the cache.

from nsightkit.errors import UsageError
from nsightkit.investigations import measure

before = measure("ladder", "naive")
before

# %%
# The ceilings of this very card, from products and transfers of the page about
# them. A smoke run has none: nothing about a GPU follows from a CPU.

smoke = before.mode == "smoke"
try:
    card = hardware.find((before.provenance["gpu"] or {})["name"])
except (KeyError, UsageError):
    card = None
sheet = sol.datasheet(card) if card else None
ceilings, ran = None, {}
if not smoke:
    for name in ("before", "layer", "fp8", "fp32", "copy", "triad", "read"):
        ran[name] = measure("ceilings", name)
    reached = [
        sol.ceiling(run.parameters, run.median("step_ns"))
        for run in ran.values()
    ]
    ceilings = sol.ceilings(reached, "measured on this card")
    print(f"bf16: {ceilings.tflops['bf16']:,.0f} TFLOP/s measured")
    print(f"transfers: {ceilings.gb_per_s:,.0f} GB/s measured")
rates = ceilings or sheet

# %%
# Read
# ----
# Where the first rung spends its time, by kind of work. On a GPU these are
# kernels, on a CPU operators.

layers = before.parameters["layers"]
work = ladder.kinds(before.trace, layers)
kind_times = work.rename_axis("kind of work").reset_index()
kind_times["share"] = kind_times["time_ns"] / kind_times["time_ns"].sum()
plots.table(kind_times)

# %%
# Everything that is neither GEMM nor attention could be gone.

# %%
# Change one thing
# ----------------
# One change a rung, each to the rung that it names. In code the first two are
#
# .. code-block:: python
#
#    F.scaled_dot_product_attention(q, k, v, is_causal=True)
#    q, k, v = F.linear(x, torch.cat([w_q, w_k, w_v])).chunk(3, dim=-1)
#
# and most of the others a line around the same code:

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
# For each rung first the most that it can save, computed from its base, then
# the measurement. A graph changes launches and no kernel, which is a change
# that the trace of its base can be played again with. A smoke run takes the
# first few rungs, and a compiler that needs no other compiler and fuses
# nothing: it shows that the page works.


def of_unit(name):
    """Bound of all operations of a kind: GEMM or attention."""
    found = [o for o in operations(before.parameters) if o.unit != "fp32"]
    kind = [o for o in found if (o.name == "attention") == (name != "GEMM")]
    return sum(rates.bound_ns(operation) for operation in kind)


def most(name, runs):
    """What a rung can save of its base at most, in nanoseconds a layer."""
    base = runs[RUNGS[name].base]
    if rates is None or not base.trace.recorded("kernels"):
        return None
    sizes, spent = base.parameters, ladder.kinds(base.trace, layers)
    by_kind = dict.fromkeys(("GEMM", "attention"), 0.0) | spent.to_dict()
    kept = by_kind["GEMM"] + by_kind["attention"]
    took = base.median("step_ns") / layers
    idle = max(took - spent.sum(), 0)
    filled = waves(sizes, card.multiprocessors) if card else {}

    def joined(gemm, alone, together):
        if not filled:
            return 0.0
        whole = sol.gemm_cost(sizes["context"], *gemm)
        lost = 1 / filled[alone] - 1 / filled[together]
        pace = max(by_kind["GEMM"] / of_unit("GEMM"), 1)
        return rates.bound_ns(whole) * lost * pace

    d, f = sizes["hidden"], sizes["d_ff"]
    if name == "sdpa":
        written = (as_written(rung, sizes) for rung in ("naive", "sdpa"))
        was, is_now = (ladder.launched_ns(rows, rates) for rows in written)
        return (was - is_now) * took / was
    if name in ("fused", "two-streams"):
        saved = joined((2 * f, d), "gate or up", "gate and up")
        if name == "fused":
            saved += joined((3 * d, d), "q, k or v", "q, k, v")
        return saved
    if name in ("compiled", "triton"):
        return spent.sum() - kept + idle
    if name == "epilogue":
        rest = [o for o in operations(sizes) if o.unit == "fp32"]
        pace = (spent.sum() - kept) / sum(map(rates.bound_ns, rest))
        (one,) = [o for o in rest if o.name == "SwiGLU"]
        return rates.bound_ns(one) * max(pace, 1)
    if name == "autotuned":
        return max(by_kind["GEMM"] - of_unit("GEMM"), 0)
    if name in ("flash", "cudnn"):
        return max(by_kind["attention"] - of_unit("attention"), 0)
    if name == "fp8":
        eighth = rates.tflops.get("fp8", rates.tflops["bf16"])
        return by_kind["GEMM"] * (1 - rates.tflops["bf16"] / eighth)
    return idle


def by_replay(name, runs):
    """What a rung that only launches saves of its base, played again."""
    if not name.startswith("graphed"):
        return None
    base = runs[RUNGS[name].base]
    (row,) = whatif.summary(base.trace, ["free-launches"])
    saved = row["speedup"] and 1 - 1 / row["speedup"]
    return saved and saved * base.median("step_ns") / layers


FEW = ["sdpa", "fused", "compiled"]
chosen = FEW if smoke else [name for name in RUNGS if name != "naive"]
runs, predicted, replayed = {"naive": before}, {}, {}
for name in chosen:
    predicted[name] = most(name, runs)
    replayed[name] = by_replay(name, runs)
    runs[name] = measure("ladder", name)
after = runs["compiled"]
after

# %%
# Predicted and measured. The time is the median of a layer, the spread the
# range of the middle half of the steps; a difference inside the spread is
# none.

import numpy as np

samples = {name: run.values("step_ns") for name, run in runs.items()}
of_this = operations(before.parameters)
other = of_this
if sheet and "fp8" in sheet.tflops:
    eight = operations(before.parameters, "fp8")
    other = [
        a if a.unit == "fp32" or a.name == "attention" else b
        for a, b in zip(of_this, eight, strict=True)
    ]
table = ladder.summary(
    of_this, samples, layers, sheet, ceilings, {"fp8": other}
)
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
# Against the speed of light, both ways: by the datasheet, and by the ceilings
# measured on this card; a smoke run has times only. The columns of the floor
# compare with what cannot be fused away.

US = {"time_ns": "time (µs)", "low_ns": "from (µs)", "high_ns": "to (µs)"}
named = US | {
    "times": "times as fast",
    "sol_datasheet": "share of datasheet",
    "sol_measured": "share of ceilings",
    "floor_datasheet": "share, floor, datasheet",
    "floor_measured": "share, floor, ceilings",
}
light = table[["rung", *named]].dropna(axis=1, how="all")
light[list(US)] /= 1e3
formats = dict.fromkeys(US.values(), "{:,.1f}") | {"times as fast": "{:.2f}"}
plots.table(light.rename(columns=named), formats, missing="none")

# %%
# What moved: the time by kind of work, and the least times as lines. The parts
# are from profiled steps, the length of a bar and its spread are not.

floors = {}
for label, roof in (("ceilings", ceilings), ("datasheet", sheet)):
    if roof:
        least = sum(roof.bound_ns(operation) for operation in of_this)
        floors[f"the list, {label}"] = least
        floors[f"the floor, {label}"] = ladder.floor_ns(of_this, roof)
spent = {name: ladder.kinds(run.trace, layers) for name, run in runs.items()}
plots.ladder_bars(
    table, spent, floors, title=f"A layer's forward pass ({after.mode})"
)

# %%
# The same as numbers, for each change: what its kinds of work gave or took.

moved = pd.DataFrame(
    {
        name: spent[name].sub(spent[RUNGS[name].base], fill_value=0) / 1e3
        for name in chosen
    }
)
moved = moved.fillna(0).rename_axis("kind of work, µs").reset_index()
plots.table(moved, dict.fromkeys(chosen, "{:+z,.1f}"))

# %%
# A faster layer that computes something else is not faster. Each rung against
# the same weights in float64: the norm of the difference over that of the
# result. Rounding is what the format costs at least, one layer's output
# rounded once. Where the driver reports the clock, the share of what the
# datasheet's units could do at that clock: the power limit is not in it.

checked = []
for name, run in runs.items():
    row = {"rung": name, "error": run.median("relative_error")}
    row |= {"largest": run.median("max_abs_error")}
    row |= {"rounding": run.median("rounding_error")}
    clock = run.median("sm_clock_mhz")
    if clock is not None:
        row |= {"clock (MHz)": clock, "power (W)": run.median("power_w")}
    if clock and card and name != "fp8":
        there = sol.datasheet(card, clock)
        least = sum(there.bound_ns(operation) for operation in of_this)
        row["share at its clock"] = least / by_rung.loc[name, "time_ns"]
    row["ran instead"] = run.parameters["instead"] or "-"
    checked.append(row)
plots.table(pd.DataFrame(checked))

# %%
# The compiled rung as a timeline; the traces of all others are below.

plots.timeline(after.trace, title=f"Compiled ({after.mode})")

# %%
# Verdict
# -------
# Computed from the runs. The best rung is the fastest that does the same
# arithmetic; those beside the ladder count as well.

import textwrap

same = by_rung.drop(index="fp8", errors="ignore")
best = same["time_ns"].idxmin()
null = steps.loc[steps["outcome"].str.startswith("no effect"), "rung"]
more = steps.loc[steps["outcome"].str.startswith("more"), "rung"]
wrong = by_rung.index[by_rung["impossible"]]


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
over = by_rung.index[by_rung["floor_measured"] > 1]
first_ns, best_ns = (by_rung.loc[name, "time_ns"] for name in ("naive", best))
faster = first_ns - best_ns > max(spread["naive"], spread[best])
if faster:
    verdict = (
        f"{where}, a layer goes from {first_ns / 1e3:,.0f} to "
        f"{best_ns / 1e3:,.0f} µs ({best}), "
        f"{same.loc[best, 'times']:.1f} times as fast."
    )
else:
    verdict = (
        f"{where}, no rung is faster than the first, {first_ns / 1e3:,.0f} µs "
        f"a layer, by more than the spread."
    )
if not smoke:
    end = f" to {share(best)}" if faster else ""
    verdict += f" That is {'from ' if faster else ''}{share('naive')}{end}."
    goal = same.loc[best, "sol_measured"] >= GOAL
    verdict += (
        f" The goal of {GOAL:.0%} is {'' if goal else 'not '}reached."
        f" Faster than predicted: {', '.join(more) or 'no rung'}."
    )
verdict += (
    f" Changes without effect of their own: {', '.join(null) or 'none'}."
)
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
    "times": same.loc[best, "times"],
    "null_results": len(null),
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# One shape, one batch, one direction. A layer of a smaller model is held up by
# its launches, and a graph that gives nothing here is worth much there; the
# page about decoding shows that.
#
# A prediction is the most that a change can save, not what it will. Only that
# of a graph comes from a replay: the other rungs run other kernels. One that
# was exceeded is wrong, and worth more than one that held: something moved
# that the change was not thought to move, such as the clock. Power is shared
# by all kernels, so a rung with less traffic leaves more of it to its GEMMs.
#
# The bound of an elementwise operation assumes the memory. Activations of this
# size fit the level-2 cache, so such an operation may be faster than its
# bound.
#
# The rung in 8 bits has fixed scales for its inputs, found in a pass over the
# same input: its error is that of good calibration, and more than any other
# rung's. Whether a model bears it, this page cannot tell.
#
# In a smoke run there are no kernels and no ceilings, the compiler only traces
# and few rungs run. What it shows is that the page works, and that the rungs
# compute the same.

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
#    $ python examples/17_layer_ladder.py
#
# The bounds of any trace with shapes, and the ceilings they need:
#
# .. code-block:: console
#
#    $ nsightkit peaks --measure --format json > ceilings.json
#    $ nsightkit sol trace.json.gz --ceilings ceilings.json
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only ladder
