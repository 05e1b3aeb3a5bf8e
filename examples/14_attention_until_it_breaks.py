"""
How long can the context get before attention breaks?
=====================================================

Naive attention runs out of memory at some context. At which one, and what
moves that limit: a larger card, a narrower type, a compiler, or a
fused kernel?

.. in-short::
"""

# %%
# The symptom: a square
# ---------------------
# This is attention as in the textbook. ``scores`` has an element for each pair
# of tokens, in every head of every sequence:
#
# .. code-block:: python
#
#    def attention(q, k, v):
#        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
#        scores = scores.masked_fill(future, -math.inf)
#        return F.softmax(scores, dim=-1) @ v
#
# Programs that people run still do this. Two vision models recorded the shapes
# of their scores on an H100. The last column is our prediction, the most
# tokens whose forward pass of attention alone fits the card's 80 gigabytes:

# sphinx_gallery_thumbnail_number = 1
# record: 240 s
# fold: How the table is made
import pandas as pd
from _lib import figures, sweep

from nsightkit import hardware, plots
from nsightkit.guide import case, headline, measure
from nsightkit.workloads import attention as workload

H100 = 1e9 * max(hardware.find("H100 SXM").memory_gb)
programs = sweep.naive_programs(
    {
        "TimeSformer": case("odd-tokens", "timesformer-h100").trace,
        "OWLv2": case("odd-tokens", "owlv2-h100").trace,
    },
    H100,
)
plots.table(programs, {"all matrices (GB)": "{:.2f}"})

# %%
# Predict: how many matrices at once?
# -----------------------------------
# How many matrices of scores exist at the same time in the forward pass, and
# how many in the backward pass? And how much further does bf16 get than fp32?
#
# .. dropdown:: Answer
#
#    Two in the forward pass: a softmax reads one and writes one. One is kept.
#    The backward pass of the softmax needs three, so backward fails first.
#    bf16 halves each matrix. The context enters squared, so bf16 gets
#    further by the square root of two.

# %%
# Evidence: are there two matrices, and three?
# --------------------------------------------
# The operators determine which tensors exist when, so the bytes are the same
# on every machine. We let a CPU run the function above in fp32, with one head
# and a batch of eight, which makes eight matrices of scores. PyTorch's
# profiler records each allocation (*exact*):

# fold: How the table is made
COUNTED = ["predicted (MB)", "counted (MB)", "in matrices"]
counted = sweep.counted(context=1024)
plots.table(counted, dict.fromkeys(COUNTED, "{:.2f}"))

# %%
# The unit of the last column is all eight matrices together. Forward needs
# them twice and backward three times. The rest is q, k, v, the result with its
# gradients, and the mask.

# %%
# Where does each kind of attention break?
# ----------------------------------------
# The same arithmetic gives the peak at any context. Again eight matrices, of
# a head of width 64, now on an H200. The ticks on the limit mark the longest
# context that fits:

# fold: How the figure is drawn
H200 = 1e9 * max(hardware.find("H200").memory_gb)
planned = sweep.plan(H200)
figures.sweep(
    sweep.curves(),
    "peak_bytes",
    limit_bytes=H200,
    forecast=planned,
    title="Attention memory, eight score matrices, H200 (predicted)",
)

# %%
# The dotted lines in the corner show two slopes: linear and quadratic growth.
# ``naive-compiled`` is the code above after ``torch.compile``; ``efficient``
# and ``flash`` are fused kernels.

# %%
# Change one thing: the implementation
# ------------------------------------
# .. code-block:: diff
#
#    -attended = attention(q, k, v)
#    +with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
#    +    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
#
# What would the other changes buy? The longest context that fits an H200, in
# tokens; the last column compares the backward pass with naive fp32:

# fold: How the table is made
fits = sweep.longest(planned)
plots.table(fits.reset_index(), {fits.columns[-1]: "{:,.2f}x"})

# %%
# The compiler works in place and needs one matrix less. ``math``, PyTorch's
# fallback, computes bf16 in fp32, so bf16 gains nothing there.
#
# The fused kernels are not in the table. They never write the matrix, so their
# memory grows linearly with the context, and it no longer limits attention.
# The activations of a model's other layers run out long before:
# :doc:`11_memory_ledger` has those limits.

# %%
# Verdict
# -------
# The longest context is about the square root of the free bytes, divided by
# three times batch times heads times bytes per element; for inference, by two
# times. A larger card, bf16 and a compiler each move that limit by a factor
# below two. Only a kernel without a score matrix removes it. After that time
# becomes the limit, because it still grows with the square. The chapter
# :doc:`/guide/memory` shows how to find out what fills your card.

# %%
# Limits
# ------
# * Attention alone, eight matrices, without projections or a model. A model's
#   other tensors take their share of memory first; :doc:`11_memory_ledger`
#   counts them.
# * The two programs did not run out of memory, and we did not run them. Their
#   shapes are recorded, the limits are predicted.
# * The limit is the capacity in the datasheet. A CUDA context and the
#   allocator's rounding take some of it, and fused kernels have their
#   workspaces.
# * We do not predict time here. At short contexts it is the time of the
#   launches, so a comparison of implementations compares launches.
# * Flash attention and cuDNN's attention do not support fp32.

# %%
# Run it yourself
# ---------------
# On a GPU, this page's script also measures time and memory of nine kinds of
# attention, up to the context that no longer fits. Without a GPU it runs a
# tiny CPU version:
#
# .. code-block:: console
#
#    $ python examples/14_attention_until_it_breaks.py
#
# The memory of a model's step with either attention, and the lines that
# allocated it:
#
# .. code-block:: console
#
#    $ nsightkit bench --size medium --ctx 4096 --mode fwd_bwd
#    $ nsightkit memory snapshot.pickle

# %%
# Exercises
# ---------
# 1. Two cards: an H100 with 80 gigabytes, an H200 with 141. How much further
#    does the naive backward pass get on the second? Guess, then ask
#    ``sweep.forecast``.
#
#    .. dropdown:: Answer
#
#       :measured:`14_attention_until_it_breaks.cards:.2f`\ x as far: the
#       square root of the ratio of the memories. Where memory grows with the
#       square, a larger card buys little context.
#
# 2. With eight heads instead of one, which of the numbers in the table change,
#    and by how much?
#
#    .. dropdown:: Answer
#
#       Each head has its own matrix, so the naive limits shrink by about the
#       square root of eight: backward from
#       :measured:`14_attention_until_it_breaks.heads_1:,.0f` tokens to
#       :measured:`14_attention_until_it_breaks.heads_8:,.0f`.
#
# 3. The mask ``future`` also has an element for each pair of tokens. Why is it
#    not counted eight times?
#
#    .. dropdown:: Answer
#
#       All sequences of the batch share it, and it needs one byte per element,
#       so it is a thirty-second of the scores in fp32. ``is_causal`` needs no
#       mask.


# fold: How the answers are worked out
def broken_at(limit, **sizes):
    """Longest context of the naive backward pass in fp32."""
    table = sweep.forecast(
        limit, "naive", "fp32", d=[64], contexts=[], **sizes
    )
    return int(table.set_index("direction").loc["backward", "largest_context"])


answers = {"heads_1": broken_at(H200), "heads_8": broken_at(H200, heads=8)}
answers["cards"] = broken_at(H200) / broken_at(H100)

# %%
# Measured here
# -------------
# .. own-run::
#
# Each implementation at every context, forward and backward apart. SDPA's back
# ends are pinned, because PyTorch's choice depends on its version and the GPU.

# A matrix of scores is 8 x S² x 4 B = 34 GB at 32,768 in fp32. Forward needs
# two, which fit 80 GB, and backward three, which do not. Flash attention
# goes on: 2 x 8 x 131,072² x 64 = 18 TFLOP forward are some tens of ms.
TRIED = [256, 1024, 4096, 8192, 16_384, 32_768, 65_536]


def swept(implementation, precision, context=TRIED):
    """Measure one implementation at every context."""
    how = dict(implementation=implementation, precision=precision)
    return measure(
        f"attention-sweep/{implementation}-{precision}",
        workload.run,
        gpu=dict(**how, d_model=[64], context=context, batch=8),
        small=dict(**how, d_model=[16], context=[16, 64, 256], batch=2),
    )


runs = {
    "naive-fp32": swept("naive", "fp32"),
    "naive-compiled-fp32": swept("naive-compiled", "fp32"),
    "efficient-fp32": swept("efficient", "fp32"),
    "naive-tf32": swept("naive", "tf32"),
    "naive-bf16": swept("naive", "bf16"),
    "naive-compiled-bf16": swept("naive-compiled", "bf16"),
    "efficient-bf16": swept("efficient", "bf16"),
    "flash-bf16": swept("flash", "bf16", [*TRIED, 131_072]),
    "cudnn-bf16": swept("cudnn", "bf16"),
}
first = runs["naive-fp32"]
on_gpu = all(run.gpu for run in runs.values())
first

# %%
# Time in fp32, flat where launches take the time; then memory, with the
# predicted limits and the measured ones:

# fold: How the figures are drawn
tables = {name: sweep.cells(run.rows) for name, run in runs.items()}
ladder = ["naive-fp32", "naive-compiled-fp32", "efficient-fp32"]
lines = pd.concat(tables[name] for name in ladder)
if len(lines):
    title = f"Time of attention, fp32 ({first.mode})"
    figures.sweep(lines, "median_ns", title=title)
if on_gpu:
    limit = first.provenance["gpu"]["memory_gib"] * 2**30
    ends = sweep.ends(pd.concat(tables.values()), limit)
    figures.sweep(
        pd.concat([lines, tables["flash-bf16"]]),
        "peak_bytes",
        limit_bytes=limit,
        forecast=ends,
        title=f"Memory of attention to its end ({first.mode})",
    )
runs["flash-bf16"]

# %%
# Slopes at the long end of each line (two is quadratic), and the speedup of
# each change at the longest context that both sides have:

if on_gpu:
    slopes = sweep.exponents(pd.concat(tables.values())).drop(columns="d")
    plots.table(slopes, {"time": "{:.2f}", "memory": "{:.2f}"})

# %%
speedups = sweep.speedups(tables)
plots.table(speedups, {"speedup": "{:.2f}x"}) if len(speedups) else None

# %%

# fold: How the answer is put together
said = "a CPU runs no cell of the table out of memory."
if on_gpu:
    said = sweep.answer(tables, ends)
ends_at = fits["backward"].round(-3)  # a CUDA context takes memory, too
findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"Until three copies of the score matrix fill the card: the backward "
        f"pass of naive attention needs that many. On an H200, one head and a "
        f"batch of eight end at about {ends_at['naive', 'fp32']:,.0f} tokens "
        f"in fp32. Compiled, they end at "
        f"{ends_at['naive-compiled', 'fp32']:,.0f}, and in bf16 at "
        f"{ends_at['naive', 'bf16']:,.0f}. With sixteen heads, each limit is "
        f"a quarter of that. Flash attention's memory is linear in the "
        "context, so other activations fill the card first."
    ),
    badge="predicted for an H200",
    **answers,
)
