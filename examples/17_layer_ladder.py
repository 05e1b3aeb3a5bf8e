"""
Flash attention, compile, CUDA graphs: which one pays?
======================================================

Every list of tips for a slow transformer has the same entries. Each is worth
a lot in one program and nothing in the next. Which one does yours need?

.. in-short::
"""

# %%
# The symptom: three transformers, one list of tips
# -------------------------------------------------
# TimeSformer, a video model with unfused attention, and Qwen with flash
# attention, both in bf16 on an H100; and a language model of 2.7 billion
# parameters in fp32 on an A100. Their authors published the traces
# (:doc:`/case_sources`). Where does each spend the time of its kernels?

# record: 400 s
# sphinx_gallery_thumbnail_number = 1
# fold: How the traces are opened, and the figure is drawn
import pandas as pd
from _lib import climb, figures, published

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import sol
from nsightkit.guide import case, headline, measure
from nsightkit.workloads import layer

video = case("odd-tokens", "timesformer-h100")
qwen = case("two-cards", "qwen-h100")
marked = case("a100-cuda-graphs", "eager-nvtx")
programs = {
    "TimeSformer": video.trace,
    "Qwen": qwen.trace.last_steps(1),
    "2.7 B model": marked.trace.within("^benchmark_loop$"),
}
kinds = {
    name: trace.kernels(by="category").set_index("name")["total_ns"]
    for name, trace in programs.items()
}
plots.stacks(kinds, title="Kernel time of three transformers (case file)")

# %%
# Predict: which tip pays where?
# ------------------------------
# Flash attention replaces the matmuls and the softmax of attention with one
# kernel. ``torch.compile`` fuses elementwise operations, norms and copies. A
# CUDA graph removes the waits for launches. A fourth tip, TF32, runs fp32
# matmuls on tensor cores. For each program: which tip could gain most?
#
# .. dropdown:: Answer
#
#    Flash attention for TimeSformer: softmax alone takes
#    :measured:`17_layer_ladder.softmax:.0%` of its kernel time. ``compile``
#    for Qwen, whose attention is already fused and takes
#    :measured:`17_layer_ladder.qwen_attention:.0%`. TF32 for the third
#    program: fp32 matmuls take :measured:`17_layer_ladder.gemms:.0%` of its
#    time.

# %%
# Evidence: how much could each tip gain?
# ---------------------------------------
# If a part took no time, how much faster would all kernels be? For a part with
# a share *s* of the time the answer is 1 / (1 - *s*). No real kernel is free,
# so each number is an upper bound. For the last two rows we replay each trace
# without launch overhead, and the third program with its fp32 matmuls faster
# by the ratio of the datasheet's rates:

# fold: How the table is made
NAMES = {
    "aten::_softmax 8x12": "softmax",
    "aten::bmm 96x3137x64": "scores",
    "aten::bmm 96x3137x3137": "scores x values",
    "aten::mul 8x12": "scale",
}
judged = video.trace.sol()
parts = published.one_by_one(judged, NAMES)
inside = programs["2.7 B model"].within("scaled dot product attention")
attention_ns = {
    "TimeSformer": parts["time_ns"].sum(),
    "Qwen": kinds["Qwen"]["attention"],
    "2.7 B model": inside.kernels()["total_ns"].sum(),
}
bounds = {}
a100 = hardware.find("A100")
faster = a100.peak("tf32").tflops / a100.peak("fp32").tflops
eager = case("a100-cuda-graphs", "eager").trace
in_tf32 = eager.whatif(scale=f"sgemm={1 / faster}")["speedup"].iloc[0]
for name, trace in programs.items():
    kernels_ns = kinds[name].sum()
    kept_ns = kinds[name].reindex(["GEMM", "attention"]).sum()
    bounds[name] = {
        "flash attention": kernels_ns / (kernels_ns - attention_ns[name]),
        "compile": kernels_ns / kept_ns,
        "CUDA graph": trace.whatif("free-launches")["speedup"].iloc[0],
        "TF32": in_tf32 if name == "2.7 B model" else 1,
    }
table = pd.DataFrame(bounds).rename_axis("at most, with").reset_index()
plots.table(table, dict.fromkeys(bounds, "{:.2f}x"))

# %%
# :measured:`17_layer_ladder.crossed` of the twelve cells promise ten percent
# at most, so we can cross them out. TimeSformer's
# :measured:`17_layer_ladder.video_compile:.2f`\ x for ``compile`` is mostly
# the softmax, which flash attention removes along with its matmuls. Qwen is
# the opposite case: its norms and rotary embedding are written as chains of
# small operations, and :measured:`17_layer_ladder.small:.0%` of the kernel
# time is in them.

# %%
# Change one thing: does the bound hold?
# --------------------------------------
# The author of the third program made one of these changes and captured it:
#
# .. code-block:: diff
#
#    +model = torch.compile(model, mode="reduce-overhead")
#
# This fuses small operations and records CUDA graphs, so the table allows
# :measured:`17_layer_ladder.allowed:.3f`\ x at most. Both captures hold ten
# forward passes:

graphs = case("a100-cuda-graphs", "graphs").trace
spans_ms = [trace.summary()["span_ns"] / 1e7 for trace in (eager, graphs)]
compiled = spans_ms[0] / spans_ms[1]
print("{:.0f} ms, compiled {:.0f} ms per pass".format(*spans_ms))
print(f"measured: {compiled:.3f}x faster")
marked

# %%
# The bound holds, and the change came close to it. This program needs the
# table's last row instead, because its matmuls run in fp32, without tensor
# cores (:doc:`09_precision`).

# %%
# Do fewer kernels make a faster step?
# ------------------------------------
# The table counts kernels. A step also waits for its CPU. Suppose that all of
# Qwen's kernels took no time:

free = programs["Qwen"].whatif(scale=".=0.001").iloc[0]
print(f"step: {free['wall_ns'] / 1e6:.1f} ms")
print(f"with free kernels: {free['predicted_ns'] / 1e6:.1f} ms")
qwen

# %%
# The CPU needs nearly the whole step to launch
# :measured:`17_layer_ladder.launched:,.0f` kernels. (A profiler slowed it, so
# an unprofiled step waits less.) Fused kernels alone would leave the GPU idle.
# ``mode="reduce-overhead"`` removes the launches too: we predict that the two
# tips pay only together, which has not been measured.
# :doc:`10_ten_configurations` asks this of other traces.

# %%
# Verdict
# -------
# The tip that pays is the one whose kernels take most of the time. It was a
# different one in each program. Before you change a line, sum up your
# kernels by kind. Softmax and the matmuls around it call for flash attention,
# elementwise kernels and copies for ``compile``, waits between kernels for a
# CUDA graph, and fp32 matmuls for TF32 or bf16. 1 / (1 - *s*) is the most that
# any of them can gain.

# %%
# Limits
# ------
# * One capture each of programs that we did not write. Only ``compile`` was
#   tried, on one of them.
# * A bound is the most that a change can gain. A change can exceed it by a
#   side effect, such as a higher clock.
# * Traces of PyTorch's profiler slow the CPU, so waits for launches look
#   longer than they are.
# * TF32 also changes the results: it rounds inputs to ten bits of mantissa
#   (:doc:`09_precision`).

# %%
# Run it yourself
# ---------------
# Which bar is longest, and what would be left without it?
#
# .. code-block:: console
#
#    $ nsightkit kernels trace.json.gz --by category
#    $ nsightkit whatif trace.json.gz --without 'softmax|elementwise'
#    $ nsightkit whatif trace.json.gz free-launches
#
# On a GPU, this page's script also measures one layer with one tip after the
# other. Without a GPU it runs a tiny CPU version:
#
# .. code-block:: console
#
#    $ python examples/17_layer_ladder.py

downloads = {"TimeSformer on an H100": video.trace}
downloads |= {"Qwen on an H100": qwen.trace}

# %%
# Exercises
# ---------
# 1. Flash attention is not free. At its own bound on an H100, how much faster
#    would all of TimeSformer's kernels be?
#
#    .. dropdown:: Answer
#
#       The four operators take :measured:`17_layer_ladder.attention:.0%` of
#       the kernel time. One fused operator at its bound would leave all
#       kernels :measured:`17_layer_ladder.with_sdpa:.1f`\ x faster. No
#       attention kernel reaches its bound, so expect less.
#
# 2. TimeSformer's step takes much longer than its kernels. Is flash attention
#    worth as much for the step?
#
#    .. dropdown:: Answer
#
#       No. ``nsightkit verdict`` reports one long idle time before the
#       kernels. A change to kernels leaves that as it is. It happened
#       once, so look at a second step before you decide.
#
# 3. A colleague reports a layer at :measured:`17_layer_ladder.goal:.0%`. What
#    do you ask?
#
#    .. dropdown:: Answer
#
#       Of what: the datasheet, or a ceiling measured on that card, at which
#       clock? Is causal attention counted as half? And does the result still
#       match float64?

# fold: The arithmetic behind the first answer
h100 = sol.datasheet(hardware.find("H100 SXM"))
video_ns = kinds["TimeSformer"].sum()
fused = sol.attention_cost(8, 12, 3137, 64, causal=False)
left_ns = video_ns - attention_ns["TimeSformer"] + 12 * h100.bound_ns(fused)

# %%
# Measured here
# -------------
# .. own-run::
#
# A layer of a language model, from unfused to compiled and in fp8, each change
# beside the most that the layer's bounds allow. Results are checked against
# float64.

# A layer's 0.86 TFLOP take an H100 at least 1.2 ms, and its 45 launches the
# CPU 0.2 ms. Three layers, so that no weight waits in the cache.
sizes = dict(batch=1, context=2048, hidden=4096, heads=32, d_ff=11_008)
little = dict(batch=1, context=64, hidden=128, heads=4, d_ff=352)
runs = {}
for rung in layer.RUNGS["prefill"]:
    how = dict(mode="prefill", rung=rung)
    runs[rung] = measure(
        f"ladder/{rung}",
        layer.run,
        gpu=dict(**sizes, **how, layers=3),
        small=dict(**little, **how, layers=2),
        steps=100,
        warmup=300,
    )
roofs = climb.ceilings("bf16", "fp32", "fp8", "copy")
runs["unfused"]

# %%

# fold: How the figures are made
GOAL = 0.85
against = climb.bounds("prefill", runs["unfused"], roofs)
rungs = climb.table(runs, against)
changes = climb.changes(runs, against)
if against.best:
    whole_ns = climb.list_ns(against.listed, against.best)
    figures.ladder(
        climb.predicted("prefill", sizes, against.best),
        {f"{GOAL:.0%} of the list": whole_ns / GOAL},
        rungs["time_ns"],
        title="The ladder, predicted and measured",
    )
plots.table(changes) if len(changes) else None

# %%
CHECKED = ["rung", "speedup", "relative_error", "sm_clock_mhz"]
plots.table(rungs[CHECKED]) if len(rungs) else None

# %%

# fold: How the answer is put together
said = climb.answer("a layer", rungs, changes)
if against.ceilings and len(rungs):
    reached = rungs["sol_measured"].max() >= GOAL
    said += f" The goal of {GOAL:.0%} of the measured ceilings is "
    said += "reached." if reached else "not reached."
shares = {name: times / times.sum() for name, times in kinds.items()}
flash, fusing = "flash attention", "compile"
third = bounds["2.7 B model"]
findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"The one that removes the most kernel time, if the CPU can keep up. "
        f"Flash attention would cut TimeSformer's kernel time by at most "
        f"{bounds['TimeSformer'][flash]:.1f}x. Qwen's would shrink by at "
        f"most {bounds['Qwen'][fusing]:.1f}x with torch.compile, but then "
        f"Qwen waits for launches. A model in fp32 on an A100 needs TF32 (up "
        f"to {third['TF32']:.1f}x). There torch.compile could gain "
        f"{third[fusing]:.3f}x, and its author got {compiled:.3f}x."
    ),
    badge="case files, NVIDIA H100 and A100",
    softmax=shares["TimeSformer"]["softmax"],
    crossed=int((pd.DataFrame(bounds) < 1.105).sum(axis=None)),
    attention=attention_ns["TimeSformer"] / video_ns,
    qwen_attention=shares["Qwen"]["attention"],
    gemms=shares["2.7 B model"]["GEMM"],
    small=1 - shares["Qwen"][["GEMM", "attention"]].sum(),
    video_compile=bounds["TimeSformer"][fusing],
    allowed=bounds["2.7 B model"][fusing],
    launched=int(programs["Qwen"].summary()["kernel_count"]),
    with_sdpa=video_ns / left_ns,
    goal=GOAL,
)
