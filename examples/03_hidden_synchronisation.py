"""
What does reading one number cost?
==================================

A loop reads its loss to log it, or copies a result back. The profile shows
long waiting calls. Which of them cost anything?

.. in-short::
"""

# %%
# The symptom
# -----------
# A training loop keeps an eye on its activations. Each ``.item()`` reads a
# single number:
#
# .. code-block:: python
#
#    for layer in layers:
#        x = layer(x)
#        norms.append(x.norm().item())
#
# Below is a piece of such a loop. The trace is synthetic: it never ran on a
# GPU, so we know exactly what its reads cost.

# sphinx_gallery_thumbnail_number = 2
# record: 30 s
# fold: How the traces are made
from _lib import synthetic

from nsightkit import plots

drains, truth = synthetic.training("sync")
idle_ns = truth["gaps"]["synchronization"]
without_reads, _ = synthetic.training()

# %%

third = int(drains.steps()["start_ns"].iloc[2])
plots.timeline(drains, end_ns=third, title="One read per layer (synthetic)")

# %%
# The stream has a hole after every layer of ``forward``. The long solid part
# is ``backward``, where nothing is read. The CPU launched all of it early and
# then waits at the first read of the next step.

# %%
# Predict: what does a wait cost?
# -------------------------------
# The CPU puts kernels into a queue and moves on, and the GPU works through the
# queue. As long as the CPU is ahead, its own time does not show. ``.item()``
# needs the value, so the CPU waits until the queue is empty. The GPU then has
# nothing to do until the next launch:


def step_time(kernels, launch, run, syncs=0, handling=0, steps=1_000):
    """Time of a step, of many in a row; `handling`: CPU after a sync."""
    cpu = gpu = 0
    for number in range(1, steps * kernels + 1):
        cpu += launch
        gpu = max(cpu, gpu) + run
        if syncs and number % (kernels // syncs) == 0:
            cpu = gpu + handling
    return gpu / steps


# %%
# A step has 240 kernels that run for 20 units of time each. A launch takes 6,
# and after a read the program spends 15 on the value. How much longer is a
# step with one read, with twelve, and with one after each kernel? Does a read
# at the end of the step cost less?
#
# .. dropdown:: Answer
#
#    Each read costs 21 at any position: its handling and the next launch. A
#    step of 4,800 takes 4,821 with one, 5,052 with twelve and 9,840 with one
#    for each kernel. A read at the end of a step delays the next step instead.
#    Only the number of reads matters.
#
# Now four real programs that spend about a third of their time or more in
# calls that wait for the GPU. Would all of them be faster without the waits?
#
# .. dropdown:: Answer
#
#    We cannot tell from that share. A wait lasts as long as the GPU has work,
#    and it costs something only if the CPU could have used the time to prepare
#    work that the GPU then lacks. In the replay two of the four gain a third
#    and two gain nothing; of the two that gain, one waits for other GPUs,
#    which a change to its code cannot remove.

# %%
# Evidence: do two loops with the same waits cost the same?
# ---------------------------------------------------------
# We compare the loop above with a second one that also waits for nearly all of
# its time, but for an event of one step earlier, so that a whole step is
# always queued. Both are synthetic and never ran on a GPU. ``whatif`` replays
# a trace as a schedule in which no call waits. We also made the first loop
# without its reads, so its true gain is known:

# fold: How the second loop is made
events = synthetic.Events()
step_ns, launch_ns = 5_000_000, 10_000
for number in range(12):
    begin = number * step_ns
    call = events.call("cudaLaunchKernel", begin, begin + launch_ns)
    start = (number + 1) * step_ns  # one step later, right after the last
    events.kernel("gemm", start, start + step_ns, call)
    until = begin + step_ns - launch_ns
    events.wait("cudaEventSynchronize", begin + launch_ns, until)
full = events.trace()

# %%

import pandas as pd


def waiting(name, trace):
    """Time that a thread waits, and the replay's speedup without waits."""
    calls = trace["calls"]
    calls = calls[calls["name"].str.contains("Synchronize")]
    lasting = calls["end_ns"] - calls["start_ns"]
    longest_ns = lasting.groupby(calls["thread"]).sum().max()
    idle = trace.gaps().set_index("cause")["share_of_span"]
    return {
        "program": name,
        "share in waiting calls": longest_ns / trace.summary()["wall_ns"],
        "share idle after them": idle.get("synchronization", 0),
        "speedup without": trace.whatif("no-sync")["speedup"].iloc[0],
    }


written = without_reads.summary()["window_ns"]
table = pd.DataFrame(
    [waiting("drains the queue", drains), waiting("keeps it full", full)]
)
truth = [drains.summary()["window_ns"] / written, 1.0]
plots.table(table.assign(**{"true gain": truth}))

# %%
# Both wait for most of their time. Only the first loses time to it, and the
# predicted speedup agrees with the true one. So does the idle time:

found = drains.gaps().set_index("cause")["total_ns"]["synchronization"]
print(f"idle after a read: true {idle_ns / 1e6:.3f} ms", end=", ")
print(f"found {found / 1e6:.3f} ms")

# %%
# Which of four real programs lose time?
# --------------------------------------
# These were recorded by others on real GPUs. The first copies data to two
# GPUs, the next two run inference with Qwen and with OWLv2, and the last is
# one of eight ranks that train a recommender:

from nsightkit.guide import case

CASES = {
    "copies": ("h100-all-copies", "two-gpus-1s"),
    "Qwen": ("two-cards", "qwen-h100"),
    "OWLv2": ("odd-tokens", "owlv2-h100"),
    "DLRM": ("v100-eight-ranks", "worker1"),
}
real = {name: case(*which) for name, which in CASES.items()}
rows = [waiting(name, one.trace) for name, one in real.items()]
waits = pd.DataFrame(rows).set_index("program")
most_idle = waits.pop("share idle after them").max()
print(f"idle after such calls: at most {most_idle:.1%} of the span")
plots.panels(waits, waits.columns, title="Waiting, and its cost (case file)")

# %%
# All four spend about a third of their time or more in waiting calls, and
# almost no idle time follows a wait. In the replay two gain nothing and two
# gain a third.
#
# Why does OWLv2 gain? It waits for each batch to be computed and copied back,
# and only then does the same thread load the next one, while the GPU idles.
# Without the wait, the program would load one batch while the GPU computes the
# other. The list of gaps does not show this. It attributes the idle time to
# loading, because that is what the CPU was doing at that moment:

found = real["OWLv2"].trace.gaps().set_index("cause")["share_of_span"]
for cause in ("input-pipeline", "synchronization"):
    print(f"{cause}: {found[cause]:.1%} of OWLv2's span")
real["OWLv2"]

# %%
# The copying program waits while its GPUs copy, and they never run out of
# work. Qwen waits for kernels that were launched before the capture began, and
# its GPU is busy with them until the wait ends.
#
# The recommender's gain is not one we can have by deleting a call. Its rank
# waits for the other seven to arrive at a collective. The replay knows one
# rank only, so it removes their lateness along with the wait;
# :doc:`22_one_rank_is_late` shows how to find the late rank.

# %%
# Change one thing: read later
# ----------------------------
# Keep values on the device and read them every hundred steps:
#
# .. code-block:: diff
#
#    +total = torch.zeros((), device="cuda")
#     for step, batch in enumerate(batches):
#         loss = train(batch)
#    -    print(loss.item())            # a wait in each step
#    +    total += loss.detach()        # a launch, no wait
#    +    if step % 100 == 99:
#    +        print(total.item() / 100)
#    +        total.zero_()
#
# ``.item()``, ``.cpu()`` and ``float(x)`` are the visible waits. Copies from
# or to pageable memory, ``nonzero``, boolean masks, ``cudaMalloc`` and
# ``cudaFree`` can wait as well. PyTorch warns about most of them while the
# program runs and names the line:
#
# .. code-block:: python
#
#    torch.cuda.set_sync_debug_mode("warn")

# %%
# Verdict
# -------
# A long waiting call is not a fault by itself. It costs time only if the CPU
# had something else to do: kernels to launch that the GPU then lacks, or data
# to load. Neither the time in such calls nor the idle time after them answers
# that. A replay of the whole schedule does. In
# :ref:`step 2 <example-gaps>` of the worked example waits cost almost nothing;
# the time is in the loader and in the launches.

# %%
# Limits
# ------
# * The speedups of the four programs are predictions. The change was not tried
#   on any of them, and a value that decides the next launch cannot be read
#   later.
# * One capture of each program, about a second or less.
# * The model of a step has kernels of one length. Behind a long queue short
#   kernels cost no launch; after a wait each one exposes its launch, so a real
#   read can cost more than the first launch.

# %%
# Run it yourself
# ---------------
# On a loop with this fault; save it as ``loop.py``:
#
# .. code-block:: python
#
#    from nsightkit.workloads import training
#
#    with training.run("cuda", sync=True, hidden=1024, layers=8) as loop:
#        for _ in range(50):
#            loop.step()
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output sync -- python loop.py
#    $ nsightkit whatif sync.sqlite no-sync
#    $ nsightkit gaps sync.sqlite --each --min-us 20 --format json
#    $ nsightkit calls sync.sqlite
#
# To run this page's script (without a GPU it runs a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/03_hidden_synchronisation.py

downloads = {"drains, synthetic": drains, "stays full, synthetic": full}
downloads |= {f"{name}, case file": one.trace for name, one in real.items()}

# %%
# Exercises
# ---------
# 1. Open OWLv2's timeline in Perfetto. Which two GPU operations surround the
#    long gap, and where does the wait before it end?
#
#    .. dropdown:: Answer
#
#       The gap is between the copy of a result to the host and the copy of the
#       next batch to the device. The wait ends *before* the gap begins, which
#       is why it is not among the gap's causes.
#
# 2. For OWLv2, ``whatif`` also knows ``no-input-wait``. Why does that gain
#    more than ``no-sync``, and which of the two would you build?
#
#    .. dropdown:: Answer
#
#       Without the wait, loading and computing overlap, and the longer of the
#       two remains. ``no-input-wait`` removes loading altogether. Loader
#       workers come close to that: several of them load while the GPU
#       computes. See :doc:`02_starved_input_pipeline`.
#
# 3. There is no ``cudaItem``. What do you look for in a list of CUDA calls?
#
#    .. dropdown:: Answer
#
#       A small ``cudaMemcpyAsync`` to the host followed by a
#       ``cudaStreamSynchronize``. In PyTorch's own profile the operator is
#       ``aten::item``. Not every one is a fault: reading a value that is
#       already in the CPU's memory is free.

# %%
# Measured here
# -------------
# .. own-run::
#
# A small language model that reads a value after every layer, then the same
# model with the values kept on the device. We expect one wait for each layer
# and one for the loss in the first run, and none in the second.
#
# The step is small on purpose. A layer's forward pass keeps the GPU busy for
# about as long as the CPU takes to launch it, so each wait shows. In a step of
# sixty milliseconds the same waits would cost one percent.

from nsightkit.analysis.core import noise
from nsightkit.guide import headline, measure
from nsightkit.workloads import training

sizes = dict(vocabulary=8192, hidden=1024, layers=12, heads=16)
sizes |= dict(context=512, batch=2, precision="bf16", workers=8)

before = measure(
    "hidden-sync/before",
    training.run,
    gpu=dict(**sizes, sync=True),
    small=dict(workers=0, sync=True),
)
after = measure(
    "hidden-sync/after",
    training.run,
    gpu=dict(**sizes, sync=False),
    small=dict(workers=0, sync=False),
)
before

# %%
# Reads of one value per step, as operators and as API calls:


# fold: How the waits are counted
def reads(run):
    """Count reads of one value per step."""
    row = {"run": run.name}
    count = len(run.trace.steps())
    for name, table in (
        ("aten::item", "ops"),
        ("cudaStreamSynchronize", "calls"),
    ):
        row[f"{name} per step"] = None
        if run.trace.recorded(table):
            names = run.trace[table]["name"]
            row[f"{name} per step"] = (names == name).sum() / count
    return row


both = pd.DataFrame([reads(run) for run in (before, after) if run])
if before and after:
    print("layers and loss:", after.parameters.get("layers", 2) + 1)
plots.table(both, missing="not recorded") if len(both) else None

# %%
# Step times without a profiler; each point is a step. Both runs reach the same
# losses.

# fold: How the figures are drawn
if before and after:
    apart = abs(before.values("loss") - after.values("loss")).max()
    print(f"largest difference between the losses of a step: {apart:.2g}")
    plots.step_times(
        {
            "reading values": before.values("step_ns"),
            "without": after.values("step_ns"),
        },
        title=f"Step times ({after.mode})",
    )
if before.trace.recorded("kernels"):
    title = f"GPU idle time by cause ({before.mode})"
    plots.bars(before.trace.gaps(), title=title)
after

# %%
# The answer from the two runs. A change counts if the interval for the ratio
# of their steps excludes one (:doc:`/definitions`, "Noise").

# fold: How the answer is put together
said = ""
if before and after:
    was, now = before.median("step_ns"), after.median("step_ns")
    said = (
        f"the median step went from {was / 1e6:.1f} to {now / 1e6:.1f} ms "
        f"({now / was - 1:+.0%})"
    )
    predicted = before.trace.whatif("no-sync")["speedup"].iloc[0]
    if pd.notna(predicted):
        said += f"; the replay predicted {1 / predicted - 1:+.0%}"
    said += "."
    change = noise.ratio(before.values("step_ns"), after.values("step_ns"))
    if not change.excludes(1):
        said = f"no effect beyond the spread; {said}"
shares = waits["share in waiting calls"]
gains = waits["speedup without"]
spent = f"spent {shares['Qwen']:.0%} and {shares['OWLv2']:.0%}"
if f"{shares['Qwen']:.0%}" == f"{shares['OWLv2']:.0%}":
    spent = f"each spent {shares['Qwen']:.0%}"
findings = headline(
    said,
    before,
    after,
    otherwise=(
        f"two programs on an H100 {spent} of their time in calls that wait "
        f"for the GPU. Without these waits Qwen would be "
        f"{gains['Qwen'] - 1:.0%} faster and OWLv2 {gains['OWLv2'] - 1:.0%} "
        "(replay)."
    ),
    badge="case file, NVIDIA H100",
)
