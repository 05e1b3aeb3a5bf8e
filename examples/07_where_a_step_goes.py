"""
Where does a training step go?
==============================

Forward, backward, optimizer: which takes how long, and on which clock? And why
do profiles with ranges so often answer this wrongly?

What is measured: a training step of a language model, phase by phase, and
attention part by part, first with its scores written out, then fused. What
came out: :measured:`07_where_a_step_goes.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# A matrix product in the forward pass needs two in the backward pass: one for
# the gradient of its input, one for that of its weights. So backward should
# take twice as long as forward, and the optimizer, with about a dozen
# operations a parameter, next to nothing. The model's sizes give the rest.

import pandas as pd

from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.configurations import Configuration
from nsightkit.investigations import parts as investigations

SIZES = ["batch", "context", "d_model", "layers", "d_ff", "heads"]
SIZES += ["vocabulary"]


def flops(sizes):
    """FLOPs of the phases of a step, and of attention's forward parts."""
    chosen = {name: sizes[name] for name in SIZES}
    model = Configuration("this page's", **chosen, intent="one step")
    cost = envelope(model)
    phases = {
        "forward": cost.fwd_flops,
        "backward": cost.train_flops - cost.fwd_flops,
        "optimizer": 12 * cost.params,
    }
    projection = 2 * model.layers * model.tokens * model.d_model**2
    parts = {
        "qkv_projections": 3 * projection,
        "rope": 0,  # no matrix products in this one
        "qk_mask": cost.attention_flops / 2,
        "softmax": 0,  # nor in this one
        "attention_v": cost.attention_flops / 2,
        "output_projection": projection,
    }
    return pd.Series(phases), pd.Series(parts)


sizes = investigations.find("training-step", "before").gpu
for work in flops(sizes):
    print((work / work.sum()).map("{:.1%}".format).to_string(), end="\n\n")

# %%
# Two doubts beforehand. FLOPs predict time only where matrix products do:
# rotary positions, mask and softmax have none, but move bytes, the latter two
# all scores, a number for every pair of tokens in every head. And the
# optimizer reads and writes every parameter and both of its moments.

# %%
# Measure
# -------

from nsightkit.investigations import measure

before = measure("training-step", "before")
before

# %%
# Read
# ----
# Each phase of a step on two clocks. The *CPU* column is the time between the
# range's begin and end on the thread that opened it. In a GPU run that is the
# time to launch, and to wait. In a run on the CPU there is nothing to launch:
# the CPU executes the operators there and then, and its column is where time
# goes.
#
# The *GPU* column is the busy time of what was launched in the phase. It is
# empty without a GPU. The rule, in the last column, says whose launches
# count; it is the subject of a section below.

from nsightkit import plots
from nsightkit.analysis.timeline import overview, phases, steps


def per_step(run):
    """Phases with their CPU and GPU time in a mean step."""
    table, count = phases.summary(run.trace), len(steps.find(run.trace))
    return pd.DataFrame(
        {
            "phase": table["phase"],
            "CPU (ms)": table["cpu_ns"] / count / 1e6,
            "GPU (ms)": table["gpu_ns"] / count / 1e6,
            "kernels": table["kernel_count"] / count,
            "share of GPU busy": table["share_of_busy"],
            "rule": table["rule"],
        }
    )


written = per_step(before)
plots.table(written, missing="no GPU")

# %%
# A table of phases is worth something only if nothing is missing from it. Its
# last row is what lies in no phase, so that the columns add up: on the CPU to
# the steps, on the GPU to its busy time. What the GPU was not busy is idle.

found = phases.summary(before.trace)
wall = steps.find(before.trace).eval("end_ns - start_ns").sum()
on_gpu = before.trace.recorded("kernels")
print(f"CPU column: {found['cpu_ns'].sum():,} ns, steps: {wall:,} ns")
if on_gpu:
    whole = overview.summary(before.trace)
    added = found["gpu_ns"].sum()
    print(f"GPU column: {added:,} ns, busy: {whole['busy_ns']:,} ns")
    print(f"GPU idle between its operations: {whole['idle_ns']:,} ns")

# %%
# The same as shares, beside those of the FLOPs:

expected, expected_parts = flops(before.parameters)
by_phase = found.set_index("phase")
plots.share_bars(
    {
        "FLOPs, expected": expected,
        "CPU time": by_phase["cpu_ns"],
        "GPU busy time": by_phase["gpu_ns"],
    },
    title=f"A step among its phases ({before.mode})",
)

# %%
# Inside the forward pass, attention is marked part by part. The bars show
# what share of attention each part is. A part that is wide in time and absent
# in FLOPs is one that moves bytes.

from nsightkit.analysis.timeline import ranges

names = [*expected_parts.index[:4], "sdpa", *expected_parts.index[4:]]


def attention(run):
    """CPU and GPU time of attention's marked parts in a mean step."""
    table = ranges.summary(run.trace, match=f"^({'|'.join(names)})$")
    table = table.set_index("name")[["total_ns", "gpu_ns", "kernel_count"]]
    ordered = [name for name in names if name in table.index]
    return table.loc[ordered] / len(steps.find(run.trace))


parts = attention(before)
plots.share_bars(
    {
        "FLOPs, expected": expected_parts,
        "CPU time": parts["total_ns"],
        "GPU busy time": parts["gpu_ns"],
    },
    title=f"Attention's forward pass among its parts ({before.mode})",
)

# %%
# What autograd does for these parts in the backward pass lies in no range of
# its own; it is in the row ``backward``. One level lower everything has a
# name: kernels by kind of work and in full where there was a GPU, else the
# operators, by the CPU time that is theirs and not that of operators inside.

from nsightkit.analysis.timeline import kernels, operators

work = kernels if on_gpu else operators
columns = ["share", "total_ns", "count", "category", "name"]
if on_gpu:
    plots.kernel_bars(
        kernels.summary(before.trace, by="category"),
        title=f"GPU time by kind of work ({before.mode})",
    )
plots.table(work.summary(before.trace, top=10)[columns])

# %%
# Ask another witness
# -------------------
# PyTorch's profiler and Nsight Systems learn of kernels from the same place,
# the driver, and of everything else in ways of their own. PyTorch's records
# each operator, and so each launch takes longer under it. Nsight Systems
# records none: it sees the ranges that the program marks with NVTX, and calls
# of CUDA. So what the GPU did should agree but for what differs from run to
# run. What the CPU did need not. Both in one process would be in each other's
# way, so the part runs twice where there are both.

from nsightkit.analysis.compare import two_tools
from nsightkit.trace.model import TABLES


def witnesses(run):
    """The traces of a part by what captured them."""
    both = {"torch.profiler": run.trace, "Nsight Systems": run.nsys_trace}
    return {tool: trace for tool, trace in both.items() if trace is not None}


tools = witnesses(before)
if len(tools) == 1:
    why = before.nsys_notice or "this part does not ask for it"
    print(f"PyTorch's profiler alone; not Nsight Systems: {why}.")
    print("The same line of code captures with both where it finds an nsys.")
rows = {
    tool: {t: trace.size(t) for t in TABLES if trace.recorded(t)}
    for tool, trace in tools.items()
}
recorded = pd.DataFrame(rows).reindex(TABLES).dropna(how="all")
recorded = recorded.astype("Int64").rename_axis("events").reset_index()
plots.table(recorded)

# %%
# A mean step side by side, where there are two: the whole, the phases by the
# rule ``window``, and the kinds of kernels that take longest. The difference
# is that of Nsight Systems from PyTorch's profiler.


def beside(table):
    """A comparison with its times in milliseconds."""
    table, (one, other) = table.copy(), table.columns[4:6]
    time = table["figure"].str.endswith("_ns")
    table["figure"] = table["figure"].str.replace("_ns", " (ms)")
    table["figure"] = table["figure"].str.replace("_", " ")
    for tool in (one, other):
        table[tool] = table[tool].where(~time, table[tool] / 1e6)
    return plots.table(table, {"difference": "{:+.1%}"})


compared = two_tools.compare(tools, top=4) if len(tools) == 2 else None
beside(compared) if compared is not None else None

# %%
# In short, clock by clock. Span and idle time depend on both: a GPU that is
# launched to more slowly waits longer.

if compared is not None:
    for whose, figures in compared.dropna().groupby("clock"):
        apart = figures["difference"].abs()
        most = figures.loc[apart.idxmax()]
        print(
            f"{whose}: {(apart == 0).sum()} of {len(apart)} figures equal, "
            f"median difference {apart.median():.1%}, largest "
            f"{most['difference']:+.1%} (in {most['name']})"
        )
    if not on_gpu:
        print("No GPU: what should agree is what could not be captured.")

# %%
# Why CPU time of ranges misleads
# -------------------------------
# This trace is synthetic: ``nsightkit.workloads.planted`` wrote it and it
# never ran on a GPU. Its step does what real ones do. Forward is launched by
# the main thread, slowly, and its kernels queue up. Backward is launched by
# the thread that autograd keeps for each device, quickly, and its kernels are
# long. The optimizer begins with a value that is read back, so the CPU waits
# there until the GPU has done everything before it.

import tempfile
from pathlib import Path

import nsightkit
from nsightkit.workloads import planted

folder = tempfile.TemporaryDirectory()
out, process = planted.Export(), planted.Export.process(1)
main, autograd = planted.Export.thread(1, 1), planted.Export.thread(1, 2)
plan = {  # phase: launching thread, launches, time between, kernel, its name
    "forward": (main, 60, 25_000, 50_000, "128x256"),
    "backward": (autograd, 120, 10_000, 55_000, "256x128"),
    "optimizer": (main, 10, 10_000, 40_000, None),
}
gemm = "void cutlass::Kernel2<tensorop_bf16_s16816gemm_{}_nn>(T1::Params)"
adam = "void multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>(T1)"
now, free, planted_ns = 1_000, 0, {}
for phase, (thread, launches, every_ns, kernel_ns, tile) in plan.items():
    begin = now
    if phase == "optimizer":  # a value is read back first
        now = max(now, free) + 5_000
        out.synchronize("cudaStreamSynchronize", main, begin + 500, now)
    for _ in range(launches):
        now += every_ns
        call = out.call("cudaLaunchKernel", thread, now - 4_000, now)
        start = max(now + 1_500, free)
        free = start + kernel_ns
        name = gemm.format(tile) if tile else adam
        out.kernel(name, start, free, call, process)
    out.range(phase, main, begin, now + 100)
    now += 200
    planted_ns[phase] = launches * kernel_ns
out.range("step", main, 900, now)
synthetic = nsightkit.load(out.write(Path(folder.name, "step.sqlite")))

clocks = phases.summary(synthetic).set_index("phase")
nsys_rule = phases.summary(synthetic, rule="thread").set_index("phase")
truth = pd.Series(planted_ns)
plots.share_bars(
    {
        "planted": truth,
        "CPU time": clocks["cpu_ns"],
        "GPU, rule window": clocks["gpu_ns"],
        "GPU, rule thread": nsys_rule["gpu_ns"],
    },
    title="One step, four answers (synthetic)",
)

# %%
# On the CPU's clock the optimizer is the longest phase: it is charged with
# the waiting, which is other phases' work. On the GPU's clock backward is.
#
# The last bar follows the rule by which Nsight Systems projects ranges to the
# GPU: an operation belongs to the range in which the *same thread* launched
# it. No range was open on autograd's thread, so backward is free. Kineto's
# projection has the same blind spot. The table below tells that something is
# missing only because of its last row; a table without one would add up to
# less and look fine. The rule ``window`` also counts what threads without
# ranges of their own launched while the range was open.

both = pd.DataFrame(
    {
        "planted_ns": truth,
        "CPU_ns": clocks["cpu_ns"],
        "window_ns": clocks["gpu_ns"],
        "thread_ns": nsys_rule["gpu_ns"],
    }
).reindex([*plan, phases.UNATTRIBUTED])
both = both.fillna({"planted_ns": 0})
plots.table(both.rename_axis("phase").reset_index())

# %%
# And kernels by name, twice: in full, and by the base name that many tables
# show. All of CUTLASS's matrix products share one base name, which makes a
# single row of forward and backward.

lasting = synthetic.table("kernels", ["name", "short_name", "duration_ns"])
for column in ("name", "short_name"):
    total = lasting.groupby(column, observed=True)["duration_ns"].sum()
    print(total.to_string(), end="\n\n")

# %%
# Phases divide the time in which the GPU was busy. When it was idle and why,
# in this trace and in the real one where that is a GPU's:

from nsightkit.analysis.timeline import gaps

traces = {"synthetic": synthetic}
if on_gpu:
    traces[before.mode] = before.trace
for origin, trace in traces.items():
    title = f"GPU idle time by cause ({origin})"
    plots.gap_bars(gaps.summary(trace), title=title)

# %%
# Change one thing
# ----------------
# Attention in one operator, which never writes its scores to memory. What the
# second run does, and no more:
#
# .. code-block:: python
#
#    F.scaled_dot_product_attention(q, k, v, is_causal=True)

# %%
# Measure again
# -------------

after = measure("training-step", "after")
after

# %%
# The phases of both runs, on the clock that counts: the GPU's where there is
# one, else the CPU's.

clock = "gpu_ns" if on_gpu and after.trace.recorded("kernels") else "cpu_ns"
mean = {}
for run in (before, after):
    table = phases.summary(run.trace)
    table[clock] = (table[clock] / len(steps.find(run.trace))).astype(float)
    mean[run.part] = table
plots.before_after(
    mean["before"],
    mean["after"],
    key="phase",
    value=clock,
    labels=("written out", "fused"),
    title=f"Phases with either attention ({after.mode})",
    axis="GPU busy time a step" if clock == "gpu_ns" else "CPU time a step",
)

# %%
# Attention's forward parts in a mean step, before and after. The fused
# operator, ``sdpa``, stands for mask, softmax and both of their products.

columns = {"total_ns": "CPU (ms)", "gpu_ns": "GPU (ms)"}
columns["kernel_count"] = "kernels"
sides = {}
for side, table in (("before", parts), ("after", attention(after))):
    timed = table.assign(**table.filter(like="_ns") / 1e6)
    sides[side] = timed.rename(columns=columns).add_suffix(f", {side}")
table = sides["before"].join(sides["after"], how="outer")
table = table.loc[[name for name in names if name in table.index]]
table = table.rename_axis("part").reset_index().dropna(axis=1, how="all")
plots.table(table)

# %%
# Step times, without a profiler; each point is a step.

gpus = [(run.provenance["gpu"] or {}).get("name") for run in (before, after)]
comparable = before.mode == after.mode and gpus[0] == gpus[1]
plots.step_times(
    {run.part: run.values("step_ns") for run in (before, after)},
    title=f"Step times with either attention ({after.mode})",
)

# %%
# Verdict
# -------
# Computed from the two runs. As expected means within a fifth:

import textwrap

spent = found.set_index("phase")[clock]
ratio = float(spent["backward"] / spent["forward"])
wanted = float(expected["backward"] / expected["forward"])
fits = "as" if abs(ratio / wanted - 1) < 0.2 else "not as"
inside = parts["gpu_ns" if clock == "gpu_ns" else "total_ns"]
inside = inside.reindex(expected_parts.index).astype(float).fillna(0)
shares = pd.DataFrame(
    {
        "time": inside / max(inside.sum(), 1),
        "FLOPs": expected_parts / expected_parts.sum(),
    }
)
most = (shares["time"] - shares["FLOPs"]).idxmax()
took, thought = shares.loc[most]
was, now = before.median("step_ns"), after.median("step_ns")
where = "in a smoke run on a CPU" if after.mode == "smoke" else "on a GPU"
verdict = (
    f"{where}, backward takes {ratio:.1f} times as long as forward, {fits} "
    f"expected from FLOPs ({wanted:.1f}); of attention's forward time {most} "
    f"takes {took:.0%}, of its FLOPs {thought:.0%}; a step takes "
    f"{was / 1e6:.1f} ms with scores written out, {now / 1e6:.1f} ms fused."
)
if not comparable:
    verdict = "the two runs are not of the same machine; nothing to compare."
findings = {
    "verdict": verdict,
    "backward_to_forward": ratio,
    "most_above_flops": float(took),
    "fused": was / now,
}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# Phases come from a few profiled steps, and a profiler slows launching down;
# step times come from steps without one. Where figures are of one tool, it is
# PyTorch's profiler; the second capture is of another run of the same part.
#
# Where operations of two phases overlap on the GPU, the moment counts for the
# one that began first. With one stream, as here, they do not. The rule
# ``window`` would err where two phases are open at a time in one process.
# Turning autograd's thread off makes both rules agree, and changes when
# backward launches.
#
# FLOPs count attention as a full square, which the masked half is part of; a
# fused kernel may skip it. A run on the CPU says what its operators cost
# there, and nothing about a GPU's balance of arithmetic and memory.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{run.part}, {run.mode}, as a timeline": run.trace
    for run in (before, after)
}
if before.nsys_trace is not None:
    label = f"{before.part}, {before.mode}, by Nsight Systems, as a timeline"
    downloads[label] = before.nsys_trace
downloads["one step, synthetic, as a timeline"] = synthetic

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU;
# either also under Nsight Systems, where nsys is on the ``PATH`` or
# ``NSIGHTKIT_NSYS`` names it:
#
# .. code-block:: console
#
#    $ python examples/07_where_a_step_goes.py
#
# The loop itself, under Nsight Systems; save it as ``loop.py``:
#
# .. code-block:: python
#
#    from nsightkit.workloads import lm
#
#    sizes = dict(d_model=1024, layers=12, d_ff=4096, heads=16, batch=8)
#    sizes |= dict(attention="naive", annotate_mha=True)
#    with lm.start("cuda", **sizes) as run:
#        for _ in range(20):
#            run.step()
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output step -- python loop.py
#    $ nsightkit ranges step.sqlite
#    $ nsightkit ranges step.sqlite --rule thread
#    $ nsightkit kernels step.sqlite --by category
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only training-step
