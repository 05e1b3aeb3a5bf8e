"""
Where does a training step go?
==============================

Ranges mark the phases of a step, and a profiler gives each a time. Which time
is that, and why do such tables so often name the wrong phase?

.. in-short::
"""

# %%
# The symptom: one step, four answers
# -----------------------------------
# The program marks three phases, and reads a value before the optimizer runs:
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
# Here is a step of it. The trace is synthetic: ``nsightkit.workloads.planted``
# wrote it, and it never ran on a GPU. So its truth is known, and it does what
# real steps do: forward is launched slowly, backward is launched quickly by a
# thread of autograd's, and has the longest kernels.

# sphinx_gallery_thumbnail_number = 1
# fold: How the step is planted
import tempfile
from pathlib import Path

import pandas as pd

import nsightkit
from nsightkit import plots
from nsightkit.analysis.timeline import phases
from nsightkit.workloads import planted

folder = tempfile.TemporaryDirectory()
out, process = planted.Export(), planted.Export.process(1)
main, autograd = planted.Export.thread(1, 1), planted.Export.thread(1, 2)
plan = {  # phase: launching thread, launches, time between, kernel, its name
    "forward": (main, 60, 25_000, 50_000, "128x256"),
    "backward": (autograd, 120, 10_000, 55_000, "256x128"),
    "optimizer": (main, 10, 10_000, 40_000, None),
}
gemm = "void cutlass::Kernel2<tensorop_bf16_s16816gemm_{}_nn>(T1::Params)"
adam = "void multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>(T1)"
now, free, planted_ns = 1_000, 0, {}
for phase, (thread, launches, every_ns, kernel_ns, tile) in plan.items():
    begin = now
    if phase == "optimizer":  # a value is read back first
        now = max(now, free) + 5_000
        out.synchronize("cudaStreamSynchronize", main, begin + 500, now)
    for _ in range(launches):
        now += every_ns
        call = out.call("cudaLaunchKernel", thread, now - 4_000, now)
        start = max(now + 1_500, free)
        free = start + kernel_ns
        name = gemm.format(tile) if tile else adam
        out.kernel(name, start, free, call, process)
    out.range(phase, main, begin, now + 100)
    now += 200
    planted_ns[phase] = launches * kernel_ns
out.range("step", main, 900, now)
synthetic = nsightkit.load(out.write(Path(folder.name, "step.sqlite")))

# %%

window = phases.summary(synthetic).set_index("phase")
thread = phases.summary(synthetic, rule="thread").set_index("phase")
plots.share_bars(
    {
        "planted": pd.Series(planted_ns),
        "CPU time": window["cpu_ns"],
        "GPU, rule window": window["gpu_ns"],
        "GPU, rule thread": thread["gpu_ns"],
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
#    Work for a GPU is only launched inside a range. On the CPU's clock a range
#    is the time to launch, and to wait. The optimizer begins with a value that
#    is read back, so it is charged with waiting for all work before it.
#
#    The last bar follows the rule by which Nsight Systems projects ranges to
#    the GPU: an operation belongs to the range in which the *same thread*
#    launched it. No range was open on autograd's thread, so backward seems to
#    cost nothing. PyTorch's own projection has the same blind spot. The rule
#    ``window`` also counts what threads without ranges of their own launched
#    while the range was open.
#
# Now a real program: the forward pass of a language model with 2.7 billion
# parameters on an A100. Its attention is written out as two matrix products
# with a softmax between them. A softmax has no matrix product. Which share of
# attention's time will the CPU's clock give to it, and which the GPU's?

# %%
# Evidence: two clocks on an A100
# -------------------------------
# The parts of attention in three passes, as the program's author marked them:

from nsightkit.investigations import case

annotated = case("a100-cuda-graphs", "eager-nvtx")
loop = annotated.trace.within("^benchmark_loop$")
ranges = loop.ranges().set_index("name")
names = ["computing attention scores", "computing softmax", "final matmul"]
parts = ranges.loc[names, ["total_ns", "gpu_ns"]]
shares = parts / parts.sum()
plots.share_bars(
    {"CPU time": parts["total_ns"], "GPU busy time": parts["gpu_ns"]},
    title="Attention among its parts, A100 (case file)",
)
annotated

# %%
# The CPU's clock gives most of it to softmax, the GPU's less than half. Did
# the CPU compute anything there? Here is each softmax of the loop by itself,
# in order, as a step of its own:

# fold: How the kernels of each softmax are found
import numpy as np

marked = loop["ranges"].query("name == 'computing softmax'")
marked = marked.sort_values("start_ns")
calls = loop["calls"][["correlation", "start_ns"]]
kernels = loop["kernels"][["correlation", "start_ns", "end_ns"]]
launched = kernels.merge(calls, on="correlation", suffixes=("", "_call"))
place = np.searchsorted(marked["start_ns"], launched["start_ns_call"]) - 1
ends = marked["end_ns"].to_numpy()[place]
inside = (place >= 0) & (launched["start_ns_call"] < ends)
ran = (launched["end_ns"] - launched["start_ns"])[inside]
plots.step_times(
    {
        "CPU time": marked["end_ns"] - marked["start_ns"],
        "GPU busy time": ran.groupby(place[inside]).sum(),
    },
    each="softmax",
    title="Each softmax of three passes, A100 (case file)",
)

# %%
# The GPU takes the same time for each. The CPU takes next to none at first: it
# launches, and runs ahead. Then the launch queue is full, and each launch
# waits until a place in it is free. The wait is charged to whichever range
# happens to launch then. It is the time that the GPU needs for earlier work.
#
# So the GPU's clock is the one that counts here. By kind of work:

work = loop.kernels(by="category")[["name", "count", "total_ns", "share"]]
work["a pass (ms)"] = work.pop("total_ns") / 3 / 1e6
plots.table(work, {"a pass (ms)": "{:.1f}"})

# %%
# Change one thing: compile
# -------------------------
# The author also compiled the model, into CUDA graphs:
#
# .. code-block:: diff
#
#    +model = torch.compile(model, mode="reduce-overhead")
#
# The table bounds what that can gain. The matrix products stay as they are;
# all else may be fused away at best. Launches cost nothing here, because the
# GPU is never without work. Both captures hold ten passes:

eager = case("a100-cuda-graphs", "eager").trace
graphs = case("a100-cuda-graphs", "graphs").trace
gemms = eager.kernels(by="category").set_index("name")["share"]["GEMM"]
fused = eager.summary()["span_ns"] / graphs.summary()["span_ns"]
free = eager.whatif("free-launches")["speedup"].iloc[0]
print(f"free launches, by replay: {free:.3f} times as fast")
print(f"only matrix products left: {1 / gemms:.3f} times as fast, at most")
print(f"compiled, measured: {fused:.3f} times as fast")

# %%
# Verdict
# -------
# Compiling took away most of what it could, which was little. Matrix products
# fill nine tenths of a pass, and :doc:`09_precision` shows which kind they
# are. The CPU's clock would have sent the author to the softmax.

# %%
# A table of phases is worth something only if nothing is missing from it. Its
# last row is what lies in no phase, so that the GPU's column adds up to its
# busy time. In the synthetic step, that row shows what the rule ``thread``
# misses:

# fold: How the table is made
table = pd.DataFrame(
    {
        "planted (ms)": pd.Series(planted_ns) / 1e6,
        "CPU (ms)": window["cpu_ns"] / 1e6,
        "GPU, rule window (ms)": window["gpu_ns"] / 1e6,
        "GPU, rule thread (ms)": thread["gpu_ns"] / 1e6,
    }
).reindex([*plan, phases.UNATTRIBUTED])
table = table.fillna({"planted (ms)": 0}).rename_axis("phase").reset_index()
plots.table(table, dict.fromkeys(table.columns[1:], "{:.3f}"))

# %%
# Limits
# ------
# * One capture each of somebody else's program: forward passes only, and three
#   of them with ranges. Nsight Systems recorded each graph as a whole, so what
#   is left inside the graphs is not known.
# * Compiling changes kernels and launches at once. That launches gain nothing
#   comes from the replay.
# * Where operations of two phases overlap on the GPU, the moment counts for
#   the one that began first. The rule ``window`` would err where two phases
#   are open at a time in one process.
# * Kinds of work are read from the names of kernels. Short names will not do:
#   many of CUTLASS's matrix products share one.

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
#    with lm.start("cuda", **sizes) as run:
#        for _ in range(20):
#            run.step()
#
# .. code-block:: console
#
#    $ nsightkit capture nsys --output step -- python loop.py
#    $ nsightkit ranges step.sqlite
#    $ nsightkit ranges step.sqlite --rule thread
#    $ nsightkit kernels step.sqlite --by category
#
# This page, which measures with a GPU and else runs small on the CPU, also
# under Nsight Systems, where nsys is on the ``PATH`` or ``NSIGHTKIT_NSYS``
# names it:
#
# .. code-block:: console
#
#    $ python examples/07_where_a_step_goes.py

downloads = {
    "one step, synthetic": synthetic,
    "three passes with ranges, case file": loop,
}

# %%
# Exercises
# ---------
# 1. By how much could the best possible attention kernel speed up a pass?
#
#    .. dropdown:: Answer
#
#       Its parts take :measured:`07_where_a_step_goes.attention:.1%` of the
#       loop's busy time. Without any of it the pass would be
#       :measured:`07_where_a_step_goes.without:.2f` times as fast.
#
# 2. Open the three passes in Perfetto. At which softmax of the first pass does
#    the CPU begin to wait, and how many kernels had it launched by then that
#    were not done?
#
#    .. dropdown:: Answer
#
#       After :measured:`07_where_a_step_goes.ahead:.0f` of them the range
#       becomes long. By then :measured:`07_where_a_step_goes.queued:,.0f`
#       kernels were launched and had not ended: that is how long the queue is.
#
# 3. In your own profile, the optimizer is the longest phase. What do you check
#    before you speed it up?
#
#    .. dropdown:: Answer
#
#       Whether the column is the CPU's, and whether the phase begins with a
#       call that waits. ``nsightkit ranges`` prints both clocks.

# %%
# Measured here
# -------------
# .. own-run::
#
# A training step of a language model, phase by phase, and attention part by
# part, first with its scores written out, then fused in one operator. A matrix
# product in the forward pass needs two in the backward pass, so that should
# take twice as long.

# fold: How the expectation is worked out
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.analysis.timeline import ranges as named
from nsightkit.analysis.timeline import steps
from nsightkit.configurations import Configuration
from nsightkit.investigations import headline, measure

SIZES = ["batch", "context", "d_model", "layers", "d_ff", "heads"]
SIZES += ["vocabulary"]


def flops(sizes):
    """FLOPs of the phases of a step, and of attention's forward parts."""
    chosen = {name: sizes[name] for name in SIZES}
    model = Configuration("this page's", **chosen, intent="one step")
    cost = envelope(model)
    by_phase = {
        "forward": cost.fwd_flops,
        "backward": cost.train_flops - cost.fwd_flops,
        "optimizer": 12 * cost.params,
    }
    projection = 2 * model.layers * model.tokens * model.d_model**2
    by_part = {
        "qkv_projections": 3 * projection,
        "rope": 0,  # no matrix products in this one
        "qk_mask": cost.attention_flops / 2,
        "softmax": 0,  # nor in this one
        "attention_v": cost.attention_flops / 2,
        "output_projection": projection,
    }
    return pd.Series(by_phase), pd.Series(by_part)


before = measure("training-step", "before")
after = measure("training-step", "after")
expected, expected_parts = flops(before.parameters)
before

# %%
# The phases on either clock. The last row is what lies in no phase.


# fold: How the table is made
def per_step(run):
    """Phases with their CPU and GPU time in a mean step."""
    found, count = phases.summary(run.trace), len(steps.find(run.trace))
    return pd.DataFrame(
        {
            "phase": found["phase"],
            "CPU (ms)": found["cpu_ns"] / count / 1e6,
            "GPU (ms)": found["gpu_ns"] / count / 1e6,
            "kernels": found["kernel_count"] / count,
            "share of GPU busy": found["share_of_busy"],
        }
    )


def attention(run):
    """CPU and GPU time of attention's marked parts in a mean step."""
    marks = [*expected_parts.index[:4], "sdpa", *expected_parts.index[4:]]
    found = named.summary(run.trace, match=f"^({'|'.join(marks)})$")
    found = found.set_index("name")[["total_ns", "gpu_ns", "kernel_count"]]
    ordered = [name for name in marks if name in found.index]
    return found.loc[ordered] / len(steps.find(run.trace))


plots.table(per_step(before), missing="no GPU")

# %%
# Time of phases and step times, with either attention:

# fold: How the figures are drawn
on_gpu = all(run.trace.recorded("kernels") for run in (before, after))
clock = "gpu_ns" if on_gpu else "cpu_ns"
mean = []
for run in (before, after):
    found = phases.summary(run.trace)
    found[clock] = (found[clock] / len(steps.find(run.trace))).astype(float)
    mean.append(found)
plots.before_after(
    *mean,
    key="phase",
    value=clock,
    labels=("written out", "fused"),
    title=f"Phases with either attention ({after.mode})",
    axis="GPU busy time a step" if on_gpu else "CPU time a step",
)
steps_ns = (before.values("step_ns"), after.values("step_ns"))
plots.step_times(
    dict(zip(("written out", "fused"), steps_ns, strict=True)),
    title=f"Step times with either attention ({after.mode})",
)
after

# %%
# **Cross-check with Nsight Systems.** PyTorch's profiler and Nsight Systems
# learn of kernels from the same place, the driver, and of everything else in
# ways of their own. So what the GPU did should agree, but for what differs
# from run to run. What the CPU did need not agree, because PyTorch's profiler
# records each operator, which takes time.

# fold: How they are compared
from nsightkit.analysis.compare import two_tools

tools = {"torch.profiler": before.trace}
if before.nsys_trace is None:
    why = before.nsys_notice or "this part does not ask for it"
    print(f"PyTorch's profiler alone; not Nsight Systems: {why}.")
else:
    tools["Nsight Systems"] = before.nsys_trace


def beside(compared):
    """A comparison with its times in milliseconds."""
    shown, (one, other) = compared.copy(), compared.columns[4:6]
    time = shown["figure"].str.endswith("_ns")
    shown["figure"] = shown["figure"].str.replace("_ns", " (ms)")
    shown["figure"] = shown["figure"].str.replace("_", " ")
    for tool in (one, other):
        shown[tool] = shown[tool].where(~time, shown[tool] / 1e6)
    return plots.table(shown, {"difference": "{:+.1%}"})


compared = two_tools.compare(tools, top=4) if len(tools) == 2 else None
beside(compared) if compared is not None else None

# %%
# What the two runs say. As expected means within a fifth:

# fold: How the answer is put together
spent = phases.summary(before.trace).set_index("phase")[clock]
ratio = float(spent["backward"] / spent["forward"])
wanted = float(expected["backward"] / expected["forward"])
fits = "as" if abs(ratio / wanted - 1) < 0.2 else "not as"
took = attention(before)["gpu_ns" if on_gpu else "total_ns"]
took = took.reindex(expected_parts.index).astype(float).fillna(0)
over = took / max(took.sum(), 1) - expected_parts / expected_parts.sum()
most = over.idxmax()
was, after_ns = before.median("step_ns"), after.median("step_ns")
said = (
    f"backward takes {ratio:.1f} times as long as forward, {fits} expected "
    f"from FLOPs ({wanted:.1f}); of attention's forward time {most} takes "
    f"{took[most] / max(took.sum(), 1):.0%}, of its FLOPs "
    f"{expected_parts[most] / expected_parts.sum():.0%}; a step takes "
    f"{was / 1e6:.1f} ms with scores written out, {after_ns / 1e6:.1f} ms "
    "fused."
)

softmax = shares.loc["computing softmax"]
whole_attention = parts["gpu_ns"].sum() / loop.summary()["busy_ns"]
late = (marked["end_ns"] - marked["start_ns"]).to_numpy() > 1_000_000
begun = marked["start_ns"].iloc[late.argmax()]
waiting = (launched["start_ns_call"] < begun) & (launched["end_ns"] > begun)
findings = headline(
    said,
    before,
    after,
    otherwise=(
        "in a language model on an A100, softmax takes "
        f"{softmax['total_ns']:.0%} of attention's time by the CPU's clock "
        f"and {softmax['gpu_ns']:.0%} by the GPU's. Matrix products fill "
        f"{gemms:.0%} of a pass, so compiling it could gain "
        f"{1 / gemms:.2f} times at most; it gained {fused:.2f}."
    ),
    badge=annotated.label,
    attention=whole_attention,
    without=1 / (1 - whole_attention),
    ahead=float(late.argmax()),
    queued=float(waiting.sum()),
)
