"""
How much of the memory's bandwidth does decoding reach?
=======================================================

A server makes one token after another, slowly, on a card that is busy all the
time. What is it busy with, and how fast could it be?

.. in-short::
"""

# %%
# Predict: bytes, not arithmetic
# ------------------------------
# For one token, a model reads all of its weights once and does almost no
# arithmetic with them. So a layer takes at least as long as its weights, and
# the keys and values of its cache, take through the memory:

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
# Eager code launches each operation that is written, and a launch costs the
# CPU some microseconds. Suppose that it is five: what decides the time of an
# eager layer, its bytes or its launches? And what does a CUDA graph gain?
#
# .. dropdown:: Answer
#
#    The launches. The layer's bytes take
#    :measured:`18_decode_bandwidth.least_us:.0f` µs on an H200, and launching
#    takes :measured:`18_decode_bandwidth.eager_us:.0f` µs, so the GPU waits. A
#    graph removes the waiting, all of it at best, and not one byte.
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
# Bandwidth needs bytes under way. How many follows from the time that one load
# takes (Little's law). That time is assumed here:

# fold: Bytes under way
LATENCY_NS = 800  # assumed: what one load from this memory takes, under load
under_way = h200.gb_per_s * LATENCY_NS
sms = hardware.find("H200").multiprocessors
print(f"under way at the full rate: {under_way / 1e6:,.1f} MB")
print(f"for each of {sms} multiprocessors: {under_way / sms / 1e3:,.0f} kB")

# %%
# Evidence: a server that decodes
# -------------------------------
# One step of vLLM on an MI300X, decoding one token for each of a batch of
# sequences, replayed from a graph:

decode = case("vllm-graphs", "decode")
decode

# %%
# The GPU is hardly ever idle, so utilisation says that all is well. The
# verdict says what fills the time:

decode.trace.verdict()

# %%
# One product of the step has a recorded shape, the last one, from the hidden
# state to the vocabulary. It shows how near a library comes to the bandwidth:

columns = ["name", "time_ns", "intensity", "bound", "sol_datasheet"]
head = decode.trace.sol(gpu="MI300X")[columns].head(1)
said = {"time_ns": "time (µs)", "sol_datasheet": "share of datasheet"}
head = head.assign(time_ns=head["time_ns"] / 1e3)
plots.table(head.rename(columns=said))

# %%
# *Without a graph.* The same family of models on a B200, in eager mode: a
# prefill of one request. Even a prefill, with all its tokens at once, leaves
# the GPU idle for most of the time, and each gap between two launches is much
# longer than the cost that was assumed for one:

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
    "with free launches, predicted": f"{free:.1f} times as fast",
}
plots.table(pd.DataFrame(rows.items(), columns=["B200, eager", "found"]))

# %%
# Change one thing: more rows for each weight
# -------------------------------------------
# A graph removes waiting. What removes bytes? Weights that were read serve
# every row of the batch, so the cost of a token falls with each sequence that
# shares them, until the sequences' own caches or arithmetic are the limit.
# Predicted for the layer above:

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
            "a token (µs)": layer_us / batch,
            "share for the caches": h200.bound_ns(cache) / layer_us / 1e3,
        }
    )
shared = pd.DataFrame(rows)
plots.table(shared, dict.fromkeys(["layer (µs)", "a token (µs)"], "{:,.1f}"))

# %%
# The same server shows the other end. This step begins with a prefill, whose
# tokens all share one reading of the weights:

prefill = case("vllm-graphs", "prefill-decode")
prefill

# %%

# fold: How the table is made
runs = {"decode": decode, "prefill, and some decode": prefill}
rows = []
for name, one in runs.items():
    (step,) = one.trace.steps().to_dict("records")
    row = {"step": name, "tokens": step["tokens"], "ms": step["wall_ns"] / 1e6}
    row["a token (µs)"] = step["wall_ns"] / step["tokens"] / 1e3
    row["share busy"] = step["busy_ns"] / step["wall_ns"]
    rows.append(row | {"bottleneck": one.trace.verdict()["bottleneck"]})
both = pd.DataFrame(rows)
plots.table(both, dict.fromkeys(["ms", "a token (µs)"], "{:,.1f}"))

# %%
# The kinds of work differ little, and utilisation not at all. What differs
# is how many rows each weight serves.

# fold: How the figure is made
kinds = {
    name: one.trace.kernels(by="category").set_index("name")["total_ns"]
    for name, one in runs.items()
}
plots.share_bars(kinds, title="Kinds of work, vLLM on an MI300X (case file)")

# %%
# Verdict
# -------
# Decoding is bound by bytes. The last product of the decode step reaches
# :measured:`18_decode_bandwidth.head:.0%` of the datasheet's bandwidth. A
# decoded token costs :measured:`18_decode_bandwidth.cheaper:.0f` times as much
# as one of the prefill. Eager code does not come near either: it waits for its
# launches.

# %%
# Limits
# ------
# * One step each, somebody else's server, and two cards: the eager trace and
#   the graph's are not a pair.
# * Most kernels of the server have no recorded shape, so the step as a whole
#   has no share of the bandwidth here. Its class is judged by names and rows.
# * The costs of a launch and of a load are assumed in the prediction. A
#   profiler makes launches slower than they are without it.
# * The weights of one layer are several times the level-2 cache. A model with
#   few small layers finds them there, and beats the memory without deserving
#   it.

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
# 1. How expensive would a launch have to be before this decode step were bound
#    by launches without its graph? ``nsightkit summary`` counts the kernels.
#
#    .. dropdown:: Answer
#
#       The step has :measured:`18_decode_bandwidth.kernels` kernels, so a
#       launch would have to cost
#       :measured:`18_decode_bandwidth.break_even:.0f` µs. By the cost that was
#       assumed it would not be; by that of the B200's trace it would.
#
# 2. The layer of the prediction stores its weights in 8 bits instead of 16.
#    How much faster does it decode one sequence, and how much 32? And what
#    does a prefill gain?
#
#    .. dropdown:: Answer
#
#       Only the weights shrink, and not the caches. So it depends on what
#       share of the bytes they are: at best
#       :measured:`18_decode_bandwidth.narrow_one:.2f` times as fast for one
#       sequence, and :measured:`18_decode_bandwidth.narrow_many:.2f` times for
#       32. A prefill is bound by arithmetic: it gains if the products run in
#       8 bits as well, and nothing if the weights are only stored in 8 bits.
#       (The server above is ahead of this question: ``mxfp4`` in the names of
#       its kernels says that the weights of its experts have 4 bits.)
#
# 3. In ``prefill-decode``, the last product reaches a smaller share than in
#    ``decode``, at more rows. Is it the slower kernel?
#
#    .. dropdown:: Answer
#
#       ``nsightkit sol --gpu MI300X`` gives the times of both. It reads the
#       same weights and takes longer, so yes, for what it reads; a product of
#       few more rows was given another kernel.

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
# of our own that streams the weights. Two rungs differ where the interval of
# their difference leaves out zero (:doc:`/definitions`).

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
# The ceilings that the rungs are held against, measured on the same GPU:


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
# Predicted and measured, one row per change, and each rung against the same
# weights and cache in float64:

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
# What the rungs say:

# fold: How the answer is put together
said = climb.answer("a token's layer", rungs, judged)
if against.sheet and len(rungs):
    reached = rungs["sol_datasheet"].max()
    goals = [f"{goal:.0%}" for goal in GOALS if reached >= goal]
    said += f" Goals reached: {', '.join(goals) or 'none'}."
decoded, prefilled = both["a token (µs)"]
kernel_count = decode.trace.summary()["kernel_count"]
by_rung = on_paper.set_index("rung")
findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"on an MI300X, a decode step is busy for {both['share busy'][0]:.1%} "
        f"of its time, bound by memory, and a token costs {decoded:,.0f} µs; "
        f"in a prefill, whose tokens share the weights, {prefilled:,.0f} µs. "
        f"The last product of the decode reaches "
        f"{head['sol_datasheet'].iloc[0]:.0%} of the datasheet's bandwidth. "
        f"In eager mode, a B200 is idle for {idle:.0%} of a prefill, mostly "
        f"waiting for launches."
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
