"""
How long can the context get before attention breaks?
=====================================================

Attention that writes its scores out needs memory that grows with the square
of the context, so there is a context at which it fails. Can that be known
beforehand, and what moves it: a compiler, a fused kernel, or fewer bits?

What is measured: attention by itself, forward and backward, to the limit of
the device, in several implementations and precisions. What came out:
:measured:`14_attention_until_it_breaks.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# One number decides most of it: the size of one matrix of scores, a number for
# each pair of tokens. Queries, keys, values and the output grow with the
# context alone. In MiB:

# sphinx_gallery_thumbnail_number = 3
import pandas as pd

from nsightkit import hardware, plots
from nsightkit.investigations import parts as investigations
from nsightkit.investigations.pages import sweep

plan = investigations.find("attention-sweep", "naive-fp32").parameters("live")
contexts, batch = plan["context"], plan["batch"]
sizes = pd.DataFrame({"context": contexts})
squares = batch * plan["heads"] * sizes["context"].astype(float) ** 2
sizes["scores, fp32"] = squares * 4 / 2**20
sizes["scores, bf16"] = squares * 2 / 2**20
sizes["q of width 64, fp32"] = batch * sizes["context"] * 64 * 4 / 2**20
plots.table(sizes, dict.fromkeys(sizes.columns[1:], "{:,.2f}"))

# %%
# How many of them live at the same time follows from the operators. Written
# out, it is two in the forward pass (a softmax reads one and writes one), one
# is kept, and going back through the softmax takes three. A compiler that
# works in place needs one less of each. A fused kernel never writes any.
# PyTorch's fallback (``math``) computes bf16 in fp32: fewer bits save nothing.
# So it can be said where an H200 will run out, before anything runs. This is
# for the capacity in its datasheet; further down it is for what there was.

COLUMNS = {
    "fp32": ("naive", "naive-compiled", "math", "efficient"),
    "bf16": ("naive", "naive-compiled", "math", "flash"),
}
memory = 1e9 * max(hardware.find("H200").memory_gb)
planned = pd.concat(
    sweep.forecast(memory, implementation, kind, d=[64], contexts=contexts)
    for kind, implementations in COLUMNS.items()
    for implementation in implementations
)
shown = {"largest_context": "fits up to", "context": "first that does not"}
plots.table(
    planned.drop(columns=["d", "needed_bytes"]).rename(columns=shown),
    missing="all fit",
)

# %%
# Where nothing grows is the other end. A short context is less work than it
# takes to launch its kernels; time cannot depend on the context there, and a
# comparison of implementations compares their launches.

# %%
# Measure
# -------
# The written-out one in fp32 comes first. One process takes all sizes in
# turn. Each direction of a cell has a status of its own: where backward runs
# out of memory, forward is timed all the same. Every time is that of one pass.

from nsightkit.investigations import measure

naive = measure("attention-sweep", "naive-fp32")
naive

# %%
# Read
# ----

on_gpu = naive.provenance["gpu"] is not None
limit = "memory of the GPU" if naive.mode != "smoke" else "simulated limit"
first = sweep.cells(naive.samples)
widths = sorted(first["d"].unique())
D = 64 if 64 in widths else widths[0]
KEPT = ["context", "direction", "status", "median_ns", "spread"]


def of_width(table, d=D):
    """Rows of one width."""
    return table[table["d"] == d]


def readable(table):
    """Columns as a reader wants them."""
    found = table[KEPT].copy()
    found["TFLOP/s"] = table["tflops"]
    found["before (MiB)"] = table["memory_before_bytes"] / 2**20
    found["peak (MiB)"] = table["peak_bytes"] / 2**20
    return found


FORMATS = dict.fromkeys(["before (MiB)", "peak (MiB)"], "{:,.2f}")
FORMATS |= {"spread": "{:.1%}", "TFLOP/s": "{:.3g}"}
print(f"width {D}")
plots.table(readable(of_width(first)), FORMATS)

# %%
# Spread is that of the middle half of the passes. "Before" is what was
# allocated when the direction began: before backward that is what forward
# kept. What did not run, and why:

rest = first[first["status"] != "ok"]
why = rest.groupby(["status", "direction", "reason"])["d"]
why = why.agg(lambda d: ", ".join(map(str, sorted(set(d)))))
plots.table(why.rename("widths").reset_index())

# %%
# Time at every width. Where a line is flat the time is not that of the
# arithmetic: on a GPU it is that of the launches, and it does not depend on
# the width either.

flat = sweep.launch_bound(first)
plots.sweep_times(
    first, flat, title=f"Attention written out, fp32 ({naive.mode})"
)

# %%
# Memory next: what was predicted from the sizes, and what was measured. What
# libraries keep between passes is not part of either.

compared = sweep.compare(first, on_gpu=on_gpu)
largest = compared.sort_values("context").groupby("direction").tail(2)
named = {"predicted_before": "before, predicted", "memory_before": "before"}
named |= {"predicted_peak": "peak, predicted", "peak": "peak"}
MEMORY = [f"{name} (MiB)" for name in named.values()]
for name, said in named.items():
    largest[f"{said} (MiB)"] = largest[f"{name}_bytes"] / 2**20
plots.table(
    largest[["d", "context", "direction", *MEMORY, "error"]],
    dict.fromkeys(MEMORY, "{:,.2f}") | {"error": "{:z.1%}"},
)

# %%
# And the forecast of the end, next to where it came. The forecast knows the
# sizes and the limit, and nothing of the measurement.

end = sweep.ends(first, sweep.limits(naive.samples), on_gpu=on_gpu)
named = shown | {"measured_context": "ran out at"}
plots.table(
    end[["d", "direction", *named, "outcome"]].rename(columns=named),
    missing="did not",
)

# %%
# Change one thing
# ----------------
# The implementation, with everything else as it was: compiled, then each
# backend of PyTorch's fused attention. After that the precision, alone.
# Changing both at once would leave open which of them helped.
#
# .. code-block:: python
#
#    compiled = torch.compile(attention, dynamic=False)
#
#    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
#        F.scaled_dot_product_attention(q, k, v, is_causal=True)
#
#    torch.set_float32_matmul_precision("high")  # TF32

# %%
# Measure again
# -------------
# A process for each column. On a CPU only those that it has are run, and none
# that is compiled.

ON_CPU = ("math-fp32", "naive-bf16", "flash-bf16")
runs = {"naive-fp32": naive}
for name in investigations.INVESTIGATIONS["attention-sweep"]:
    if name not in runs and (on_gpu or name in ON_CPU):
        runs[name] = measure("attention-sweep", name)
runs["flash-bf16"]

# %%
# One row a column, the status of each direction at the longest contexts. What
# cannot exist is listed too: flash attention and cuDNN's have no fp32.

cells = pd.concat([sweep.cells(run.samples) for run in runs.values()])
cells["column"] = cells["implementation"] + "-" + cells["precision"]
tail = sorted(of_width(cells)["context"].unique())[-4:]
states = of_width(cells)[of_width(cells)["context"].isin(tail)]
states = states.assign(
    cell=states["direction"] + " " + states["context"].astype(str)
)
order = [f"{way} {s}" for way in ("forward", "backward") for s in tail]
states = states.pivot_table(
    index="column", columns="cell", values="status", aggfunc="first"
)
plots.table(states.reindex(columns=order).reset_index())

# %%
# In fp32, one implementation after the other. Guides show what grows with the
# context and what with its square.


def columns(*names):
    """Cells of some columns at one width, in that order."""
    table = of_width(cells)
    return pd.concat([table[table["column"] == name] for name in names])


ladder = [f"{name}-fp32" for name in COLUMNS["fp32"]]
ladder = [name for name in ladder if name in runs]
lines = columns(*ladder)
plots.sweep_times(
    lines,
    sweep.launch_bound(lines),
    title=f"fp32, one change at a time ({naive.mode})",
)

# %%
# Memory of the same and of flash attention, which has no fp32, with the limit,
# the forecast ends and those that came.

limits = pd.concat([sweep.limits(run.samples) for run in runs.values()])
all_ends = sweep.ends(cells, limits, on_gpu=on_gpu)
plots.sweep_memory(
    columns(*ladder, "flash-bf16"),
    limits["naive-fp32"],
    of_width(all_ends),
    limit=limit,
    title=f"Memory to its end ({naive.mode})",
)

# %%
# The slopes at the long end of each line: one is O(S), two is O(S²). A fused
# kernel saves memory, not arithmetic, so its time should still grow with the
# square once the context is long.

slopes = sweep.exponents(of_width(cells)).drop(columns="d")
plots.table(slopes, {"time": "{:.2f}", "memory": "{:.2f}"})

# %%
# TF32 by itself. It changes how matrices are multiplied and not a byte of what
# is stored; the same columns with it and without, at the longest context that
# both have:


def gain(before, after, way):
    """Times as fast at the longest context of both, and which that is."""
    table = columns(before, after)
    table = table[(table["direction"] == way) & (table["status"] == "ok")]
    table = table.set_index(["context", "column"])["median_ns"]
    ns = table.unstack().reindex(columns=[before, after]).dropna()
    if ns.empty:
        return None
    return ns.index[-1], float(ns[before].iloc[-1] / ns[after].iloc[-1])


def gains(pairs):
    """A row for each pair of columns and direction."""
    rows = []
    for before, after in pairs:
        for way in ("forward", "backward"):
            found = gain(before, after, way)
            if found:
                row = {"from": before, "to": after, "direction": way}
                row |= {"at context": found[0], "times as fast": found[1]}
                rows.append(row)
    names = ["from", "to", "direction", "at context", "times as fast"]
    return pd.DataFrame(rows, columns=names)


both = [i for i in COLUMNS["fp32"] if f"{i}-tf32" in runs]
with_tf32 = gains([(f"{i}-fp32", f"{i}-tf32") for i in both])
if with_tf32.empty:
    print("this run has no TF32: it is a mode of a GPU's tensor cores")
TIMES = {"times as fast": "{:.2f}"}
None if with_tf32.empty else plots.table(with_tf32, TIMES)

# %%
# In bf16, where the fused kernels are at home:

short = ("naive", "naive-compiled", "efficient", "flash", "cudnn")
bf16 = [f"{name}-bf16" for name in short if f"{name}-bf16" in runs]
lines = columns(*bf16)
plots.sweep_times(
    lines, sweep.launch_bound(lines), title=f"bf16 ({runs[bf16[0]].mode})"
)

# %%
# And what each step gave, at the longest context that both sides have. From
# fp32 to bf16 is a step of its own.

from itertools import pairwise

steps = [*pairwise(ladder), ("naive-fp32", bf16[0])]
steps += [(bf16[0], name) for name in bf16[1:]]
plots.table(gains(steps), TIMES)

# %%
# Which backend really ran is read from the profile: the names of kernels on a
# GPU, of operators on a CPU. What was asked for plays no part in it.

ran = pd.concat([sweep.backends(run.trace) for run in runs.values()])
kinds = ran.groupby(
    ["implementation", "precision", "direction", "backend"], sort=False
)
kinds = kinds.agg(cells=("d", "size"), evidence=("evidence", "first"))
plots.table(kinds.reset_index())

# %%
# Verdict
# -------
# Computed from the runs.

import textwrap

gpus = {(run.provenance["gpu"] or {}).get("name") for run in runs.values()}
modes = {run.mode for run in runs.values()}
comparable = len(gpus) == 1 == len(modes)
where = "in a smoke run on a CPU" if naive.mode == "smoke" else "on a GPU"
known = all_ends[all_ends["outcome"] != "not reached"]
right = int((known["outcome"] == "as forecast").sum())
error = float(largest["error"].abs().max())


def last(column, way):
    """Longest context at which a direction was fine."""
    table = columns(column)
    fine = table[(table["direction"] == way) & (table["status"] == "ok")]
    return int(fine["context"].max()) if len(fine) else 0


flash = columns("flash-bf16")
power = sweep.exponents(flash)["memory"].max()
end_of_flash = "before" if (flash["status"] == "oom").any() else "without"
verdict = (
    f"{where}, attention written out in fp32 goes forward up to a context of "
    f"{last('naive-fp32', 'forward'):,} and backward up to "
    f"{last('naive-fp32', 'backward'):,} at width {D}, of those tried. "
    f"Of all columns, {right} of {len(known)} lines ended, or did not, as "
    f"forecast; peaks near the end were predicted within {error:.1%}. Flash "
    f"attention got to {last('flash-bf16', 'backward'):,} {end_of_flash} "
    f"running out; its memory grew with the context to the power {power:.1f}."
)
if not comparable:
    verdict = "the runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "forecast_right": right,
    "ends": len(known),
    "error": error,
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# Attention alone, with one head and without projections, is not a model. What
# else a model holds takes its share of memory first; the ledger counts that.
#
# The contexts tried lie far apart, so that an end is known to lie between two
# of them, while the forecast names a token. An allocator
# rounds and breaks up memory, which the model leaves out. Fused kernels
# allocate workspaces of their own, of which it knows only the largest.
#
# Rates credit the FLOPs that causal attention needs. What computes the whole
# square does twice the work and is not credited with it.
#
# In a smoke run the limit is one that a counter of tensors enforces, so that
# both kinds of failure can be seen on any machine. Its times are those of a
# CPU, which has no launches; compiled code is left out there.

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
#    $ python examples/14_attention_until_it_breaks.py
#
# What a step of a model with either attention needs, and who allocated it:
#
# .. code-block:: console
#
#    $ nsightkit bench --size medium --ctx 4096 --mode fwd_bwd
#    $ nsightkit memory snapshot.pickle
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only attention-sweep
