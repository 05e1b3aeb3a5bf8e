"""
Is the GPU waiting for data?
============================

A training step is slow, and the GPU is idle for part of it. Is the data
loader to blame, and how much do loader workers win back?

.. in-short::
"""

# %%
# The symptom
# -----------
# The PyTorch developers recorded six training steps of ResNet-50 on a V100.
# The training process loads its own batches:
#
# .. code-block:: python
#
#    loader = DataLoader(dataset, batch_size=32, num_workers=0)
#    for images, labels in loader:
#        images = images.to("cuda")
#
# This run is the :ref:`worked example <worked-example>` of the guide. Here we
# go through its steps :ref:`3 <example-verdict>` to
# :ref:`5 <example-changed>` in detail: we find the bottleneck, predict the
# gain with a model of the loader, change one argument and look at the same
# program again. The chapter :doc:`/guide/timeline` reads one training step
# row by row.

# sphinx_gallery_thumbnail_number = 4
# record: 40 s
from nsightkit import plots
from nsightkit.guide import case, headline, measure
from nsightkit.workloads import training

alone = case("v100-starved-loader", "workers-0")

# %%
# The bottom row is the GPU, and each gap in it is idle time. Above it is the
# CPU thread that feeds the GPU: its steps, and under them the loader's range,
# ``enumerate(DataLoader)``, cut to ``enum…``. Copies and memsets, in green,
# take :measured:`02_starved_input_pipeline.copies:.0%` of the GPU's work.

plots.timeline(
    alone.trace, title="ResNet-50, loaded in the process (case file)"
)
alone

# %%
# Predict: what sets the pace?
# ----------------------------
# Loading and training are two stages of a pipeline. When one process does
# both, their times add up. With loader workers beside it, the slower stage
# sets the pace. The GPU's own time is a third limit, because the GPU works
# through its queue while the CPU loads.


def step_time(load, rest, gpu=0, workers=0):
    """Shortest time of a step that loading, CPU and GPU allow together."""
    if workers == 0:
        return max(load + rest, gpu)
    return max(load / workers, rest, gpu)


# %%
# Suppose loading takes three milliseconds and the rest of the step one. How
# long is a step with no worker, and with one, two, four and eight?
#
# .. dropdown:: Answer
#
#    Four milliseconds without workers; then 3, 1.5, 1 and 1. From three
#    workers on the step itself is the slower stage, and more workers change
#    nothing.
#
# Now for the real program. Which share of its idle time is the loader's, and
# how much faster would it be if no step ever waited for data? Look at the
# timeline and guess before you read on.

# %%
# Evidence: what did the GPU wait for?
# ------------------------------------
# ``verdict`` attributes each gap between two GPU operations to what the
# launching thread was doing at that moment. It then replays the trace without
# each kind of waiting and reports the speedup:

alone.trace.verdict()

# %%
# The predicted speedup differs from the share of waiting, for two reasons. The
# GPU is idle only once its queue is empty, so part of a wait is hidden. And
# when one wait is removed, another may take its place. The replay accounts for
# both.
#
# Here two changes gain about the same, although launches cost the GPU far less
# idle time than data. Without launch overhead the CPU gets back to the loader
# earlier, and loads the next batch while the GPU still computes. In a tie, the
# verdict names the cause that takes more time.

# %%
# Change one thing: load beside the training
# ------------------------------------------
# The same program, with one argument changed:
#
# .. code-block:: diff
#
#    -loader = DataLoader(dataset, batch_size=32, num_workers=0)
#    +loader = DataLoader(dataset, batch_size=32, num_workers=4)
#
# Both runs on one time axis, then their idle time by cause:

four = case("v100-starved-loader", "workers-4")
for run, how in ((alone, "in the process"), (four, "by four workers")):
    plots.timeline(
        run.trace,
        start_ns=0,
        end_ns=1_100_000_000,
        levels=0,
        title=f"ResNet-50, loaded {how} (case file)",
    )


def idle(run):
    """The idle time of the GPU by cause."""
    return run.trace.gaps().set_index("cause")["total_ns"]


plots.stacks(
    {"loaded in the process": idle(alone), "four workers": idle(four)},
    quantity="time",
    title="GPU idle time by cause, ResNet-50 on a V100 (case file)",
)

# %%
# The gaps that waited for data have closed: their share of the six steps fell
# from :measured:`02_starved_input_pipeline.waited:.0%` to
# :measured:`02_starved_input_pipeline.waits:.0%`. One wait is left. The second
# run needs :measured:`02_starved_input_pipeline.first_ms:.0f` ms to get its
# first batch to the GPU. The bars start with the first GPU operation and do
# not contain it. The verdict does, and counts it mostly under copies, because
# the CPU is inside a blocking copy from pageable memory.
#
# Did the steps get as much faster as predicted? The first row is the limit
# that the replay of the first run gives. The second row compares the median
# steps, the third all six steps together. The last row is what the second run
# could still gain from its loader:

# fold: How the table is worked out
import pandas as pd


def gain_left(trace):
    """Speedup of the trace if it never waited for data."""
    return trace.whatif("no-input-wait")["speedup"].iloc[0]


steps_ns = [run.trace.steps()["wall_ns"] for run in (alone, four)]
never_late, left = gain_left(alone.trace), gain_left(four.trace)
step_gain = steps_ns[0].median() / steps_ns[1].median()
whole_gain = steps_ns[0].sum() / steps_ns[1].sum()
rows = {
    "predicted: no waits for data": never_late,
    "measured: the median step": step_gain,
    "measured: all six steps": whole_gain,
    "left to gain from loading, with four workers": left,
}
gains = pd.DataFrame(rows.items(), columns=["", "speedup"])
plots.table(gains, {"speedup": "{:.2f}x"})

# %%
# The median step gained less than the prediction, and the sum of all steps
# less again, because two of the six steps with workers were much slower than
# the others. More workers would not have helped those two: in the second
# trace, the replay finds almost nothing left to gain from loading.
# (``nsightkit diff`` leaves the two slow steps out, so its median is slightly
# lower than the one in the figure.)

plots.step_times(
    dict(zip(("in the process", "four workers"), steps_ns, strict=True)),
    title="Step times of ResNet-50 on a V100 (case file)",
)

# %%
# Verdict
# -------
# The loader was the bottleneck. The prediction leaves out all waits for data.
# It is an upper bound, and the median step stayed below it. The bottleneck
# then moved, as expected after a successful fix: with four workers, the GPU
# waits mostly for launches.


# fold: How the shares are read


def waits_of(trace):
    """Share of the steps in which the GPU waits for data."""
    causes = pd.DataFrame(trace.verdict()["candidates"])
    shares = causes.set_index("bottleneck")["share_of_span"]
    return float(shares.get("input-pipeline", 0))


def before_first_ms(trace):
    """Time from the first step's start to the first GPU operation."""
    whole = trace.summary()
    return float((whole["window_ns"] - whole["span_ns"]) / 1e6)


busy_ns = alone.trace.summary()["busy_ns"]
waited = waits_of(alone.trace)

# %%
# Limits
# ------
# * Six steps of one program, recorded once under a profiler.
# * The rule for the pace assumes a core for every worker and a loader that
#   scales. A lock, a disk or a network link shared by all workers breaks that
#   assumption.
# * Nsight Systems does not show the workers. They are forked and never call
#   ``exec``, and such processes are traced only with
#   ``--trace-fork-before-exec``, which NVIDIA documents as able to deadlock.
#   We recognize starvation in the process that waits.
# * In ``for batch in loader:`` the wait is over *before* the body of the loop
#   begins. A range around the first lines of the body misses it; put the range
#   around ``next(it)``.

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
# On your own program:
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output starved -- python train.py
#    $ nsightkit gaps starved.sqlite
#    $ nsightkit whatif starved.sqlite no-input-wait
#    $ nsightkit calls starved.sqlite --os
#
# On a GPU, this page's script also trains a small language model with and
# without loader workers. Without a GPU it runs a tiny CPU version:
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
# 1. Which two steps of the second trace are slow, and is the loader the cause?
#    Use ``nsightkit steps``, then ``gaps`` and ``calls`` with ``--time``
#    around one of them, or open the timeline in Perfetto.
#
#    .. dropdown:: Answer
#
#       The first and the fifth, and in neither does the GPU wait for data. In
#       the first, one ``cudaMemcpyAsync`` takes most of the extra time. In the
#       fifth, the same number of launches leaves more than twice the idle time
#       between them: the CPU was slower. Workers may have taken cores from the
#       training process, but the trace does not show why.
#
# 2. ``nsightkit whatif workers-4.parquet`` lists other changes. Which one
#    would you make next, and would you expect its whole gain?
#
#    .. dropdown:: Answer
#
#       The first in the list. The replay assumes that nothing else changes, so
#       measure it, as we did here. :doc:`04_tiny_kernels` is about launches,
#       :doc:`03_hidden_synchronisation` about waiting calls.
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
# A small language model trains on sequences that are read and decompressed one
# by one: by the training process itself, then by twelve workers. The wait
# around ``next(it)`` is timed in every step, without a profiler.

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
    plots.stacks(
        {"no workers": idle(before), "with workers": idle(after)},
        quantity="time",
        title=f"GPU idle time by cause ({before.mode})",
    )
after

# %%

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
        f"Waiting took {wait_ns / before_ns:.0%} of a step without workers "
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
        f"Yes, for {waited:.0%} of the time: four loader workers made six "
        f"steps of ResNet-50 {whole_gain:.2f}x faster. The median step became "
        f"{step_gain:.2f}x faster, and the predicted limit is "
        f"{never_late:.2f}x. The GPU then mostly waits for launches."
    ),
    badge=alone.label,
    waited=waited,
    waits=waits_of(four.trace),
    first_ms=before_first_ms(four.trace),
    copies=float(alone.trace.memops()["total_ns"].sum() / busy_ns),
)
