"""
Are my kernels too small for this GPU?
======================================

A kernel takes time to launch and time to run. When is a program limited by
launching, which kernels are small enough for that, and what helps?

What is measured: a training step of a small language model with an optimizer,
norms and an activation written as chains of elementary operations, then the
same with fused ones. What came out: :measured:`04_tiny_kernels.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# Launching goes on while the GPU runs, so a step takes whichever is longer:
# all launches or all kernels. An elementwise kernel runs as long as it takes
# to move its bytes. Which ones are over before the next can be launched?

# sphinx_gallery_thumbnail_number = 2
launch_us = 5  # eager PyTorch, operator and driver: an order of magnitude
bandwidth = 4.8e12  # bytes per second: the datasheet of an H200

for exponent in (12, 18, 22, 23, 25, 28):
    run_us = 3 * 4 * 2**exponent / bandwidth * 1e6  # two read, one written
    limit = "launching" if run_us < launch_us else "bytes"
    print(f"2**{exponent} numbers: {run_us:7.3f} µs to move, limit: {limit}")

long_us = 19
moved = long_us * 1e-6 * bandwidth
print(f"a kernel of {long_us} µs can move {moved / 1e6:.0f} MB in its time")

# %%
# The last line is a warning. Thousands of kernels of that length look like a
# launch problem in a table that is sorted by count, but are not: each runs
# for several launches. They are limited by the bytes they move, and fusing
# them pays by moving fewer.
#
# How many launches is the chain? The optimizer of this page's program spends
# fifteen elementary operations on each parameter tensor; a fused one takes a
# few kernels for all of them.

from nsightkit.investigations import parts as investigations

layers = investigations.find("tiny-kernels", "before").gpu["layers"]
tensors = 6 * layers + 3  # six a layer, the embedding, the last norm, the head
launches = 15 * tensors
launching_ms = launches * launch_us / 1e3
print(f"{tensors} tensors, {launches:,} launches by the optimizer in a step")
print(f"at {launch_us} µs each: {launching_ms:.1f} ms of launching")

# %%
# On a real GPU
# -------------
# Somebody recorded one forward pass of a transformer on an A100, for several
# batch sizes. Which would you expect to take longest?

import pandas as pd

from nsightkit import plots
from nsightkit.investigations import case, measure

sizes = (2, 16, 64, 128)
runs = {n: case("a100-batch-size", f"batch-{n}") for n in sizes}
runs[2]

# %%
# A pass takes about as long for each of them, because about as many kernels
# are launched one after the other. The GPU's own work grows with the batch,
# and only the largest batch has enough of it:

gain = "times as fast, free launches"


def measured_pass(batch, trace):
    """What one forward pass took, and what held it back."""
    found = trace.summary()
    return {
        "batch": batch,
        "kernels": found["kernel_count"],
        "pass (ms)": found["span_ns"] / 1e6,
        "GPU busy (ms)": found["busy_ns"] / 1e6,
        "busy": found["busy_ns"] / found["span_ns"],
        "bottleneck": trace.verdict()["bottleneck"],
        gain: trace.whatif("free-launches")["speedup"].iloc[0],
    }


passes = pd.DataFrame(measured_pass(n, run.trace) for n, run in runs.items())
shown = dict.fromkeys(["pass (ms)", "GPU busy (ms)"], "{:.1f}")
plots.table(passes, shown | {"busy": "{:.0%}", gain: "{:.2f}"})

# %%
# The last column plays each trace again with launches that cost next to
# nothing. It is one pass each, without a warm-up in the trace: the small
# differences between the first three say nothing.

# %%
# Measure
# -------

before = measure("tiny-kernels", "before")
before

# %%
# Read
# ----
# Operators and, in a GPU run, kernels in each phase of a step; the optimizer's
# should be about as many as worked out above. Operators contain others, so
# their number is larger than that of the launches.

from nsightkit.analysis.timeline import ranges, selection


def phases(run):
    """Median CPU time, and operators and kernels a step, of each phase."""
    table = ranges.summary(run.trace, match="^(forward|backward|optimizer)$")
    inside = [
        selection.select(run.trace, within=f"^{name}$").size("ops")
        for name in table["name"]
    ]
    return pd.DataFrame(
        {
            "phase": table["name"],
            "CPU (ms)": table["median_ns"] / 1e6,
            "operators": inside / table["count"],
            "kernels": table["kernel_count"] / table["count"],
        }
    )


chains = phases(before)
plots.table(chains, missing="no GPU")

# %%
# How long do they last? An operator costs time on the CPU however small its
# tensors are. In a GPU run two more curves are what matters: where the kernels
# lie left of the launches, the GPU waits.


def lengths(trace):
    """Durations of operators and kernels, and from launch to launch."""
    lasting = {
        table: trace.table(table, ["duration_ns"])["duration_ns"]
        for table in ("ops", "kernels")
    }
    calls = trace.table("calls", ["name", "start_ns", "thread"])
    calls = calls[calls["name"].str.contains("LaunchKernel")]
    calls = calls.sort_values(["thread", "start_ns"])
    return {
        "operators on the CPU": lasting["ops"],
        "kernels on the GPU": lasting["kernels"],
        "from launch to launch": calls.groupby("thread")["start_ns"].diff(),
    }


title = f"Operators, launches and kernels ({before.mode})"
plots.distributions(lengths(before.trace), title=title)

# %%
# A worked example with a known answer
# ------------------------------------
# These traces are synthetic: ``nsightkit.workloads.planted`` wrote them and
# they never ran on a GPU. Both launch the same number of kernels in the same
# rhythm; in the first the kernels are shorter than the rhythm, in the second
# they are longer.

import tempfile
from pathlib import Path

import nsightkit
from nsightkit.workloads import planted

folder = tempfile.TemporaryDirectory()
count, every_ns, short_ns, long_ns = 2_000, 9_000, 2_000, 19_000


def chain(name, kernel_ns, every_ns=every_ns):
    """Kernels that are launched in turn and run as soon as they can."""
    out, free = planted.Export(), 0
    cpu, process = out.thread(1, 1), out.process(1)
    for launched in range(every_ns, (count + 1) * every_ns, every_ns):
        begun = launched - every_ns // 2
        call = out.call("cudaLaunchKernel", cpu, begun, launched)
        start = max(launched + 1_500, free)
        free = start + kernel_ns
        out.kernel("elementwise", start, free, call, process)
    return nsightkit.load(out.write(Path(folder.name, f"{name}.sqlite")))


shorter, longer = chain("shorter", short_ns), chain("longer", long_ns)
short, long = lengths(shorter), lengths(longer)
series = {
    "shorter kernels": short["kernels on the GPU"],
    "longer kernels": long["kernels on the GPU"],
    "from launch to launch": short["from launch to launch"],
}
title = "Shorter and longer than the launches (synthetic)"
plots.distributions(series, title=title)

# %%
# The shorter kernels lie left of the launches: each is over before the next
# can begin. The longer ones lie right of them and queue up. They look alike
# in a table of counts.
#
# A third synthetic trace has the shorter kernels in one replay of a CUDA
# graph. The first trace should be idle between any two kernels for what the
# rhythm leaves over, the others never. Planted and found:

from nsightkit.analysis.timeline import gaps, overview

out = planted.Export()
call = out.call("cudaGraphLaunch", out.thread(1, 1), 0, every_ns)
first, process = every_ns + 1_500, out.process(1)
out.graph(first, first + count * short_ns, call, process)
graph = nsightkit.load(out.write(Path(folder.name, "graph.sqlite")))

idle_ns = (count - 1) * (every_ns - short_ns)
rows = []
synthetic = {"shorter": shorter, "longer": longer, "graph": graph}
for name, trace in synthetic.items():
    truth = idle_ns if name == "shorter" else 0
    whole = overview.summary(trace)
    found = gaps.summary(trace).set_index("cause")["total_ns"]
    launching = found.get("launch-overhead", 0)
    busy = whole["busy_ns"] / whole["span_ns"]
    rows.append((name, whole["kernel_count"], busy, truth, launching))
names = ["synthetic", "kernels", "share busy", "planted_ns", "found_ns"]
plots.table(pd.DataFrame(rows, columns=names))

# %%
# The last row is why a profile of a compiled program can seem empty: Nsight
# Systems records a graph replay as one interval without its kernels, and
# exports of 2023.4 and before lack even that, unless it is asked for nodes
# (``--cuda-graph-trace=node``, at a cost for each). The GPU is busy all the
# same.
#
# What would cheap launches gain? ``whatif`` plays a trace again with launches
# that follow each other closely. The chain of short kernels was written in
# that rhythm as well, and what it takes less is the truth; longer kernels
# never waited for a launch:

from nsightkit.analysis.replay import whatif

quick_ns = 3_000
closely = chain("closely", short_ns, quick_ns)
took = [overview.summary(t)["span_ns"] for t in (shorter, closely)]
for name, trace in {"shorter": shorter, "longer": longer}.items():
    (known,) = whatif.summary(trace, ["free-launches"])
    print(f"{name} kernels: predicted {known['speedup']:.3f} times as fast")
print(f"shorter kernels, written so: {took[0] / took[1]:.3f} times")

# %%
# All idle time by cause, in the first of them, and in the real trace where
# that is a GPU's:

traces = {"synthetic, shorter kernels": shorter}
if before.trace.recorded("kernels"):
    traces[before.mode] = before.trace
for origin, trace in traces.items():
    title = f"GPU idle time by cause ({origin})"
    plots.gap_bars(gaps.summary(trace), title=title)

# %%
# Change one thing
# ----------------
# Say the same in fewer operations. What the second run does:
#
# .. code-block:: python
#
#    optimizer = torch.optim.AdamW(parameters, fused=True)
#    x = F.rms_norm(x, weight.shape, weight)
#    gate = F.silu(gate)
#
# Where no fused operation exists, ``torch.compile`` makes one, and
# ``torch.compile(mode="reduce-overhead")`` records what is left as a CUDA
# graph that is launched at once. A graph helps only a program that waits for
# launches: where the kernels are long, it changes next to nothing.
#
# The prediction from the trace, for launches that cost next to nothing. The
# last column says how far the replay without a change is from what was
# recorded. A smoke run has no GPU work to play.

(replay,) = whatif.summary(before.trace, ["free-launches"])
names = {"speedup": "times as fast", "replay_error": "share off, unchanged"}
plots.table(pd.DataFrame([replay]).rename(columns=names), missing="not known")

# %%
# Measure again
# -------------

after = measure("tiny-kernels", "after")
after

# %%
# Phase by phase, before and after. A fused operation is one kernel on a GPU;
# on a CPU it can still consist of several operators.

fused = phases(after)
both = chains.merge(fused, on="phase", suffixes=(", before", ", after"))
plots.table(both, missing="no GPU")

# %%
# Step times, without a profiler; each point is a step. The losses of the two
# runs say whether they computed the same, up to rounding.

gpus = [(run.provenance["gpu"] or {}).get("name") for run in (before, after)]
comparable = before.mode == after.mode and gpus[0] == gpus[1]
if comparable:
    apart = abs(before.values("loss") - after.values("loss")).max()
    print(f"largest difference between the losses of a step: {apart:.2g}")
plots.step_times(
    {run.part: run.values("step_ns") for run in (before, after)},
    title=f"Step times with chains and with fused operations ({after.mode})",
)

# %%
# Verdict
# -------
# Computed from the two runs:

import textwrap

was, now = before.median("step_ns"), after.median("step_ns")
gpu = chains["kernels"].notna().all() and fused["kernels"].notna().all()
what = "kernels" if gpu else "operators"
fewer = chains[what].sum() / fused[what].sum()
by_replay = "not known"
if replay["speedup"]:
    by_replay = f"{replay['speedup']:.1f}"
where = "in a smoke run on a CPU" if after.mode == "smoke" else "on a GPU"
verdict = (
    f"{where}, the chains need {fewer:.1f} times as many {what}; a step "
    f"takes {was / 1e6:.1f} ms with them and {now / 1e6:.1f} ms without: "
    f"{was / now:.1f} times as fast (free launches, predicted by replay: "
    f"{by_replay})."
)
if not comparable:
    verdict = "the two runs are not of the same machine; nothing to compare."
if before.mode == after.mode == "smoke":
    print("This page's own run:", textwrap.fill(verdict), sep="\n")
    least, most = passes.iloc[0], passes.iloc[-1]
    verdict = (
        f"on an {runs[2].source['gpu']} (case file), a forward pass took "
        f"{least['pass (ms)']:.0f} ms for {least['batch']} samples and "
        f"{most['pass (ms)']:.0f} ms for {most['batch']}: launching some "
        f"{round(least['kernels'], -1)} kernels takes that long, and the GPU "
        f"was busy for {least['busy']:.0%} and {most['busy']:.0%} of it."
    )
findings = {"verdict": verdict, "ratio": was / now}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# The launch time of the first section is an order of magnitude; the curve of
# a real trace has the true one, with the profiler's own cost in it. Fusing
# changes two things at once, launches and bytes, and step times alone do not
# say which of them paid. The replay changes launches only, and keeps every
# kernel: what fusing gains beyond it was bytes, and what it gains less are
# launches that were left. A CPU run shows what the operators cost
# on the CPU and nothing about a GPU.
#
# Short kernels are not at fault where the CPU is far enough ahead: behind a
# long kernel they wait in the queue, and their launches cost nothing.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{run.part}, {run.mode}, as a timeline": run.trace
    for run in (before, after)
}
for name, trace in synthetic.items():
    downloads[f"{name}, synthetic, as a timeline"] = trace

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/04_tiny_kernels.py
#
# The loop itself, under Nsight Systems; save it as ``loop.py``:
#
# .. code-block:: python
#
#    from nsightkit.workloads import training
#
#    with training.start("cuda", tiny=True, hidden=512, layers=8) as loop:
#        for _ in range(50):
#            loop.step()
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output tiny -- python loop.py
#    $ nsightkit gaps tiny.sqlite
#    $ nsightkit whatif tiny.sqlite free-launches
#    $ nsightkit kernels tiny.sqlite --sort count
#    $ nsightkit calls tiny.sqlite
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only tiny-kernels
