"""
What does .item() cost?
=======================

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
waiting = pd.DataFrame(rows).T.astype(float).rename_axis("program")
WAITS = ["share in waiting calls", "share idle after them"]
GAIN = "predicted speedup without waits"
plots.table(waiting[WAITS[:1]].reset_index(), {WAITS[0]: "{:.1%}"})

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
#    We cannot tell from that share. A wait lasts as long as the GPU has work.
#    It costs something only if the CPU could have used the time to prepare
#    work that the GPU then lacks. In the replay below two of the four gain a
#    third and two gain nothing.
#
# And what does one wait cost? A step has 240 kernels that run for 20
# microseconds each. A launch takes 6 microseconds, and after a read the
# program spends 15 on the value. How much longer is a step with one read, and
# with twelve?
#
# .. dropdown:: Answer
#
#    Each read costs 21 microseconds at any position: its handling and the next
#    launch. A step of 4,800 microseconds takes 4,821 with one read and 5,052
#    with twelve. A read at the end of a step delays the next step instead.
#    Only the number of reads matters.

# %%
# Evidence: which of the four lose time?
# --------------------------------------
# ``whatif`` replays a trace as a schedule in which no call waits. The shares
# are similar, yet two of the four programs gain nothing:

# fold: How the figure and the table are made
TITLE = "Waiting and its cost in four programs (case file)"
plots.panels(waiting, [WAITS[0], GAIN], title=TITLE)
shown = waiting.reset_index()
shown["remark"] = shown["program"].map({"DLRM": "lateness of other ranks"})
looks = dict.fromkeys(WAITS, "{:.1%}") | {GAIN: "{:.2f}x"}
plots.table(shown, looks, missing="")

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
# *The recommender's gain is not real*, hence the remark in the table. Its rank
# waits for the other seven to arrive at a collective. The replay knows one
# rank only, so it removes their lateness along with the wait;
# :doc:`22_one_rank_is_late` shows how to find the late rank.

real["OWLv2"]

# %%
# Can we trust the replay? Two loops whose truth we know
# ------------------------------------------------------
# Both are synthetic and never ran on a GPU, and both wait for most of their
# time. The first reads a number after every layer. The second waits for an
# event of one step earlier, so that a whole step is always queued. We also
# made the first loop without its reads, which gives its true gain.

# fold: How the traces and the table are made
drains, _ = synthetic.training("sync")
without_reads, _ = synthetic.training()
full = waits.queued_loop()
table = pd.DataFrame([waits.of(drains), waits.of(full)])
table.insert(0, "loop", ["drains the queue", "keeps it full"])
written_ns = without_reads.summary()["window_ns"]
table["true gain"] = [drains.summary()["window_ns"] / written_ns, 1.0]
looks = dict.fromkeys(WAITS, "{:.0%}")
looks |= dict.fromkeys([GAIN, "true gain"], "{:.3f}x")
plots.table(table, looks)

# %%
# Only the first loop loses time to its waits, and the predicted gain is within
# a percent of the true one.

# %%
# Change one thing: read later
# ----------------------------
# Keep values on the device and read them every hundred steps. (We could not
# try this on the four programs; their gains above are predictions.)
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
#   on any of them. A value that decides the next launch cannot be read later.
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
# On a GPU, this page's script also measures a small model with and without
# such reads. Without a GPU it runs a tiny CPU version:
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

# Small on purpose: a layer's forward pass keeps the GPU busy for about as long
# as the CPU takes to launch it, so each wait shows.
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
# The table counts reads per step, as operators and as API calls.

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
owlv2 = waiting.loc["OWLv2"]
findings = headline(
    waits.answer(before, after) if before and after else "",
    before,
    after,
    otherwise=(
        f"Nothing, while the GPU has work queued. Without its waits, OWLv2 "
        f"on an H100 would be {owlv2[GAIN]:.2f}x faster, and Qwen would gain "
        f"nothing (replay). Both spend {owlv2[WAITS[0]]:.0%} of their time in "
        "waiting calls."
    ),
    badge="case file, NVIDIA H100",
    loading=causes["input-pipeline"],
    after_waits=causes["synchronization"],
)
