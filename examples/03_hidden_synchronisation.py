"""
What does reading one number cost?
==================================

A training loop reads its loss and a few statistics to log them. Each is a
single number. What does that do to a GPU that works through a queue, and when
does it cost nothing?

What is measured: a training step of a small language model that calls
``.item()`` after every layer, then the same with the values kept on the
device. What came out: :measured:`03_hidden_synchronisation.verdict`

What one needs: nothing to read this page, a minute and a CPU to run its small
version, an NVIDIA GPU with PyTorch to repeat it.
"""

# %%
# Expectation
# -----------
# The CPU launches kernels into a queue and goes on; the GPU works the queue
# off. As long as the CPU is ahead, its own time does not show. ``.item()``
# needs the value, so it waits until the queue is empty, and the GPU then has
# nothing to do until the next launch. A model of that in a few lines:


# sphinx_gallery_thumbnail_number = 2
def step_time(kernels, launch, run, syncs=0, handling=0, steps=1_000):
    """Time of a step, of many in a row; `handling`: CPU after a sync."""
    cpu = gpu = 0
    for number in range(1, steps * kernels + 1):
        cpu += launch
        gpu = max(cpu, gpu) + run
        if syncs and number % (kernels // syncs) == 0:
            cpu = gpu + handling
    return gpu / steps


free = step_time(240, launch=6, run=20)
for syncs in (1, 12, 240):
    total = step_time(240, launch=6, run=20, syncs=syncs, handling=15)
    cost = (total - free) / syncs
    said = f"{total:,.0f} instead of {free:,.0f}, {cost:.0f} for each"
    print(f"{syncs:3} syncs in a step: {said}")

# %%
# So a sync costs what the CPU needs to come back with the next kernel, here
# its handling of the value and one launch. One at the end of a step costs as
# much: it holds up the next step. It is their number that hurts. How many
# should a step of this page's program have? One for each layer and one for
# the loss:

from nsightkit.investigations import parts as investigations

part = investigations.find("hidden-sync", "before")
print("on a GPU:", part.parameters("live")["layers"] + 1, "syncs in each step")

# %%
# Measure
# -------
# On a CPU nothing is queued, so a smoke run has nothing to lose by a sync.

from nsightkit.investigations import measure

before = measure("hidden-sync", "before")
before

# %%
# Read
# ----
# Count them. In PyTorch the operator is ``aten::item``; in the CUDA API it is
# a small ``cudaMemcpyAsync`` and a ``cudaStreamSynchronize``. There is no
# ``cudaItem``, so looking for synchronising calls by name takes this
# knowledge.

import pandas as pd

from nsightkit import plots
from nsightkit.analysis.timeline import steps


def syncs_of(run):
    """Count reads of one value a step, as operators and as API calls."""
    found = {"run": f"{run.part} ({run.mode})"}
    number = len(steps.find(run.trace))
    tables = {"aten::item": "ops", "cudaStreamSynchronize": "calls"}
    for name, table in tables.items():
        count = (run.trace.table(table, ["name"])["name"] == name).sum()
        known = run.trace.recorded(table)
        found[f"{name} per step"] = count / number if known else None
    return found


plots.table(pd.DataFrame([syncs_of(before)]), missing="not recorded")

# %%
# Not every ``aten::item`` is a fault: one whose value lies in the CPU's memory
# waits for nothing, and an optimizer may read its own step counter. What
# counts is the difference to the repaired run below.
#
# ``.item()``, ``.cpu()`` and ``float(x)`` are the visible ones. Copies from or
# to pageable memory, ``nonzero``, boolean masks, ``cudaMalloc`` and
# ``cudaFree`` synchronise as well. PyTorch finds most of them while the
# program runs, each with the line that did it:
#
# .. code-block:: python
#
#    torch.cuda.set_sync_debug_mode("warn")
#
# On the timeline of a GPU run the reads are holes in the stream; a smoke run
# has no stream, and its phases show nothing unusual.

plots.timeline(before.trace, title=f"A value read per layer ({before.mode})")

# %%
# A worked example with a known answer
# ------------------------------------
# This trace is synthetic: ``nsightkit.workloads.planted`` wrote it and it
# never ran on a GPU. Its loop reads a value back after each layer of the
# forward pass. Planted and found idle time, by cause:

import tempfile
from pathlib import Path

import nsightkit
from nsightkit.analysis.timeline import gaps
from nsightkit.workloads import planted

folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "sync.sqlite")
truth = planted.training(path, fault="sync")
synthetic = nsightkit.load(path)
causes = gaps.summary(synthetic)
causes["planted_ns"] = causes["cause"].map(truth["gaps"])
plots.table(causes)

# %%
# Found is ``total_ns``; it equals what was planted. In the first two steps the
# stream has a hole after every layer of ``forward``, and none in ``backward``,
# where the CPU is ahead again:

end_ns = int(steps.summary(synthetic)["start_ns"].iloc[2])
title = "A value read after each layer (synthetic)"
plots.timeline(synthetic, end_ns=end_ns, title=title)

# %%
# What would it gain never to wait for the GPU? ``whatif`` plays the trace
# again as a schedule in which no call waits. The same loop was also written
# without its reads, and what that one takes less is the truth:

from nsightkit.analysis.replay import whatif
from nsightkit.analysis.timeline import overview

planted.training(Path(folder.name, "healthy.sqlite"))
healthy = nsightkit.load(Path(folder.name, "healthy.sqlite"))
took = [overview.summary(t)["window_ns"] for t in (synthetic, healthy)]
(known,) = whatif.summary(synthetic, ["no-sync"])
print(f"predicted: {known['speedup']:.3f} times as fast")
print(f"written without the reads: {took[0] / took[1]:.3f} times")

# %%
# All idle time by cause, in every trace of this page that has a GPU's events:

traces = {"synthetic": synthetic}
if before.trace.recorded("kernels"):
    traces[before.mode] = before.trace
for origin, trace in traces.items():
    title = f"GPU idle time by cause ({origin})"
    plots.gap_bars(gaps.summary(trace), title=title)

# %%
# The sync that costs nothing
# ---------------------------
# This trace is synthetic, too, and never ran on a GPU. Its CPU sits in a
# synchronising call nearly all of the time, as in the trace before. But it
# waits for an event of one step earlier, so that a whole step is always
# queued.

decoy = planted.Export()
cpu, process = decoy.thread(1, 1), decoy.process(1)
step_ns, launch_ns = 5_000_000, 10_000
for number in range(12):
    begin = number * step_ns
    call = decoy.call("cudaLaunchKernel", cpu, begin, begin + launch_ns)
    start = (number + 1) * step_ns  # one step later, right after the last
    decoy.kernel("gemm", start, start + step_ns, call, process)
    until = begin + step_ns - launch_ns
    decoy.synchronize("cudaEventSynchronize", cpu, begin + launch_ns, until)
queued = nsightkit.load(decoy.write(Path(folder.name, "decoy.sqlite")))

# %%
# Time in synchronising calls, the idle time that they caused, and what the
# replay without them gains:

from nsightkit.analysis.timeline import calls

rows = []
for name, trace in {"drains": synthetic, "stays full": queued}.items():
    table = calls.summary(trace).set_index("name")["total_ns"]
    waits = table[table.index.str.contains("Synchronize")].sum()
    found = gaps.summary(trace).set_index("cause")["total_ns"]
    idle = found.get("synchronization", 0)
    span = overview.summary(trace)["span_ns"]
    (without,) = whatif.summary(trace, ["no-sync"])
    rows.append((name, waits / span, idle / span, without["speedup"]))
names = ["queue (synthetic)", "share in sync calls", "share idle by sync"]
names.append("times as fast without")
plots.table(pd.DataFrame(rows, columns=names))

# %%
# Both shares are of the GPU's span. A long synchronising call is no fault by
# itself: it lasts as long as the GPU has work. What costs is the time the GPU
# then has none, and only the GPU's own row shows that.

# %%
# Change one thing
# ----------------
# Keep the values on the device and read them when nobody waits for them:
#
# .. code-block:: python
#
#    total = torch.zeros((), device="cuda")
#    for step, batch in enumerate(batches):
#        loss = train(batch)
#        total += loss.detach()        # a launch, no wait
#        if step % 100 == 99:
#            print(total.item() / 100)  # one sync for a hundred steps
#            total.zero_()
#
# The prediction for the measured program, from its own trace. The last column
# says how far the replay without a change is from what was recorded. A smoke
# run has no GPU work to play.

(replay,) = whatif.summary(before.trace, ["no-sync"])
names = {"speedup": "times as fast", "replay_error": "share off, unchanged"}
plots.table(pd.DataFrame([replay]).rename(columns=names), missing="not known")

# %%
# Measure again
# -------------

after = measure("hidden-sync", "after")
after

# %%
# The difference between the rows should be the number worked out above: one
# for each layer and one for the loss.

gpus = [(run.provenance["gpu"] or {}).get("name") for run in (before, after)]
comparable = before.mode == after.mode and gpus[0] == gpus[1]
print("layers and loss:", after.parameters["layers"] + 1)
both = [syncs_of(before), syncs_of(after)]
plots.table(pd.DataFrame(both), missing="not recorded")

# %%
# Step times, without a profiler; each point is a step. The losses of the two
# runs say whether they computed the same.

if comparable:
    apart = abs(before.values("loss") - after.values("loss")).max()
    print(f"largest difference between the losses of a step: {apart:.2g}")
plots.step_times(
    {run.part: run.values("step_ns") for run in (before, after)},
    title=f"Step times with and without reading values ({after.mode})",
)

# %%
# Verdict
# -------
# Computed from the two runs. The spread is the middle half of the steps of a
# run, as a share of its median: a difference below it is not a finding.

import textwrap

import numpy as np


def spread(run):
    """Spread of the step times of a run."""
    low, high = np.percentile(run.values("step_ns"), [25, 75])
    return (high - low) / run.median("step_ns")


was, now = before.median("step_ns"), after.median("step_ns")
noise = max(spread(before), spread(after))
by_replay = "not known"
if replay["speedup"]:
    by_replay = f"{1 / replay['speedup'] - 1:+.0%}"
verdict = (
    f"the median step went from {was / 1e6:.1f} to {now / 1e6:.1f} ms "
    f"({now / was - 1:+.0%}; predicted by replay: {by_replay}), with a spread "
    f"of {noise:.0%} within a run."
)
if not comparable:
    verdict = "the two runs are not of the same machine; nothing to compare."
elif after.mode == "smoke":
    verdict = f"on a CPU nothing is queued and no effect expected; {verdict}"
elif abs(now / was - 1) <= noise:
    verdict = f"no effect beyond the spread; {verdict}"
findings = {"verdict": verdict, "change": now / was - 1}
print(textwrap.fill(verdict))

# %%
# Limits
# ------
# The model knows one length of kernel. In a real step short kernels follow a
# sync as well; with a full queue they would have waited behind long ones, and
# after the sync each shows its launch. A sync can therefore cost more than
# the first launch. In relation to the step it is little for a large model on
# a slow GPU, and much for a small one on a fast GPU.
#
# The CPU runs slower under a profiler, so the idle time in a profile is
# somewhat larger than in an ordinary run; the step times here come from runs
# without one. A gap that follows a sync is called ``synchronization`` up to
# the next launch, including what the program did with the value in between,
# as long as most of it would go with the wait. Where the program's own work
# is the longer part, the gap is called ``cpu-work``: without the sync that
# work would still stand there.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``:

downloads = {
    f"{run.part}, {run.mode}, as a timeline": run.trace
    for run in (before, after)
}
downloads["drains, synthetic, as a timeline"] = synthetic
downloads["stays full, synthetic, as a timeline"] = queued

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/03_hidden_synchronisation.py
#
# The loop itself, under Nsight Systems; save it as ``loop.py``:
#
# .. code-block:: python
#
#    from nsightkit.workloads import training
#
#    with training.start("cuda", sync=True, hidden=1024, layers=8) as loop:
#        for _ in range(50):
#            loop.step()
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output sync -- python loop.py
#    $ nsightkit gaps sync.sqlite
#    $ nsightkit whatif sync.sqlite no-sync
#    $ nsightkit gaps sync.sqlite --each --min-us 20 --format json
#    $ nsightkit calls sync.sqlite
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only hidden-sync
