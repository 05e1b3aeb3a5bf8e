"""
What does reading one number cost?
==================================

A loop reads its loss to log it, or copies a result back. The profile shows
long waiting calls. Which of them cost anything?

.. in-short::
"""

# %%
# The symptom: long waits in four profiles
# ----------------------------------------
# Four programs, recorded by others on real GPUs. The first copies data to two
# GPUs, the next two run inference with Qwen and with OWLv2, and the last is
# one of eight ranks that train a recommender. Each spends about a third of its
# time or more in calls that wait for the GPU:

# sphinx_gallery_thumbnail_number = 1
# record: 30 s
# fold: How the waits are counted
import pandas as pd
from _lib import synthetic, waits

from nsightkit import plots
from nsightkit.guide import case, headline, measure
from nsightkit.workloads import training

CASES = {
    "copies": ("h100-all-copies", "two-gpus-1s"),
    "Qwen": ("two-cards", "qwen-h100"),
    "OWLv2": ("odd-tokens", "owlv2-h100"),
    "DLRM": ("v100-eight-ranks", "worker1"),
}
real = {name: case(*which) for name, which in CASES.items()}
rows = {name: waits.of(run.trace) for name, run in real.items()}
waiting = pd.DataFrame(rows).T.astype(float)
WAITS = ["share in waiting calls", "share idle after them"]
TITLE = "Waiting in four programs (case file)"
plots.panels(waiting, WAITS[:1], title=TITLE)

# %%
# Predict: which of them would be faster without the waits?
# ---------------------------------------------------------
# The CPU puts kernels into a queue and moves on, and the GPU works through the
# queue. As long as the CPU is ahead, its own time does not show. ``.item()``
# needs a value, so the CPU waits until the queue is empty, and the GPU then
# has nothing to do until the next launch. Is a long wait also an expensive
# one? Guess for the four programs.
#
# .. dropdown:: Answer
#
#    We cannot tell from that share. A wait lasts as long as the GPU has work,
#    and it costs something only if the CPU could have used the time to prepare
#    work that the GPU then lacks. In the replay below two of the four gain a
#    third and two gain nothing.
#
# And what does one wait cost? A step has 240 kernels that run for 20 units of
# time each. A launch takes 6, and after a read the program spends 15 on the
# value. How much longer is a step with one read, and with twelve?
#
# .. dropdown:: Answer
#
#    Each read costs 21 at any position: its handling and the next launch. A
#    step of 4,800 takes 4,821 with one and 5,052 with twelve. A read at the
#    end of a step delays the next step instead. Only the number of reads
#    matters.

# %%
# Evidence: which of the four lose time?
# --------------------------------------
# ``whatif`` replays a trace as a schedule in which no call waits:

# fold: How the table is made
shown = waiting.rename_axis("program").reset_index()
looks = dict.fromkeys(WAITS, "{:.1%}") | {"gain": "{:.2f}x"}
plots.table(shown.rename(columns={"speedup without": "gain"}), looks)

# %%
# *OWLv2 gains.* It waits for each batch to be computed and copied back, and
# only then does the same thread load the next one, while the GPU idles.
# Without the wait, the program would load one batch while the GPU computes the
# other. The list of gaps does not show this. It attributes
# :measured:`03_hidden_synchronisation.loading:.0%` of the span to loading and
# :measured:`03_hidden_synchronisation.after_waits:.1%` to waits, because
# loading is what the CPU was doing at that moment.
#
# *The copying program and Qwen gain nothing.* The first waits while its GPUs
# copy, and they never run out of work. Qwen waits for kernels that were
# launched before the capture began, and its GPU is busy with them until the
# wait ends.
#
# *The recommender's gain is not real.* Its rank waits for the other seven to
# arrive at a collective. The replay knows one rank only, so it removes their
# lateness along with the wait; :doc:`22_one_rank_is_late` shows how to find
# the late rank.

real["OWLv2"]

# %%
# Can we trust the replay? Two loops whose truth we know
# ------------------------------------------------------
# Both are synthetic and never ran on a GPU, and both wait for nearly all of
# their time. The first reads a number after every layer:
#
# .. code-block:: python
#
#    for layer in layers:
#        x = layer(x)
#        norms.append(x.norm().item())
#
# The second waits for an event of one step earlier, so that a whole step is
# always queued. We also made the first loop without its reads, which gives its
# true gain.

# fold: How the traces are made
drains, truth = synthetic.training("sync")
idle_ns = truth["gaps"]["synchronization"]
without_reads, _ = synthetic.training()
full = waits.queued_loop()
third = int(drains.steps()["start_ns"].iloc[2])
plots.timeline(drains, end_ns=third, title="One read per layer (synthetic)")

# %%
# The stream has a hole after every layer of ``forward``. The long solid part
# is ``backward``, where nothing is read.

# fold: How the table is made
table = pd.DataFrame([waits.of(drains), waits.of(full)])
table.insert(0, "loop", ["drains the queue", "keeps it full"])
written_ns = without_reads.summary()["window_ns"]
table["true gain"] = [drains.summary()["window_ns"] / written_ns, 1.0]
looks = dict.fromkeys(WAITS, "{:.0%}")
looks |= dict.fromkeys(["gain", "true gain"], "{:.3f}x")
plots.table(table.rename(columns={"speedup without": "gain"}), looks)

# %%
# Only the first loop loses time to its waits, and the predicted gain agrees
# with the true one. So does the idle time: the truth is
# :measured:`03_hidden_synchronisation.idle_ms:.3f` ms, and ``gaps`` finds
# :measured:`03_hidden_synchronisation.idle_found_ms:.3f`.

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
downloads |= {f"{name}, case file": run.trace for name, run in real.items()}

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
# Reads of one value per step, as operators and as API calls; then step times
# without a profiler. A change counts if the interval for the ratio of their
# steps excludes one (:doc:`/definitions`, "Noise").

# fold: How the figures are drawn
both = pd.DataFrame([waits.reads(run) for run in (before, after) if run])
if before and after:
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
plots.table(both, missing="not recorded") if len(both) else None

# %%
# fold: How the answer is put together
causes = real["OWLv2"].trace.gaps().set_index("cause")["share_of_span"]
found = drains.gaps().set_index("cause")["total_ns"]["synchronization"]
shares, gains = waiting[WAITS[0]], waiting["speedup without"]
findings = headline(
    waits.answer(before, after) if before and after else "",
    before,
    after,
    otherwise=(
        f"what the CPU could have done instead, which may be nothing. On an "
        f"H100, Qwen spends "
        f"{shares['Qwen']:.0%} and OWLv2 {shares['OWLv2']:.0%} of the time in "
        f"calls that wait for the GPU. Without these waits Qwen would be "
        f"{gains['Qwen'] - 1:.0%} faster and OWLv2 {gains['OWLv2'] - 1:.0%} "
        f"(replay)."
    ),
    badge="case file, NVIDIA H100",
    loading=causes["input-pipeline"],
    after_waits=causes["synchronization"],
    idle_ms=idle_ns / 1e6,
    idle_found_ms=found / 1e6,
)
