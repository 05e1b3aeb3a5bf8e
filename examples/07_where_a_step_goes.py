"""
Why does the profiler blame the wrong phase?
============================================

Ranges mark the phases of a step, and a profiler gives each a time. Which
clock is that time from, and why do such tables so often blame the wrong
phase?

.. in-short::
"""

# %%
# The symptom: one step, four answers
# -----------------------------------
# The program marks three phases and reads a value before the optimizer runs:
#
# .. code-block:: python
#
#    with nvtx.annotate("forward"):
#        loss = model(batch)
#    with nvtx.annotate("backward"):
#        loss.backward()
#    with nvtx.annotate("optimizer"):
#        log(norm.item())
#        optimizer.step()
#
# Here is one step of it. The trace is synthetic and never ran on a GPU, so we
# know the truth. It behaves like a real step. Forward is launched slowly.
# Backward is launched quickly, from autograd's own thread, and has the longest
# kernels.

# sphinx_gallery_thumbnail_number = 2
# record: 90 s
# fold: How the step is made and drawn
import pandas as pd
from _lib import two_clocks

from nsightkit import plots
from nsightkit.analysis.timeline import phases
from nsightkit.guide import case, headline, measure
from nsightkit.workloads import lm

one_step, true_ns = two_clocks.one_step()
window = phases.summary(one_step).set_index("phase")
thread = phases.summary(one_step, rule="thread").set_index("phase")
plots.stacks(
    {
        "truth": pd.Series(true_ns),
        "CPU time": window["cpu_ns"],
        "GPU, all threads": window["gpu_ns"],
        "GPU, same thread only": thread["gpu_ns"],
    },
    title="One step, four answers (synthetic)",
)

# %%
# Predict: what does each clock show?
# -----------------------------------
# Why is the optimizer the longest phase on the CPU's clock, and where has
# backward gone in the last bar?
#
# .. dropdown:: Answer
#
#    Inside a range the CPU only launches work for the GPU. On the CPU's clock
#    a range is the time to launch and to wait. The optimizer starts by reading
#    a value back, so it is charged with waiting for all work before it.
#
#    The last bar follows the rule by which Nsight Systems projects ranges to
#    the GPU: an operation belongs to the range in which the *same thread*
#    launched it. No range was open on autograd's thread, so backward seems to
#    cost nothing. PyTorch's own projection has the same blind spot. The bar
#    above it also counts the launches of threads without ranges while the
#    range was open, which is what ``nsightkit ranges`` does by default.
#
# Now a real program: the forward pass of a language model with 2.7 billion
# parameters on an A100. Its attention is unfused: two matmuls with a softmax
# between them. Which share of attention's time will the CPU's clock give to
# the softmax, and which the GPU's?

# %%
# Evidence: how far apart are the two clocks on an A100?
# ------------------------------------------------------
# The parts of attention in three passes, as the program's author marked them:

annotated = case("a100-cuda-graphs", "eager-nvtx")
loop = annotated.trace.within("^benchmark_loop$")
ranges = loop.ranges().set_index("name")
names = ["computing attention scores", "computing softmax", "final matmul"]
parts = ranges.loc[names, ["total_ns", "gpu_ns"]]
shares = parts / parts.sum()
plots.stacks(
    {"CPU time": parts["total_ns"], "GPU busy time": parts["gpu_ns"]},
    title="Where attention's time goes, A100 (case file)",
)
annotated

# %%
# The CPU's clock gives softmax most of the time, the GPU's clock less than
# half. Was the CPU computing something? To find out, we plot each softmax of
# the loop by itself, in order:

# fold: How the kernels of each softmax are found
softmaxes = two_clocks.instances(loop, "computing softmax")
plots.step_times(
    {
        "CPU time": softmaxes.cpu_ns,
        "GPU busy time": softmaxes.gpu_ns,
    },
    each="softmax",
    title="Each softmax of three passes, A100 (case file)",
)

# %%
# The GPU takes the same time for each softmax. The CPU needs almost no time at
# first: it launches and runs ahead. After
# :measured:`07_where_a_step_goes.ahead:.0f` of them the launch queue is full,
# and each launch waits until a place is free. The wait is charged to the range
# that happens to be launching, though it is the time that the GPU needs for
# earlier work. That work explains the two upper levels of the CPU's dots. At
# the lower one the GPU finishes two short matmuls of earlier layers during the
# range; at the higher one it finishes a single long one. The level changes
# where the CPU or the GPU moves on to the next pass.
#
# So the GPU's clock is the right one here. By kind of work:

work = loop.kernels(by="category")[["name", "count", "total_ns", "share"]]
work["per pass (ms)"] = work.pop("total_ns") / 3 / 1e6
plots.table(work, {"share": "{:.1%}", "per pass (ms)": "{:.1f}"})

# %%
# Change one thing: compile
# -------------------------
# The author also compiled the model into CUDA graphs:
#
# .. code-block:: diff
#
#    +model = torch.compile(model, mode="reduce-overhead")
#
# The table bounds the gain. Matmuls stay; fusion could at most remove the
# rest. Launches cost nothing here, because the GPU never runs out of work.
# Both captures hold ten passes:

eager = case("a100-cuda-graphs", "eager").trace
graphs = case("a100-cuda-graphs", "graphs").trace
gemms = eager.kernels(by="category").set_index("name")["share"]["GEMM"]
fused = eager.summary()["span_ns"] / graphs.summary()["span_ns"]
free = eager.whatif("free-launches")["speedup"].iloc[0]
print(f"without launch overhead (replay): {free:.3f}x faster")
print(f"only the matmuls left: {1 / gemms:.3f}x faster, at most")
print(f"compiled, measured: {fused:.3f}x faster")

# %%
# Verdict
# -------
# The GPU's clock names the matmuls, which fill over ninety percent of a pass.
# The CPU's clock would have sent the author to the softmax. Compiling made a
# pass :measured:`07_where_a_step_goes.compiled:.2f`\ x faster, of a possible
# :measured:`07_where_a_step_goes.bound:.2f`\ x. :doc:`09_precision` shows
# which unit the matmuls run on. The chapter :doc:`/guide/timeline` reads a
# training step in the same way, row by row.

# %%
# A table of phases is useful only if it is complete. Its last row is the time
# outside all phases, so that the GPU column adds up to the GPU's busy time. In
# the synthetic step, which never ran on a GPU, that row shows how much the
# same-thread rule misses:

# fold: How the table is made
table = pd.DataFrame(
    {
        "true (ms)": pd.Series(true_ns) / 1e6,
        "CPU (ms)": window["cpu_ns"] / 1e6,
        "GPU, all threads (ms)": window["gpu_ns"] / 1e6,
        "GPU, same thread only (ms)": thread["gpu_ns"] / 1e6,
    }
).reindex([*true_ns, phases.UNATTRIBUTED])
table = table.fillna({"true (ms)": 0}).rename_axis("phase").reset_index()
plots.table(table, dict.fromkeys(table.columns[1:], "{:.3f}"))

# %%
# Limits
# ------
# * One capture each of a program that we did not write: forward passes only,
#   three of them with ranges. Nsight Systems recorded each graph as a whole,
#   so we cannot see inside the graphs.
# * Compiling changes kernels and launches at once. The replay shows that
#   cheaper launches alone gain nothing.
# * Where operations of two phases overlap on the GPU, the moment counts for
#   the phase that started first. Counting all threads would be wrong where
#   two phases are open at once in one process.
# * We read the kind of work from kernel names. Short names are not enough:
#   many CUTLASS GEMMs share one.

# %%
# Run it yourself
# ---------------
# On a model with such ranges; save it as ``loop.py``:
#
# .. code-block:: python
#
#    from nsightkit.workloads import lm
#
#    sizes = dict(d_model=1024, layers=12, d_ff=4096, heads=16, batch=8)
#    sizes |= dict(attention="naive", annotate_mha=True)
#    with lm.run("cuda", **sizes) as loop:
#        for _ in range(20):
#            loop.step()
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output step -- python loop.py
#    $ nsightkit ranges step.sqlite
#    $ nsightkit ranges step.sqlite --rule thread
#    $ nsightkit kernels step.sqlite --by category
#
# On a GPU, this page's script also measures a training step with unfused and
# with fused attention, once more under Nsight Systems if nsys is on the
# ``PATH`` or in ``NSIGHTKIT_NSYS``. Without a GPU it runs a tiny CPU version:
#
# .. code-block:: console
#
#    $ python examples/07_where_a_step_goes.py

downloads = {
    "one step, synthetic": one_step,
    "three passes with ranges, case file": loop,
}

# %%
# Exercises
# ---------
# 1. By how much could the best possible attention kernel speed up a pass?
#
#    .. dropdown:: Answer
#
#       Attention takes :measured:`07_where_a_step_goes.attention:.1%` of the
#       loop's busy time. Without it the pass would be
#       :measured:`07_where_a_step_goes.without:.2f`\ x faster.
#
# 2. Open the three passes in Perfetto. At which softmax of the first pass does
#    the CPU start to wait, and how many launched kernels had not finished by
#    then?
#
#    .. dropdown:: Answer
#
#       After :measured:`07_where_a_step_goes.ahead:.0f` of them the range
#       becomes long. By then :measured:`07_where_a_step_goes.queued:,.0f`
#       kernels were launched and had not ended: that is the length of the
#       queue.
#
# 3. In your own profile, the optimizer is the longest phase. What do you check
#    before you speed it up?
#
#    .. dropdown:: Answer
#
#       Whether the column is the CPU's, and whether the phase starts with a
#       call that waits. ``nsightkit ranges`` prints both clocks.

# %%
# Measured here
# -------------
# .. own-run::
#
# A training step of a language model with unfused and with fused attention.
# With the unfused one we expect backward to take between 1.6 and 1.7 forward
# passes: each matmul needs two in the backward pass, softmax and loss one.

# 8,192 tokens: 12.8 TFLOP, or 30 to 40 ms. Written out, attention makes a
# matrix of 134 M scores in each layer. That is 537 MB in fp32, which about ten
# kernels read or write in either direction: 12 ms more in the forward pass
# and 25 ms more in the backward pass.
sizes = dict(vocabulary=32_000, d_model=1024, layers=12, d_ff=4096, heads=16)
sizes |= dict(context=1024, batch=8, precision="bf16")
small = dict(vocabulary=512, d_model=128, layers=2, d_ff=384, heads=4)
small |= dict(context=256, batch=2, precision="fp32")
how = dict(mode="train", annotate_mha=True)

before = measure(
    "training-step/before",
    lm.run,
    gpu=dict(**sizes, **how, attention="naive"),
    small=dict(**small, **how, attention="naive"),
    profile="nsys",
)
after = measure(
    "training-step/after",
    lm.run,
    gpu=dict(**sizes, **how, attention="sdpa"),
    small=dict(**small, **how, attention="sdpa"),
    profile="nsys",
)
before

# %%
# The table has the phases of the unfused run on both clocks.

# fold: How the table and the figures are made
runs = {"unfused": before, "fused": after}
on_gpu = before.trace.recorded("kernels")
shown = pd.DataFrame()
if before and after:
    shown = two_clocks.per_step(before.trace)
    plots.stacks(
        {name: two_clocks.phase_ns(run) for name, run in runs.items()},
        quantity="time",
        title=f"Phases with either attention ({after.mode})",
        axis="GPU busy time per step" if on_gpu else "CPU time per step",
    )
    plots.step_times(
        {name: run.values("step_ns") for name, run in runs.items()},
        title=f"Step times with either attention ({after.mode})",
    )
plots.table(shown, missing="no GPU") if len(shown) else None

# %%
# The same phases by two profilers. GPU times should agree; CPU times need not,
# because PyTorch's profiler records each operator, which takes time.

compared = two_clocks.two_profilers(before)
plots.table(compared) if len(compared) else None

# %%

# fold: How the answer is put together
softmax = shares.loc["computing softmax"]
whole_attention = parts["gpu_ns"].sum() / loop.summary()["busy_ns"]
findings = headline(
    two_clocks.answer(before, after) if before and after else "",
    before,
    after,
    otherwise=(
        "Because its ranges are timed on the CPU's clock, which shows "
        "launches and waits. In a language model on an A100, softmax takes "
        f"{softmax['total_ns']:.0%} of attention's time on the CPU's clock "
        f"and {softmax['gpu_ns']:.0%} on the GPU's. Matmuls fill "
        f"{gemms:.0%} of a pass, so compiling could make it at most "
        f"{1 / gemms:.2f}x faster; it made it {fused:.2f}x faster."
    ),
    badge=annotated.label,
    attention=whole_attention,
    without=1 / (1 - whole_attention),
    ahead=softmaxes.ahead,
    queued=softmaxes.queued,
    compiled=float(fused),
    bound=1 / gemms,
)
