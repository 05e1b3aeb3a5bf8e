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
# To see what that does, here is a piece of such a loop. The trace is
# synthetic: it never ran on a GPU, so the cost of its reads is known.

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
plots.timeline(drains, end_ns=third, title="A read a layer (synthetic)")

# %%
# The stream has a hole after every layer of ``forward``. The long solid part
# is ``backward``, where nothing is read. The CPU has launched all of it early,
# and waits at the first read of the next step.

# %%
# Predict: what does a wait cost?
# -------------------------------
# The CPU launches kernels into a queue and goes on; the GPU works the queue
# off. As long as the CPU is ahead, its own time does not show. ``.item()``
# needs the value, so it waits until the queue is empty. Then the GPU has
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
# step with one read, with twelve, and with one after each kernel? And what
# does a single read cost at the end of the step?
#
# .. dropdown:: Answer
#
#    Each read costs 21, wherever it stands: its handling and the next launch.
#    A step of 4,800 takes 4,821 with one, 5,052 with twelve and 9,840 with
#    one for each kernel. A read at the end of a step holds up the next step.
#    It is their number that hurts.
#
# And in a profile: four programs spend a third of their time or more in calls
# that wait for the GPU. Is each of them faster without?
#
# .. dropdown:: Answer
#
#    The share does not say it. A wait lasts as long as the GPU has work. It
#    costs something only if the CPU could have prepared meanwhile what the GPU
#    then lacks. Two of the four gain a third, and two gain nothing.

# %%
# Evidence: two synthetic loops
# -----------------------------
# The loop above, and a second one that waits for nearly all of its time, too,
# but for an event of one step earlier, so that a whole step is always queued.
# Both are synthetic, and never ran on a GPU. ``whatif`` plays a trace again
# as a schedule in which no call waits. For the first loop we know what that
# gains, because it was also written without its reads:

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
    """How long a thread waits, and what a replay without waits gains."""
    calls = trace["calls"]
    calls = calls[calls["name"].str.contains("Synchronize")]
    lasting = calls["end_ns"] - calls["start_ns"]
    longest_ns = lasting.groupby(calls["thread"]).sum().max()
    idle = trace.gaps().set_index("cause")["share_of_span"]
    return {
        "program": name,
        "share in waiting calls": longest_ns / trace.summary()["wall_ns"],
        "share idle after them": idle.get("synchronization", 0),
        "times as fast without": trace.whatif("no-sync")["speedup"].iloc[0],
    }


written = without_reads.summary()["window_ns"]
table = pd.DataFrame(
    [waiting("drains the queue", drains), waiting("keeps it full", full)]
)
truth = [drains.summary()["window_ns"] / written, 1.0]
plots.table(table.assign(**{"true gain": truth}))

# %%
# The prediction agrees with the truth, and so does the idle time:

found = drains.gaps().set_index("cause")["total_ns"]["synchronization"]
print(f"idle after a read: true {idle_ns / 1e6:.3f} ms", end=", ")
print(f"found {found / 1e6:.3f} ms")

# %%
# Four programs on real GPUs
# --------------------------
# Other people recorded these. The first copies data to two GPUs, the next two
# are inference with Qwen and with OWLv2, and the last is one of eight ranks of
# a recommender:

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
# All four wait for about a third of their time or more, and hardly any idle
# time follows a wait. Two would gain nothing, and two would gain a third.
#
# Why does OWLv2 gain? It waits for each batch to be computed and copied back.
# Only then does the same thread load the next batch, and the GPU idles
# meanwhile. Without the wait the program would load one batch while the GPU
# computes the other. A list of gaps does not show this. It puts the idle time
# down to loading, which is what the CPU did at that moment:

found = real["OWLv2"].trace.gaps().set_index("cause")["share_of_span"]
for cause in ("input-pipeline", "synchronization"):
    print(f"{cause}: {found[cause]:.1%} of OWLv2's span")
real["OWLv2"]

# %%
# The copying program waits while its GPUs copy, and they are never short of
# work. Qwen waits for kernels that were launched before the capture began, and
# its GPU is busy with them until the wait ends.

# %%
# Change one thing: read later
# ----------------------------
# Keep values on the device, and read them when nobody waits for them:
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
# ``cudaFree`` can wait as well. PyTorch warns of most of them while the
# program runs, with the line that did it:
#
# .. code-block:: python
#
#    torch.cuda.set_sync_debug_mode("warn")

# %%
# Verdict
# -------
# Long waiting calls are not a fault by themselves. What counts is whether the
# CPU had something else to do: launches that the GPU then lacks, or data to
# load. Neither the time in such calls nor the idle time after them says so;
# the replay of the whole schedule does.

# %%
# Limits
# ------
# * The gains of the four programs are predictions. The change was tried for
#   none of them, and a value that the next launch depends on cannot be read
#   later.
# * One capture of each, of about a second or less.
# * DLRM waits for the other ranks. Their part of the wait does not go away:
#   :doc:`22_one_rank_is_late` is about that.
# * The model knows one length of kernel. Behind a long queue short kernels
#   cost no launch; after a wait each shows its own, so a read can cost more
#   than the first launch.

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
# 1. Open OWLv2's timeline in Perfetto. Between which two operations of the GPU
#    is the long gap, and where does the wait before it end?
#
#    .. dropdown:: Answer
#
#       The gap lies between the copy of a result to the host and the copy of
#       the next batch to the device. The wait ends *before* the gap begins.
#       That is why it is not in the list of the gap's causes.
#
# 2. For OWLv2, ``whatif`` also knows ``no-input-wait``. Why does that gain
#    more than ``no-sync``, and which of the two would you build?
#
#    .. dropdown:: Answer
#
#       Without the wait, loading and computing overlap, and the longer one of
#       them remains. A loader that is never late takes loading away. Loader
#       workers do both at once: they load while the GPU computes, several of
#       them side by side. See :doc:`02_starved_input_pipeline`.
#
# 3. There is no ``cudaItem``. What do you look for in a list of CUDA calls?
#
#    .. dropdown:: Answer
#
#       A small ``cudaMemcpyAsync`` to the host and a
#       ``cudaStreamSynchronize`` after it. In PyTorch's own profile the
#       operator is ``aten::item``, and not each one is a fault: a value that
#       lies in the CPU's memory waits for nothing.

# %%
# Measured here
# -------------
# .. own-run::
#
# A small language model that reads a value after every layer, then the same
# with the values kept on the device. It should have one wait for each layer
# and one for the loss, and then none.
#
# The step is small on purpose. A layer's forward pass keeps the GPU busy for
# about as long as the CPU takes to launch it, so each wait shows. In a step
# of sixty milliseconds the same waits would cost one percent.

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
# Step times, without a profiler; each point is a step. Both runs learn the
# same.

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
# What the two runs say. A change counts where the interval of the ratio of
# their steps leaves out one (:doc:`/definitions`, "Noise").

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
        said += f"; predicted by replay: {1 / predicted - 1:+.0%}"
    said += "."
    change = noise.ratio(before.values("step_ns"), after.values("step_ns"))
    if not change.excludes(1):
        said = f"no effect beyond the spread; {said}"
shares = waits["share in waiting calls"]
gains = waits["times as fast without"]
findings = headline(
    said,
    before,
    after,
    otherwise=(
        f"two programs on an H100 spent {shares['Qwen']:.0%} and "
        f"{shares['OWLv2']:.0%} of their time in calls that wait for the GPU. "
        f"Without the waits, the first would be {gains['Qwen']:.2f} times as "
        f"fast, and the second {gains['OWLv2']:.2f} times (predicted by "
        "replay)."
    ),
    badge="case file, NVIDIA H100",
)
