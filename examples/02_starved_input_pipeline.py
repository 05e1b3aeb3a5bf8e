"""
Is the GPU waiting for data?
============================

A training step is slow, and the GPU is idle for part of it. Does the data
loader keep it waiting, and what do loader workers buy?

.. in-short::
"""

# %%
# The symptom
# -----------
# PyTorch's developers recorded six training steps of ResNet-50 on one GPU.
# The program loads its batches in the training process itself:
#
# .. code-block:: python
#
#    loader = DataLoader(dataset, batch_size=32, num_workers=0)
#    for images, labels in loader:
#        images = images.to("cuda")

# sphinx_gallery_thumbnail_number = 2
# record: 40 s
from nsightkit import plots
from nsightkit.guide import case, headline, measure
from nsightkit.workloads import training

alone = case("v100-starved-loader", "workers-0")
alone

# %%
# What the GPU did in those steps, and what the process that feeds it did
# meanwhile. The gaps in the lower rows are idle time:

plots.timeline(
    alone.trace, title="ResNet-50, loaded in the process (case file)"
)

# %%
# Predict: what sets the pace?
# ----------------------------
# Loader and step are two machines in a line. When one process does both, the
# times add up. With workers beside it, the slower of the two sets the pace.
# The GPU's own time stands apart, because a GPU works through its queue while
# the CPU loads.


def step_time(load, rest, gpu=0, workers=0):
    """Shortest time of a step that loading, CPU and GPU allow together."""
    if workers == 0:
        return max(load + rest, gpu)
    return max(load / workers, rest, gpu)


# %%
# Loading takes three units of time, the rest of the step one. How long is a
# step with no worker, and with one, two, four and eight?
#
# .. dropdown:: Answer
#
#    Four units without workers; then 3, 1.5, 1 and 1. After three workers the
#    step itself is the slower one, and more workers buy nothing.
#
# And this program: what share of its idle time is the loader's, and how much
# faster is it if no step ever waits for data? Look at the timeline, and guess
# before you read on.

# %%
# Evidence: what the GPU waited for
# ---------------------------------
# Each gap between two operations is put down to what the launching thread did
# meanwhile. ``verdict`` then plays the trace again without each kind of
# waiting, and gives the gain that comes out:

alone.trace.verdict()

# %%
# Not all of a wait is lost: the GPU is idle only from the moment its queue is
# empty. So the gain is not the share of waiting, and it is not the share of
# idle time either, for without this wait something else may hold the step up.
# That is why the trace is played again. Two changes gain about as much here;
# of two that tie, the verdict names the one that more time was lost to.

# %%
# Change one thing: load beside the training
# ------------------------------------------
# The same program, with one argument changed:
#
# .. code-block:: diff
#
#    -loader = DataLoader(dataset, batch_size=32, num_workers=0)
#    +loader = DataLoader(dataset, batch_size=32, num_workers=4)

four = case("v100-starved-loader", "workers-4")
plots.before_after(
    alone.trace.gaps(),
    four.trace.gaps(),
    key="cause",
    value="total_ns",
    labels=("loaded in the process", "four workers"),
    title="GPU idle time by cause, ResNet-50 on a V100 (case file)",
)

# %%
# The wait for data is gone. (The verdict gives a longer time than the bar. It
# also counts the wait before the first operation, which does not lie between
# two operations.) Did the steps get as much faster as predicted?

# fold: How the table is worked out
import pandas as pd


def gain_left(trace):
    """How many times as fast the trace is when it never waits for data."""
    return trace.whatif("no-input-wait")["speedup"].iloc[0]


steps_ns = [run.trace.steps()["wall_ns"] for run in (alone, four)]
never_late, left = gain_left(alone.trace), gain_left(four.trace)
step_gain = steps_ns[0].median() / steps_ns[1].median()
rows = {
    "predicted: a loader that is never late": never_late,
    "measured: the median step": step_gain,
    "measured: all six steps": steps_ns[0].sum() / steps_ns[1].sum(),
    "left to gain from loading, with four workers": left,
}
gains = pd.DataFrame(rows.items(), columns=["", "times as fast"])
plots.table(gains, {"times as fast": "{:.2f}"})

# %%
# Two of the six steps with workers were much slower than the others, which is
# why the median and the sum differ. More workers would not have helped those
# two: the replay of the second trace finds little left to gain
# from loading.

plots.step_times(
    dict(zip(("in the process", "four workers"), steps_ns, strict=True)),
    title="Step times of ResNet-50 on a V100 (case file)",
)

# %%
# Verdict
# -------
# The loader was the bottleneck. The prediction, a loader that is never late,
# is an upper bound, and the median step stayed below it. Then something else
# was in the way, which is how it should be after a change that worked:

bottleneck = four.trace.verdict()["bottleneck"]
print("with four workers, the bottleneck is", bottleneck)

# %%
# Limits
# ------
# * Six steps of one program, recorded once under a profiler.
# * The rule for the pace assumes that every worker has a core to itself, and
#   a loader that scales: one lock, one disk or one network link, shared by
#   all workers, ends that.
# * Nsight Systems does not show the workers. They are forked and never call
#   ``exec``, and such processes are not traced unless one asks for it with
#   ``--trace-fork-before-exec``, which is documented as able to deadlock.
#   Starvation has to be read from the process that waits.
# * In ``for batch in loader:`` the wait is over *before* the body of the loop
#   begins. A range around the first lines of the body sees nothing of it; put
#   it around ``next(it)``.

# %%
# Run it yourself
# ---------------
# On the traces of this page, which come with nsightkit:
#
# .. code-block:: console
#
#    $ nsightkit demo
#    $ cd nsightkit-demo
#    $ nsightkit verdict workers-0.parquet
#    $ nsightkit diff workers-0.parquet workers-4.parquet
#
# On a program of your own:
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output starved -- python train.py
#    $ nsightkit gaps starved.sqlite
#    $ nsightkit whatif starved.sqlite no-input-wait
#    $ nsightkit calls starved.sqlite --os
#
# To measure on your GPU (without one, the script shows our recording or runs
# a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/02_starved_input_pipeline.py

downloads = {
    "ResNet-50, loaded in the process": alone.trace,
    "ResNet-50, four workers": four.trace,
}

# %%
# Exercises
# ---------
# 1. Which two steps of the second trace are slow, and is the loader the
#    cause? Use ``nsightkit steps``, then ``gaps`` and ``calls`` with
#    ``--time`` around one of them, or open the timeline in Perfetto.
#
#    .. dropdown:: Answer
#
#       The first and the fifth, and in neither does the GPU wait for data. In
#       the first, one ``cudaMemcpyAsync`` takes most of the extra time. In the
#       fifth, as many launches as ever leave more than twice the idle time
#       between them: the CPU was slower. The trace does not say why; workers
#       that take the cores of the training process are a good guess, and a
#       guess.
#
# 2. ``nsightkit whatif workers-4.parquet`` lists other changes. Which one
#    would you make next, and would you expect its whole gain?
#
#    .. dropdown:: Answer
#
#       The first in the list. Its gain is that of a replay in which nothing
#       else changes; measure it, as this page did. :doc:`04_tiny_kernels` is
#       about launches, :doc:`03_hidden_synchronisation` about waiting calls.
#
# 3. Your own loop prints a small "data time", yet the GPU starves. Where is
#    the wait?
#
#    .. dropdown:: Answer
#
#       Most likely the timer starts inside the loop's body, when the wait is
#       already over. Put it around ``next(it)``.

# %%
# Measured here
# -------------
# .. own-run::
#
# A small language model trains on sequences that are read and decompressed
# one by one. First the training process does this itself, then twelve workers
# do. The wait is timed around ``next(it)`` in every step, without a profiler.

sizes = dict(vocabulary=32_000, hidden=1024, layers=8, heads=16)
sizes |= dict(context=512, batch=16, precision="bf16")
loading = dict(decode_bytes=1_000_000, read_ms=1.0)
small = dict(decode_bytes=20_000, read_ms=5.0)

before = measure(
    "starved-input/before",
    training.run,
    gpu=dict(**sizes, **loading, workers=0),
    small=dict(**small, workers=0),
)
after = measure(
    "starved-input/after",
    training.run,
    gpu=dict(**sizes, **loading, workers=12),
    small=dict(**small, workers=2),
)
before

# %%
# Each point is a step. Both runs learn the same from the same samples.

# fold: How the figures are drawn
if before and after:
    plots.step_times(
        {
            "no workers": before.values("step_ns"),
            f"{after.parameters['workers']} workers": after.values("step_ns"),
        },
        title=f"Step times with and without workers ({after.mode})",
    )
if before.trace.recorded("kernels"):
    plots.before_after(
        before.trace.gaps(),
        after.trace.gaps(),
        key="cause",
        value="total_ns",
        labels=("no workers", "with workers"),
        title=f"GPU idle time by cause ({before.mode})",
    )
after

# %%
# What the two runs say:

# fold: How the answer is put together
said = ""
if before and after:
    before_ns, after_ns = before.median("step_ns"), after.median("step_ns")
    wait_ns = before.median("data_wait_ns")
    wait_left = after.median("data_wait_ns") / after_ns
    gpu_ns = before.trace.steps()["busy_ns"].fillna(0).median()
    workers = after.parameters["workers"]
    bound_ns = step_time(wait_ns, before_ns - wait_ns, gpu_ns, workers)
    replayed = before.trace.whatif("no-input-wait")["speedup"].iloc[0]
    said = (
        f"waiting took {wait_ns / before_ns:.0%} of a step without workers "
        f"and {wait_left:.0%} with {workers}. Steps became "
        f"{before_ns / after_ns:.1f}x faster, {after_ns / 1e6:.1f} ms each; "
        f"the rule above allows {bound_ns / 1e6:.1f} ms"
    )
    if pd.notna(replayed):
        said += f", and the replay predicted {replayed:.1f}x"
    said += "."
findings = headline(
    said,
    before,
    after,
    otherwise=(
        f"with four loader workers, the median step of ResNet-50 was "
        f"{step_gain:.2f}x faster. Predicted for a loader that is never "
        f"late: {never_late:.2f}x. Then {bottleneck} was in the way."
    ),
    badge=alone.label,
)
