"""
Are my kernels too small for this GPU?
======================================

A larger batch takes as long as a small one, and the GPU is idle for most of
the time. Is the program limited by launching its kernels, and what helps?

.. in-short::
"""

# %%
# The symptom
# -----------
# One forward pass of a transformer was recorded on an A100 at several batch
# sizes. Here is half a millisecond from the middle of the smallest one:

# record: 30 s
# sphinx_gallery_thumbnail_number = 1
from _lib import figures

from nsightkit import plots
from nsightkit.guide import case

passes = {n: case("a100-batch-size", f"batch-{n}") for n in (2, 16, 64, 128)}
half = passes[2].trace.summary()["span_ns"] // 2
plots.timeline(
    passes[2].trace,
    start_ns=half,
    end_ns=half + 500_000,
    title="Two samples on an A100 (case file)",
)
passes[2]

# %%
# The GPU finishes each kernel long before the next one arrives. Eager PyTorch
# behaves like this when code is written one small operation at a time, such as
# a hand-written norm or optimizer:
#
# .. code-block:: python
#
#    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
#    for p in parameters:
#        p.sub_(rate * p.grad)

# %%
# Predict: what does a larger batch cost?
# ---------------------------------------
# The CPU launches while the GPU runs, so a pass takes as long as all launches
# or all kernels, whichever is longer:


def pass_time(kernels, launch, run):
    """Time of a pass: one kernel is launched while others run."""
    return kernels * max(launch, run)


# %%
# The pass has some 550 kernels. A launch takes four microseconds, and a kernel
# takes one microsecond for every sixteen samples in the batch. How long is a
# pass with 2, 16, 64 and 128 samples?
#
# .. dropdown:: Answer
#
#    The launches need 2,200 microseconds at every size. So the first three
#    passes take that long, and at 64 samples the kernels become as long as the
#    launches. The pass with 128 takes 4,400 microseconds.
#
# Now guess for the real passes. Does the A100 take longer for 128 samples than
# for two?

# %%
# Evidence: how does the time grow with the batch?
# ------------------------------------------------
# One row per batch size. The last column is the speedup in a replay of the
# trace without launch overhead. It is inflated, because a profiler made every
# launch slower:

# fold: How the table is made
import pandas as pd

from nsightkit.analysis.core.causes import CAUSES

gain = "speedup without launch overhead (inflated)"


def described(batch, trace):
    """Time and bottleneck of one forward pass."""
    found = trace.summary()
    verdict = trace.verdict()
    return {
        "batch": batch,
        "kernels": found["kernel_count"],
        "pass (ms)": found["span_ns"] / 1e6,
        "GPU busy (ms)": found["busy_ns"] / 1e6,
        "busy": found["busy_ns"] / found["span_ns"],
        "bottleneck": CAUSES[verdict["bottleneck"]].name,
        "confidence": verdict["confidence"],
        gain: trace.whatif("free-launches")["speedup"].iloc[0],
    }


rows = [described(batch, one.trace) for batch, one in passes.items()]
table = pd.DataFrame(rows)
shown = dict.fromkeys(["pass (ms)", "GPU busy (ms)"], "{:.1f}")
plots.table(table, shown | {"busy": "{:.0%}", gain: "{:.2f}x"})

# %%
# The time does not follow the batch: the largest batch has the shortest pass.
# The GPU's own work grows with the batch, but the pass does not, because every
# pass launches about the same number of kernels one after the other. There is
# only one pass per size, so a spread of
# :measured:`04_tiny_kernels.spread:.0%` between the passes is not a trend.
#
# The next figure compares how long kernels run with the time from one launch
# to the next:


def lengths(trace):
    """Durations of kernels, and times from launch to launch."""
    kernels = trace.table("kernels", ["duration_ns"])["duration_ns"]
    calls = trace.table("calls", ["name", "start_ns", "thread"])
    calls = calls[calls["name"].str.contains("LaunchKernel")]
    calls = calls.sort_values(["thread", "start_ns"])
    return kernels, calls.groupby("thread")["start_ns"].diff().dropna()


small, launches = lengths(passes[2].trace)
large, _ = lengths(passes[128].trace)
figures.distributions(
    {
        "kernels, 2 samples": small,
        "kernels, 128 samples": large,
        "from launch to launch": launches,
    },
    title="Kernels and launches on an A100 (case file)",
)

# %%
# We call a kernel *tiny* if it ends before the next launch arrives. Nearly
# every kernel of the small batch is tiny. With 128 samples, enough kernels are
# longer for the CPU to get ahead.
#
# A launch interval of :measured:`04_tiny_kernels.launch_us:.0f` µs is long,
# because a profiler was recording every call. Without one, eager PyTorch needs
# a few microseconds per launch on a current CPU. The kernels then become the
# limit at a smaller batch.
#
# How many bytes does a tiny kernel move? An elementwise kernel runs for as
# long as its bytes need:

from nsightkit import hardware

card = hardware.find(passes[2].source["gpu"])
launch_ns = launches.median()
print(f"from launch to launch: {launch_ns / 1e3:.0f} µs in the median")
print(f"memory moves {card.gb_per_s * launch_ns / 1e6:.0f} MB in that time")
print(f"the L2 cache holds {card.l2_mb} MB")

# %%
# A kernel that moves fewer bytes than that waits for launches here. A kernel
# that moves more does not fit into the cache, so the memory's bandwidth is the
# right yardstick. Counting kernels does not answer the question: thousands of
# kernels that each run longer than a launch are limited by their own work.

# %%
# Can we trust the cause and the prediction?
# ------------------------------------------
# These traces are synthetic and never ran on a GPU, so we know the truth. Two
# chains launch kernels at the same rhythm. In one the kernels are shorter than
# the rhythm, in the other longer. A third trace holds the short ones in a
# single replay of a CUDA graph. Only the first should be idle. We also made
# the short chain with closely spaced launches, which gives its true speedup.

# fold: How they are made
from _lib import synthetic

count, every_ns, short_ns, long_ns = 2_000, 9_000, 2_000, 19_000


def chain(kernel_ns, every_ns=every_ns):
    """Kernels that are launched in turn and run as soon as they can."""
    events = synthetic.Events()
    free = 0
    for launched in range(every_ns, (count + 1) * every_ns, every_ns):
        begun = launched - every_ns // 2
        call = events.call("cudaLaunchKernel", begun, launched)
        start = max(launched + 1_500, free)
        free = start + kernel_ns
        events.kernel("elementwise", start, free, call)
    return events.trace()


def replay_of_a_graph():
    """All short kernels in one replay of a CUDA graph."""
    events = synthetic.Events()
    call = events.call("cudaGraphLaunch", 0, every_ns)
    first = every_ns + 1_500
    events.graph(first, first + count * short_ns, call)
    return events.trace()


known = {"shorter": chain(short_ns), "longer": chain(long_ns)}
known["graph"] = replay_of_a_graph()
closely = chain(short_ns, 3_000).summary()["span_ns"]

idle_ms = (count - 1) * (every_ns - short_ns) / 1e6
shorter_ns = known["shorter"].summary()["span_ns"]
truths = {"shorter": (idle_ms, shorter_ns / closely), "longer": (0.0, 1.0)}
truths["graph"] = (0.0, float("nan"))
rows = []
for name, trace in known.items():
    causes = trace.gaps().set_index("cause")["total_ns"]
    found = causes.get("launch-overhead", 0) / 1e6
    faster = trace.whatif("free-launches")["speedup"].iloc[0]
    idle, truth = truths[name]
    if name == "graph":
        faster = truth
    rows.append((name, idle, found, truth, faster))
names = ["synthetic trace", "idle, true (ms)", "idle, found (ms)"]
names += ["gain, true", "gain, predicted"]
shown = dict.fromkeys(names[1:], "{:.3f}")
plots.table(pd.DataFrame(rows, columns=names), shown, missing="not replayed")

# %%
# The last row explains why the profile of a compiled program can look empty.
# By default Nsight Systems records a graph replay as one interval without its
# kernels (``--cuda-graph-trace=node`` records them, at a cost per kernel). The
# GPU is busy all the same.

# %%
# Change one thing: more work per launch
# --------------------------------------
# The batch size was our change. Time per sample, from the smallest to the
# largest batch:

least, most = table.iloc[0], table.iloc[-1]
for one in (least, most):
    each_us = one["pass (ms)"] / one["batch"] * 1e3
    print(f"batch {one['batch']:3}: {each_us:8,.0f} µs per sample")

# %%
# Where the batch size is fixed, express the same computation in fewer
# operations:
#
# .. code-block:: diff
#
#    -x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
#    +x = F.rms_norm(x, weight.shape, weight, eps)
#    -optimizer = torch.optim.AdamW(parameters, foreach=False)
#    +optimizer = torch.optim.AdamW(parameters, fused=True)
#
# Where no fused operation exists, ``torch.compile`` generates one, and
# ``torch.compile(mode="reduce-overhead")`` records the remaining kernels as a
# CUDA graph that is launched in one call. The table shows what to expect: a
# lot for two samples, and little for the largest batch, whose kernels already
# fill most of the time.

# %%
# Verdict
# -------
# Launching was the limit up to 64 samples. At 128, the GPU is busy for
# :measured:`04_tiny_kernels.full_busy:.0%` of the pass: the two limits are
# about equal, and the verdict, which still names launches but with low
# confidence, is a toss-up. The floor under a pass is its number of kernels
# times the time from launch to launch. Fewer launches lower it; a faster GPU
# does not. The worked example ends in the same place
# (:ref:`step 6 <example-left>`): once its loader is fixed, launches limit it.

# %%
# Limits
# ------
# * One pass of each size, recorded under a profiler that inflates every
#   launch, and with it the predicted speedup. Without a profiler the floor is
#   lower, and a smaller batch fills the GPU.
# * Larger batches were published too. Those passes are dominated by a first
#   launch that loads its code, and none of the passes here has a warm-up.
# * The speedup without launch overhead is a bound: it keeps every kernel.
#   Fusing changes two things at once, launches and bytes. Step times alone
#   cannot separate them.
# * Short kernels are harmless where the CPU is far enough ahead: behind a long
#   kernel they wait in the queue, and their launches cost nothing.

# %%
# Run it yourself
# ---------------
# On a loop with this fault; save it as ``loop.py``:
#
# .. code-block:: python
#
#    from nsightkit.workloads import training
#
#    sizes = dict(hidden=256, layers=12, context=256, batch=1)
#    with training.run("cuda", tiny=True, **sizes) as loop:
#        for _ in range(50):
#            loop.step()
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output tiny -- python loop.py
#    $ nsightkit gaps tiny.sqlite
#    $ nsightkit whatif tiny.sqlite free-launches
#    $ nsightkit kernels tiny.sqlite --sort count
#
# On a GPU, this page's script also measures a training step with chains of
# small operations and with fused ones. Without a GPU it runs a tiny CPU
# version:
#
# .. code-block:: console
#
#    $ python examples/04_tiny_kernels.py

downloads = {f"{n} samples": one.trace for n, one in passes.items()}

# %%
# Exercises
# ---------
# 1. Use the table. At which batch size do kernels become the limit, if the
#    GPU's work keeps growing as it does from 64 samples to 128?
#
#    .. dropdown:: Answer
#
#       Near :measured:`04_tiny_kernels.full_at:.0f` samples. Beyond that the
#       pass grows with the batch, and a larger batch no longer makes a sample
#       cheaper.
#
# 2. Open the timelines of 2 and of 128 samples in Perfetto. How can you tell
#    from one kernel and its launch whether the CPU or the GPU is ahead?
#
#    .. dropdown:: Answer
#
#       Find the kernel with the launch's ``correlation``. With two samples it
#       starts at once, and the stream is empty before it. Behind the
#       long kernels of the large batch it starts much later: it was queued.
#
# 3. A trace has the same number of kernels, each twice as long as the time
#    from launch to launch. What would CUDA graphs gain?
#
#    .. dropdown:: Answer
#
#       Almost nothing, as in the synthetic trace with longer kernels.
#       ``nsightkit whatif TRACE free-launches`` predicts it before you try.

# %%
# Measured here
# -------------
# .. own-run::
#
# A training step of a small language model whose optimizer, norms and
# activation are chains of elementary operations, then the same step with fused
# ones.

from nsightkit.guide import headline, measure
from nsightkit.workloads import training

# Chains: 2,300 launches x 5 µs = 12 ms for the CPU. The GPU needs 6 ms for
# them: 19 GFLOP in fp32, and 2.5 µs for each kernel. Fused: 950 launches.
sizes = dict(vocabulary=4096, hidden=256, layers=12, heads=4)
sizes |= dict(context=256, batch=1, precision="fp32", workers=8)

before = measure(
    "tiny-kernels/before",
    training.run,
    gpu=dict(**sizes, tiny=True),
    small=dict(workers=0, tiny=True),
)
after = measure(
    "tiny-kernels/after",
    training.run,
    gpu=dict(**sizes, tiny=False),
    small=dict(workers=0, tiny=False),
)
before

# %%
# Phase by phase. Operators contain other operators, so there are more of them
# than launches.


# fold: How the phases are counted
def phases(run):
    """Median CPU time, and operators and kernels per step, by phase."""
    table = run.trace.ranges(match="^(forward|backward|optimizer)$")
    inside = []
    for name in table["name"]:
        inside.append(run.trace.within(f"^{name}$").size("ops"))
    return pd.DataFrame(
        {
            "phase": table["name"],
            "CPU (ms)": table["median_ns"] / 1e6,
            "operators": inside / table["count"],
            "kernels": table["kernel_count"] / table["count"],
        }
    )


both = pd.DataFrame()
if before and after:
    chains, fused = phases(before), phases(after)
    both = chains.merge(fused, on="phase", suffixes=(", chains", ", fused"))
plots.table(both, missing="no GPU") if len(both) else None

# %%

# fold: How the figures are drawn
if before and after:
    apart = abs(before.values("loss") - after.values("loss")).max()
    print(f"largest difference between the losses of a step: {apart:.2g}")
    plots.step_times(
        {
            "chains": before.values("step_ns"),
            "fused operations": after.values("step_ns"),
        },
        title=f"Step times ({after.mode})",
    )
if before.trace.recorded("kernels"):
    title = f"GPU idle time by cause ({before.mode})"
    plots.bars(before.trace.gaps(), title=title)
after

# %%

# fold: How the answer is put together
said = ""
if before and after:
    was, now = before.median("step_ns"), after.median("step_ns")
    on_gpu = before.trace.recorded("kernels")
    what = "kernels" if on_gpu else "operators"
    fewer = chains[what].sum() / fused[what].sum()
    said = (
        f"The chains need {fewer:.1f}x the {what}. A step takes "
        f"{was / 1e6:.1f} ms with them and {now / 1e6:.1f} ms without: "
        f"{was / now:.1f}x faster"
    )
    predicted = before.trace.whatif("free-launches")["speedup"].iloc[0]
    if pd.notna(predicted):
        said += f" (predicted without launch overhead: {predicted:.1f}x)"
    said += "."
grows = most["GPU busy (ms)"] - table["GPU busy (ms)"].iloc[-2]
room = least["pass (ms)"] - most["GPU busy (ms)"]
step = most["batch"] - table["batch"].iloc[-2]
pass_ms = table["pass (ms)"]
findings = headline(
    said,
    before,
    after,
    otherwise=(
        f"Yes, if they end before the next launch arrives. An A100 is busy "
        f"for {least['busy']:.0%} of a transformer's forward pass at the "
        f"smallest batch, which takes as long as the largest. A pass takes "
        f"{least['pass (ms)']:.0f} ms for {least['batch']} samples and "
        f"{most['pass (ms)']:.0f} ms for {most['batch']}: the time to launch "
        f"about {round(table['kernels'].mean(), -1):.0f} kernels. At the "
        f"largest batch the GPU is busy for {most['busy']:.0%} of it."
    ),
    badge=passes[2].label,
    full_at=most["batch"] + room / grows * step,
    launch_us=launch_ns / 1e3,
    spread=pass_ms.max() / pass_ms.min() - 1,
    full_busy=most["busy"],
)
