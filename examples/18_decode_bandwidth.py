"""
How much of the memory's bandwidth does decoding reach?
=======================================================

A server decodes slowly on a GPU that is never idle. Decoding should be limited
by the memory. Is it, and how much faster could it be?

.. in-short::
"""

# %%
# The symptom: a GPU without a gap
# --------------------------------
# One step of vLLM on an MI300X. It decodes a token for each of 32 sequences,
# and its kernels are replayed from a graph. The model is gpt-oss-20b, a
# mixture of experts:

# record: 240 s
# sphinx_gallery_thumbnail_number = 1
import pandas as pd
from _lib import climb, decode, figures

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import sol
from nsightkit.guide import case, headline, measure
from nsightkit.workloads import layer

step = case("vllm-graphs", "decode")
step.trace.verdict()

# %%
# The verdict is based on kernel names: these are memory-bound kinds. The trace
# does not name the card, so the verdict cannot know how fast they read. We
# know the card from the repository of the trace, and can find out.

# %%
# Predict: how many bytes does a step need?
# -----------------------------------------
# A dense model reads all of its weights once per step. A mixture of experts
# reads the experts that its tokens were routed to: here each of the 32
# sequences chooses 4 of 32 experts, in every layer. The experts have four-bit
# weights, and everything else is bf16. How many of the experts does a step
# read? And which is larger: the experts, the other weights, or the caches?
#
# .. dropdown:: Answer
#
#    Nearly all. If the routing were even, an expert would be left out by all
#    32 sequences with a probability of
#    :measured:`18_decode_bandwidth.left_out:.1%`. So at this batch size the
#    model is as good as dense, and the experts hold
#    :measured:`18_decode_bandwidth.expert_bytes:.0%` of the bytes.

# %%
# Evidence: which part reads slowly?
# ----------------------------------
# The graph's capture, published with the step, records the shapes of the
# matmuls. The step's name gives the number of cached tokens. With the
# published width of an expert they give the bytes of each part:

# fold: How the figure is made
capture = case("vllm-graphs", "decode-capture")
card = hardware.find("MI300X")
parts = decode.parts(step.trace, capture.trace, card.gb_per_s)
step_ns = step.trace.summary()["span_ns"]
needed = parts["bytes"].sum()
floor_ns = needed / card.gb_per_s
shown = parts.assign(GB=parts["bytes"] / 1e9)
plots.panels(
    shown,
    ["GB", "time_ns", "share of bandwidth"],
    title="One decode step on an MI300X (case file)",
)
step

# %%
# The step needs :measured:`18_decode_bandwidth.gigabytes:.1f` GB. At the
# datasheet's bandwidth they would take
# :measured:`18_decode_bandwidth.floor_ms:.1f` ms, and the step takes
# :measured:`18_decode_bandwidth.step_ms:.1f` ms. So decoding reaches
# :measured:`18_decode_bandwidth.reached:.0%` of the bandwidth, on a GPU that
# is :measured:`18_decode_bandwidth.busy:.1%` busy.
#
# Is the card to blame? The output head is an ordinary matmul of the library,
# in the same trace, and reaches :measured:`18_decode_bandwidth.head:.0%`. The
# matmuls of the experts take two thirds of the step and reach
# :measured:`18_decode_bandwidth.experts:.0%`. We replay the step with expert
# matmuls as good as the head:

ratio = parts["share of bandwidth"]["experts"]
ratio /= parts["share of bandwidth"]["output head"]
better = step.trace.whatif(scale=f"matmul_ogs={ratio:.3f}")
better

# %%
# That is the change to ask for. Next come the kernels that read neither
# weights nor caches, such as norms, routing and rotary positions:
# :measured:`18_decode_bandwidth.else_ms:.1f` ms that fusion could shorten.

# %%
# Change one thing: does a larger batch help?
# -------------------------------------------
# A larger batch reads fewer bytes per token, because all rows share one read
# of the weights. The extreme case is a step of the same server that starts
# with a prefill:

# fold: How the table is made
prefill = case("vllm-graphs", "prefill-decode")
rows = []
for name, run in (("decode", step), ("prefill and decode", prefill)):
    (served,) = run.trace.steps().to_dict("records")
    tokens, wall_ns = served["tokens"], served["wall_ns"]
    row = {"step": name, "tokens": tokens, "ms": wall_ns / 1e6}
    row["per token (µs)"] = wall_ns / tokens / 1e3
    rows.append(row | {"bottleneck": run.trace.verdict()["bottleneck"]})
both = pd.DataFrame(rows)
plots.table(both, dict.fromkeys(["ms", "per token (µs)"], "{:,.1f}"))

# %%
# Both keep the GPU busy with nearly the same kernels, and a token of the
# decode step costs :measured:`18_decode_bandwidth.cheaper:.0f` times a token
# of the other. The limit moves from bytes to arithmetic. How far does a larger
# batch help in decoding, before the caches take over, which no sequence
# shares? For a dense layer 4,096 wide with 2,048 tokens per sequence, on an
# H200, we predict:

# fold: How the table is made
sizes = dict(batch=1, context=2048, hidden=4096, heads=32, d_ff=11_008)
h200 = sol.datasheet(hardware.find("H200"))
rows = []
for batch in (1, 8, 32, 128, 512):
    many = climb.operations("decode", sizes | {"batch": batch})
    layer_us = climb.list_ns(many, h200) / 1e3
    cache = next(op for op in many if op.name == "attention")
    row = {"sequences": batch, "per token (µs)": layer_us / batch}
    row["share for the caches"] = h200.bound_ns(cache) / layer_us / 1e3
    rows.append(row)
looks = {"per token (µs)": "{:,.1f}", "share for the caches": "{:.0%}"}
plots.table(pd.DataFrame(rows), looks)

# %%
# Without a graph decoding has another limit: a model of the same family in
# eager mode leaves a B200 idle for
# :measured:`18_decode_bandwidth.eager_idle:.0%` of the time, and replayed
# without launch costs it is :measured:`18_decode_bandwidth.eager_free:.1f`\ x
# faster. :doc:`04_tiny_kernels` has that case.

# fold: How the eager trace is replayed
eager = case("b200-eager", "gpt-oss-eager").trace
waiting = eager.gaps().set_index("cause").loc["launch-overhead"]
whole = eager.summary()

# %%
# Verdict
# -------
# This server reaches :measured:`18_decode_bandwidth.reached:.0%` of its
# memory's bandwidth. A busy GPU and the word *memory-bound* both hide that;
# bytes divided by time shows it. Count the bytes of your step, divide by its
# time, and look for the part that is far below the best one in the same trace.

# %%
# Limits
# ------
# * One step each of a server that we did not run. The B200 and the MI300X ran
#   different models of one family, so they are not a pair.
# * We count every expert as read. With uneven routing fewer are, and the
#   experts' share of the bandwidth is lower still. The width of an expert, its
#   four-bit format and the attention window of 128 tokens, in every second
#   layer, are the model's published configuration.
# * The replay of the decode step is a few percent off the recording.
# * The dense layer is a prediction.

# %%
# Run it yourself
# ---------------
# On a trace of your own server; with the bytes of your weights you get the
# least time of each decode step:
#
# .. code-block:: console
#
#    $ nsightkit steps trace.json.gz --weights-gb 16
#    $ nsightkit kernels trace.json.gz --top 5
#    $ nsightkit whatif trace.json.gz free-launches
#
# On a GPU, this page's script also measures a dense layer that decodes, from
# unfused to a CUDA graph. Without a GPU it runs a tiny CPU version:
#
# .. code-block:: console
#
#    $ python examples/18_decode_bandwidth.py

downloads = {
    "decode on an MI300X": step.trace,
    "prefill and decode on an MI300X": prefill.trace,
    "eager on a B200": eager,
}

# %%
# Exercises
# ---------
# 1. How expensive would a launch have to be for this decode step to be
#    launch-bound without its graph? ``nsightkit summary`` counts the kernels.
#
#    .. dropdown:: Answer
#
#       The step has :measured:`18_decode_bandwidth.kernels` kernels, so a
#       launch would have to cost
#       :measured:`18_decode_bandwidth.break_even:.0f` µs. At five
#       microseconds, a usual price, the step is not launch-bound. In the
#       B200's trace the GPU waits
#       :measured:`18_decode_bandwidth.late_us:.0f` µs for each late launch. At
#       that price the step would be launch-bound, but a profiler slowed those
#       launches.
#
# 2. The layer of the prediction stores its weights in fp8 instead of bf16. How
#    much faster does it decode one sequence, and 32?
#
#    .. dropdown:: Answer
#
#       Only the weights shrink; the caches do not. So the gain is at most
#       :measured:`18_decode_bandwidth.narrow_one:.2f`\ x for one sequence and
#       :measured:`18_decode_bandwidth.narrow_many:.2f`\ x for 32.
#
# 3. In ``prefill-decode``, the output head reaches a smaller share than in
#    ``decode``, with more rows. Is it the slower kernel?
#
#    .. dropdown:: Answer
#
#       ``nsightkit sol --gpu MI300X`` gives the times of both. It reads the
#       same weights and takes longer, so yes. The library chose another kernel
#       for the few additional rows.

# fold: The numbers of the second answer
WEIGHTS = ("QKV", "output projection", "gate and up", "down")
narrow = {}
for name, batch in ("narrow_one", 1), ("narrow_many", 32):
    many = climb.operations("decode", sizes | {"batch": batch})
    weights = [op for op in many if op.name in WEIGHTS]
    whole_ns = climb.list_ns(many, h200)
    saved_ns = climb.list_ns(weights, h200) / 2
    narrow[name] = whole_ns / (whole_ns - saved_ns)

# %%
# Measured here
# -------------
# .. own-run::
#
# The dense layer: unfused, fused, compiled, in a CUDA graph, and with a GEMV
# of ours that streams the weights. Results are checked against float64.

# A layer reads 405 MB of weights and 34 MB of cache, which takes an H100 at
# least 131 µs. 40 launches take the CPU 200 µs: launch-bound without a graph.
little = dict(batch=1, context=64, hidden=128, heads=4, d_ff=352)
runs = {}
for rung in layer.RUNGS["decode"]:
    how = dict(mode="decode", rung=rung)
    runs[rung] = measure(
        f"decode/{rung}",
        layer.run,
        gpu=dict(**sizes, **how, layers=8),
        small=dict(**little, **how, layers=2),
        steps=200,
        warmup=1500,
    )
roofs = climb.ceilings("bf16", "fp32", "copy", "read")
runs["unfused"]

# %%

# fold: How the figures are made
GOALS = (0.85, 0.95)
against = climb.bounds("decode", runs["unfused"], roofs)
rungs = climb.table(runs, against)
changes = climb.changes(runs, against)
if against.best:
    least_ns = climb.list_ns(against.listed, against.best)
    figures.ladder(
        climb.predicted("decode", sizes, against.best),
        {f"{goal:.0%} of the list": least_ns / goal for goal in GOALS},
        rungs["time_ns"],
        title="Decoding, predicted and measured",
    )
plots.table(changes) if len(changes) else None

# %%
CHECKED = ["rung", "speedup", "gb_per_s", "relative_error", "sm_clock_mhz"]
plots.table(rungs[CHECKED]) if len(rungs) else None

# %%

# fold: How the answer is put together
said = climb.answer("a token's layer", rungs, changes)
if against.sheet and len(rungs):
    best = rungs["sol_datasheet"].max()
    goals = [f"{goal:.0%}" for goal in GOALS if best >= goal]
    said += f" Goals reached: {', '.join(goals) or 'none'}."
kernel_count = step.trace.summary()["kernel_count"]
reached = parts["share of bandwidth"]
gain = better["speedup"].iloc[0]
busy = step.trace.summary()["busy_ns"] / step_ns
findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"a decode step of gpt-oss-20b on an MI300X reaches "
        f"{floor_ns / step_ns:.0%} of the datasheet's bandwidth. The GPU is "
        f"{busy:.1%} busy. The output head reaches "
        f"{reached['output head']:.0%}, and the expert matmuls only "
        f"{reached['experts']:.0%}. If they reached "
        f"{reached['output head']:.0%}, too, the step would be {gain:.1f}x "
        "faster (replay)."
    ),
    badge=step.label,
    left_out=(1 - decode.CHOSEN / 32) ** 32,
    expert_bytes=parts["bytes"]["experts"] / needed,
    gigabytes=needed / 1e9,
    floor_ms=floor_ns / 1e6,
    step_ms=step_ns / 1e6,
    reached=floor_ns / step_ns,
    busy=busy,
    head=reached["output head"],
    experts=reached["experts"],
    else_ms=parts["time_ns"]["all else"] / 1e6,
    cheaper=both["per token (µs)"][0] / both["per token (µs)"][1],
    eager_idle=whole["idle_ns"] / whole["span_ns"],
    eager_free=eager.whatif("free-launches")["speedup"].iloc[0],
    late_us=waiting["total_ns"] / waiting["count"] / 1e3,
    kernels=kernel_count,
    break_even=step_ns / 1e3 / kernel_count,
    **narrow,
)
