"""
How much of the memory's bandwidth does decoding reach?
=======================================================

A server produces one token after another, slowly, on a card that is always
busy. What is it busy with, and how fast could it be?

.. in-short::
"""

# %%
# Predict: how many bytes does a token need?
# ------------------------------------------
# To produce one token, a dense model reads all of its weights once and does
# almost no arithmetic with them. (A mixture of experts reads only the experts
# that its tokens were routed to.) So a layer takes at least the time that its
# weights, and the keys and values of its cache, need to come from memory:

# record: 240 s
# sphinx_gallery_thumbnail_number = 1
import pandas as pd
from _lib import climb, figures

from nsightkit import hardware, plots
from nsightkit.analysis.roofline import sol
from nsightkit.guide import case
from nsightkit.workloads import layer

sizes = dict(batch=1, context=2048, hidden=4096, heads=32, d_ff=11_008)
listed = climb.operations("decode", sizes)
h200 = sol.datasheet(hardware.find("H200"))
bounds = sol.bounds(listed, h200)
least_ns = bounds["bound_ns"].sum()

# %%
# Eager code launches each operation as written, and a launch costs the CPU
# some microseconds. Suppose that it is five. Is the time of an eager layer
# decided by its bytes or its launches? And what does a CUDA graph gain?
#
# .. dropdown:: Answer
#
#    By its launches. The layer's bytes take
#    :measured:`18_decode_bandwidth.least_us:.0f` µs on an H200, and launching
#    takes :measured:`18_decode_bandwidth.eager_us:.0f` µs, so the GPU waits. A
#    graph can remove all of the waiting and none of the bytes.
#
# The figure is that prediction for each rung, with a place for the
# measurement. Its lines are the goals:
# :measured:`18_decode_bandwidth.goal:.0%` and
# :measured:`18_decode_bandwidth.goal_high:.0%` of the datasheet's bandwidth.

# fold: How the figure is made
GOALS = (0.85, 0.95)
on_paper = climb.predicted("decode", sizes, h200)
figures.ladder(
    on_paper,
    {f"{goal:.0%} of the bandwidth": least_ns / goal for goal in GOALS},
    title="One token through a layer of an H200 (predicted)",
)

# %%
# To use the bandwidth, enough bytes have to be in flight. Little's law gives
# the number from the latency of one load, which we assume here:

# fold: Bytes in flight
LATENCY_NS = 800  # assumed: what one load from this memory takes, under load
under_way = h200.gb_per_s * LATENCY_NS
sms = hardware.find("H200").multiprocessors
print(f"under way at the full rate: {under_way / 1e6:,.1f} MB")
print(f"for each of {sms} multiprocessors: {under_way / sms / 1e3:,.0f} kB")

# %%
# Evidence: what fills a server's decode step?
# --------------------------------------------
# One step of vLLM on an MI300X, decoding one token for each of a batch of
# sequences, replayed from a graph. The model is a mixture of experts:

decode = case("vllm-graphs", "decode")
decode

# %%
# The GPU is almost never idle, so its utilization raises no alarm. The verdict
# names the work that fills the time:

decode.trace.verdict()

# %%
# How much of the bandwidth does this step reach? The trace can answer for one
# matmul, the last one, from the hidden state to the vocabulary, because it is
# the only one with a recorded shape. Its weights are read whole, so its bytes
# are known:

columns = ["name", "time_ns", "intensity", "bound", "sol_datasheet"]
head = decode.trace.sol(gpu="MI300X")[columns].head(1)
said = {"time_ns": "time (µs)", "sol_datasheet": "share of datasheet"}
head = head.assign(time_ns=head["time_ns"] / 1e3)
plots.table(head.rename(columns=said))

# %%
# For the rest of the step we would need to know which experts were read, and
# the trace does not record that.
#
# *Without a graph.* The same family of models on a B200, in eager mode: a
# prefill of one request. Even with all its tokens at once, a prefill leaves
# this GPU idle most of the time. Each gap between two launches is much longer
# than the cost that we assumed, in part because a profiler was recording:

eager = case("b200-eager", "gpt-oss-eager")
eager

# %%

# fold: How the table is made
waiting = eager.trace.gaps().set_index("cause").loc["launch-overhead"]
launch_us = waiting["total_ns"] / waiting["count"] / 1e3
free = eager.trace.whatif("free-launches")["speedup"].iloc[0]
whole = eager.trace.summary()
idle = whole["idle_ns"] / whole["span_ns"]
rows = {
    "the GPU is idle": f"{idle:.0%} of the time",
    "idle in each gap between launches": f"{launch_us:.0f} µs",
    "with free launches, predicted": f"{free:.1f}x faster",
}
plots.table(pd.DataFrame(rows.items(), columns=["B200, eager", "value"]))

# %%
# Change one thing: more rows for each weight
# -------------------------------------------
# A graph removes waiting. What removes bytes? Weights that were read serve
# every row of the batch, so the cost per token falls with each sequence that
# shares them, until the sequences' own caches or arithmetic become the limit.
# For the dense layer above we predict:

# fold: How the table is made
WEIGHTS = ("QKV", "output projection", "gate and up", "down")
BATCHES = (1, 8, 32, 128, 512)
rows = []
for batch in BATCHES:
    many = climb.operations("decode", sizes | {"batch": batch})
    layer_us = sum(map(h200.bound_ns, many)) / 1e3
    cache = next(op for op in many if op.name == "attention")
    rows.append(
        {
            "sequences": batch,
            "layer (µs)": layer_us,
            "per token (µs)": layer_us / batch,
            "share for the caches": h200.bound_ns(cache) / layer_us / 1e3,
        }
    )
shared = pd.DataFrame(rows)
plots.table(shared, dict.fromkeys(["layer (µs)", "per token (µs)"], "{:,.1f}"))

# %%
# The same server shows the other end. This step starts with a prefill, whose
# tokens all share one read of the weights:

prefill = case("vllm-graphs", "prefill-decode")
prefill

# %%

# fold: How the table is made
runs = {"decode": decode, "prefill, and some decode": prefill}
rows = []
for name, one in runs.items():
    (step,) = one.trace.steps().to_dict("records")
    row = {"step": name, "tokens": step["tokens"], "ms": step["wall_ns"] / 1e6}
    row["per token (µs)"] = step["wall_ns"] / step["tokens"] / 1e3
    row["share busy"] = step["busy_ns"] / step["wall_ns"]
    rows.append(row | {"bottleneck": one.trace.verdict()["bottleneck"]})
both = pd.DataFrame(rows)
plots.table(both, dict.fromkeys(["ms", "per token (µs)"], "{:,.1f}"))

# %%
# The two steps differ little in their kinds of work, and both keep the GPU
# busy. They differ in how many rows each weight serves.

# fold: How the figure is made
kinds = {
    name: one.trace.kernels(by="category").set_index("name")["total_ns"]
    for name, one in runs.items()
}
plots.share_bars(kinds, title="Kinds of work, vLLM on an MI300X (case file)")

# %%
# Verdict
# -------
# Decoding is limited by bytes. We can put a number on one matmul: the last one
# of the decode step reaches :measured:`18_decode_bandwidth.head:.0%` of the
# datasheet's bandwidth. A decoded token costs
# :measured:`18_decode_bandwidth.cheaper:.0f` times a token of the prefill.
# Eager code is far from both limits, because it waits for its launches, like
# the guide's worked example after its first fix
# (:ref:`step 6 <example-left>`).

# %%
# Limits
# ------
# * One step each of a server that we did not run, and two cards: the eager
#   trace and the graph's are not a pair.
# * Most kernels of the server have no recorded shape, so the step as a whole
#   has no share of the bandwidth here. Its class is judged from names and
#   rows.
# * The costs of a launch and of a load are assumed in the prediction. A
#   profiler makes launches slower, so the speedup for free launches on the
#   B200 is inflated.
# * The weights of one layer are several times the level-2 cache. A model with
#   few small layers finds them in the cache and exceeds the memory's
#   bandwidth.

# %%
# Run it yourself
# ---------------
# On a trace of your own server:
#
# .. code-block:: console
#
#    $ nsightkit steps trace.json.gz
#    $ nsightkit verdict trace.json.gz
#    $ nsightkit whatif trace.json.gz free-launches
#
# A graph is recorded once and replayed:
#
# .. code-block:: python
#
#    graph = torch.cuda.CUDAGraph()
#    with torch.cuda.graph(graph):
#        output = model(token)
#    graph.replay()
#
# To run this page's script (without a GPU it runs a tiny CPU version):
#
# .. code-block:: console
#
#    $ python examples/18_decode_bandwidth.py

downloads = {
    "decode on an MI300X": decode.trace,
    "prefill and decode on an MI300X": prefill.trace,
    "eager on a B200": eager.trace,
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
#       :measured:`18_decode_bandwidth.break_even:.0f` µs. At the cost that we
#       assumed it is not launch-bound; at the launch interval in the B200's
#       trace it would be.
#
# 2. The layer of the prediction stores its weights in fp8 instead of bf16. How
#    much faster does it decode one sequence, and 32? And what does a prefill
#    gain?
#
#    .. dropdown:: Answer
#
#       Only the weights shrink; the caches do not. So the gain depends on
#       their share of the bytes: at most
#       :measured:`18_decode_bandwidth.narrow_one:.2f` times faster for one
#       sequence, and :measured:`18_decode_bandwidth.narrow_many:.2f` times for
#       32. A prefill is limited by compute: it gains if the matmuls run in
#       fp8 as well, and nothing if the weights are only stored that way. (The
#       server above goes further: ``mxfp4`` in its kernels' names means that
#       its experts' weights have four bits.)
#
# 3. In ``prefill-decode``, the last matmul reaches a smaller share than in
#    ``decode``, with more rows. Is it the slower kernel?
#
#    .. dropdown:: Answer
#
#       ``nsightkit sol --gpu MI300X`` gives the times of both. It reads the
#       same weights and takes longer, so yes. The library chose another kernel
#       for the few additional rows.

# fold: The numbers of the second answer
narrow = {}
for name, batch in ("narrow_one", 1), ("narrow_many", 32):
    many = climb.operations("decode", sizes | {"batch": batch})
    products = [op for op in many if op.name in WEIGHTS]
    whole_ns = sum(map(h200.bound_ns, many))
    narrow[name] = whole_ns / (
        whole_ns - sum(map(h200.bound_ns, products)) / 2
    )

# %%
# Measured here
# -------------
# .. own-run::
#
# The rungs of this ladder: unfused, fused, compiled, a CUDA graph, and a GEMV
# of ours that streams the weights. Two rungs differ if the interval of their
# difference excludes zero (:doc:`/definitions`).

from nsightkit.guide import headline, measure
from nsightkit.workloads import ceilings

# A layer reads 405 MB of weights and 34 MB of cache, which takes an H100 at
# least 131 µs. 40 launches take the CPU 200 µs: launch-bound without a graph.
little = dict(batch=1, context=64, hidden=128, heads=4, d_ff=352)


def climbed(rung):
    """Measure one rung."""
    how = dict(mode="decode", rung=rung)
    return measure(
        f"decode/{rung}",
        layer.run,
        gpu=dict(**sizes, **how, layers=8),
        small=dict(**little, **how, layers=2),
        steps=200,
        warmup=1500,
    )


runs = {rung: climbed(rung) for rung in layer.RUNGS["decode"]}
runs["unfused"]

# %%
# The ceilings for the comparison, measured on the same GPU:


def product(part, precision, warmup):
    """Measure a large GEMM."""
    return measure(
        f"ceilings/{part}",
        ceilings.gemm,
        gpu=dict(m=8192, n=8192, k=8192, precision=precision),
        small=dict(m=256, n=256, k=256, precision=precision),
        steps=200,
        warmup=warmup,
    )


roofs = [product("before", "bf16", 800), product("fp32", "fp32", 60)]
for kind in ("copy", "read"):
    roofs.append(
        measure(
            f"ceilings/{kind}",
            ceilings.copy,
            gpu=dict(megabytes=4_000, kind=kind),
            small=dict(megabytes=16, kind=kind),
            steps=200,
            warmup=300,
        )
    )
roofs[-1]

# %%
# Predicted and measured, one row per change. Each rung is checked against the
# same weights and cache in float64:

# fold: How the figures are made
against = climb.bounds("decode", runs["unfused"], roofs)
rungs = climb.table(runs, against)
judged = climb.changes(runs, against)
if against.best:
    figures.ladder(
        climb.predicted("decode", sizes, against.best),
        {f"{goal:.0%} of the list": least_ns / goal for goal in GOALS},
        rungs["time_ns"],
        title="Decoding, predicted and measured",
    )
plots.table(judged) if len(judged) else None

# %%
# The errors, and the clock where the driver reports it:

CHECKED = ["rung", "speedup", "gb_per_s", "relative_error", "sm_clock_mhz"]
plots.table(rungs[CHECKED]) if len(rungs) else None

# %%
# The answer from the rungs:

# fold: How the answer is put together
said = climb.answer("a token's layer", rungs, judged)
if against.sheet and len(rungs):
    reached = rungs["sol_datasheet"].max()
    goals = [f"{goal:.0%}" for goal in GOALS if reached >= goal]
    said += f" Goals reached: {', '.join(goals) or 'none'}."
decoded, prefilled = both["per token (µs)"]
kernel_count = decode.trace.summary()["kernel_count"]
by_rung = on_paper.set_index("rung")
findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"the last matmul of a decode step on an MI300X reaches "
        f"{head['sol_datasheet'].iloc[0]:.0%} of the datasheet's bandwidth; "
        f"for the rest, a mixture of experts, the bytes are not recorded. A "
        f"token costs {decoded:,.0f} µs, and {prefilled:,.0f} µs in a prefill "
        f"whose tokens share the weights."
    ),
    badge=decode.label,
    goal=GOALS[0],
    goal_high=GOALS[1],
    least_us=least_ns / 1e3,
    eager_us=by_rung.loc["unfused", "least_ns"] / 1e3,
    head=head["sol_datasheet"].iloc[0],
    cheaper=decoded / prefilled,
    kernels=kernel_count,
    break_even=both["ms"][0] * 1e3 / kernel_count,
    **narrow,
)
