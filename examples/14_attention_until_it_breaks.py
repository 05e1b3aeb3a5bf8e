"""
How long can the context get before attention breaks?
=====================================================

Naive attention needs memory that grows with the square of the context, so at
some context it fails. At which one, and what moves that limit: a compiler, a
fused kernel, or a smaller type?

.. in-short::
"""

# %%
# The symptom
# -----------
# We run attention by itself, with no model around it: one head of width 64, a
# batch of eight, forward and backward, at one context after the other until
# memory runs out:
#
# .. code-block:: python
#
#    def attention(q, k, v):
#        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
#        scores = scores.masked_fill(future, -math.inf)
#        return F.softmax(scores, dim=-1) @ v

# %%
# Predict: how many matrices at once?
# -----------------------------------
# One number decides: the size of one matrix of scores, which has an element
# for each pair of tokens. In fp32 at 16,384 tokens it is:

# sphinx_gallery_thumbnail_number = 1
# record: 240 s
batch, context = 8, 16_384
print(f"{batch * context**2 * 4 / 2**30:g} GiB")

# %%
# How many of them exist at the same time in the forward pass, and how many in
# the backward pass? And how much further does bf16 get?
#
# .. dropdown:: Answer
#
#    Two in the forward pass: a softmax reads one and writes one. One is kept.
#    The backward pass of the softmax needs three, so backward fails first.
#    bf16 halves each matrix, and the context enters squared, so it gets
#    further by the square root of two.

# %%
# Evidence: can we predict where it breaks?
# -----------------------------------------
# The operators determine which tensors exist when, so the peak at each context
# is arithmetic. For an H200:

from _lib import figures, sweep

from nsightkit import hardware, plots

H200 = 1e9 * max(hardware.find("H200").memory_gb)
CONTEXTS = [2**power for power in range(10, 18)]

naive = sweep.footprint("naive", "fp32", d=64, context=context)
print(f"forward  {naive.forward_peak / 2**30:5.1f} GiB")
print(f"backward {naive.backward_peak / 2**30:5.1f} GiB")

# %%
# And for other implementations. Each ends where its curve meets the limit:

# fold: How the figure is drawn
import itertools

import pandas as pd

COLUMNS = {
    "fp32": ("naive", "naive-compiled", "math", "efficient"),
    "bf16": ("naive", "naive-compiled", "math", "flash"),
}
DRAWN = [(name, "fp32") for name in COLUMNS["fp32"] if name != "math"]
DRAWN += [("flash", "bf16")]
WAYS = ("forward", "backward")
rows = []
for (name, kind), c, way in itertools.product(DRAWN, CONTEXTS, WAYS):
    needed = sweep.footprint(name, kind, d=64, context=c).peak(way)
    row = {"implementation": name, "precision": kind, "d": 64, "context": c}
    row |= {"direction": way, "peak_bytes": needed, "status": "ok"}
    rows.append(row)
planned = pd.concat(
    sweep.forecast(H200, name, kind, d=[64], contexts=CONTEXTS)
    for kind, names in COLUMNS.items()
    for name in names
)
figures.sweep(
    pd.DataFrame(rows),
    "peak_bytes",
    limit_bytes=H200,
    forecast=planned,
    title="Memory of attention to its end, an H200 (predicted)",
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
#    +attended = torch.compile(attention, dynamic=False)(q, k, v)
#
# .. code-block:: diff
#
#    -attended = attention(q, k, v)
#    +with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
#    +    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
#
# The longest context that fits an H200, to the token:

# fold: How the table is made
fits = planned.set_index(["implementation", "precision", "direction"])
fits = fits["largest_context"].unstack()[list(WAYS)]
fits["ratio to the first"] = (
    fits["backward"] / fits.loc[("naive", "fp32"), "backward"]
)
fits = fits.loc[[(n, k) for k, names in COLUMNS.items() for n in names]]
plots.table(fits.reset_index(), {fits.columns[-1]: "{:,.2f}"})

# %%
# The compiler works in place and needs one matrix less. A fused kernel never
# writes the matrix, so its memory grows linearly with the context. ``math``,
# PyTorch's fallback, computes bf16 in fp32, so bf16 gains nothing there.
#
# The largest numbers of the table describe a single head with nothing else on
# the card. They show that memory no longer limits attention itself. In a
# model, the activations of its other layers run out long before that:
# :doc:`11_memory_ledger` has those limits.

# %%
# Verdict
# -------
# bf16 and a compiler move the limit by a factor below two. Only a kernel
# without a matrix of scores removes it. After that time becomes the limit,
# because it still grows with the square. None of this matters for the
# convolutions of the guide's :ref:`worked example <example-left>`; the chapter
# :doc:`/guide/memory` shows how to find out which case yours is.

# %%
# Limits
# ------
# * Attention alone, one head, without projections or a model. A model's other
#   tensors take their share of memory first; :doc:`11_memory_ledger`
#   counts them.
# * The limit is the capacity in the datasheet. A CUDA context and the
#   allocator's rounding take some of it, and fused kernels have their
#   workspaces.
# * We do not predict time here. At short contexts it is the time of the
#   launches, so a comparison of implementations compares launches.
# * Flash attention and cuDNN's attention do not support fp32.

# %%
# Run it yourself
# ---------------
# To run this page's script (without a GPU it runs a tiny CPU version):
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
#       :measured:`14_attention_until_it_breaks.cards:.2f` times further: the
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
#       :measured:`14_attention_until_it_breaks.heads_8:,.0f`. The width of all
#       heads together stays the same, and so do the limits of flash attention,
#       nearly: it adds only one number per row and head.
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


def longest(limit, **sizes):
    """Longest context of the naive backward pass in fp32."""
    found = sweep.forecast(
        limit, "naive", "fp32", d=[64], contexts=CONTEXTS, **sizes
    )
    return int(found.set_index("direction").loc["backward", "largest_context"])


answers = {"heads_1": longest(H200), "heads_8": longest(H200, heads=8)}
answers["cards"] = longest(H200) / longest(80e9)

# %%
# Measured here
# -------------
# .. own-run::
#
# Each implementation runs at all contexts. Each direction has a separate
# status: where backward runs out of memory, forward is still timed. We pin
# SDPA's back ends one at a time, because PyTorch's choice depends on its
# version and the GPU. On a CPU the script times tiny sizes and measures no
# memory.

from nsightkit.guide import headline, measure
from nsightkit.workloads import attention as workload

# A matrix of scores is 8 x S² x 4 B = 34 GB at 32,768 in fp32. Forward needs
# two, which fit 80 GB, and backward three, which do not. Flash attention
# goes on: 2 x 8 x 131,072² x 64 = 18 TFLOP forward are some tens of ms.
TRIED = [256, 1024, 4096, 8192, 16_384, 32_768, 65_536]


def swept(implementation, precision, context=TRIED):
    """Measure one implementation at all contexts."""
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
# Time in fp32. Where a line is flat, the launches take the time, not the
# arithmetic.

# fold: How the figure is drawn
tables = {name: sweep.cells(run.rows) for name, run in runs.items()}
ladder = ["naive-fp32", "naive-compiled-fp32", "efficient-fp32"]
lines = pd.concat(tables[name] for name in ladder)
if len(lines):
    figures.sweep(
        lines,
        "median_ns",
        title=f"Time of attention, fp32 ({first.mode})",
    )
runs["flash-bf16"]

# %%
# Memory, with the predicted limits and the measured ones:

# fold: How the figure is drawn
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

# %%
# The slopes at the long end of each line: one is O(S), two is O(S²).

# fold: How the table is made
if on_gpu:
    slopes = sweep.exponents(pd.concat(tables.values())).drop(columns="d")
    plots.table(slopes, {"time": "{:.2f}", "memory": "{:.2f}"})

# %%
# The speedup of each change, at the longest context that both sides have:

# fold: How the table is made
CHANGES = [
    ("naive-fp32", "naive-compiled-fp32"),
    ("naive-compiled-fp32", "efficient-fp32"),
    ("naive-fp32", "naive-tf32"),
    ("naive-fp32", "naive-bf16"),
    ("naive-bf16", "naive-compiled-bf16"),
    ("naive-bf16", "efficient-bf16"),
    ("naive-bf16", "flash-bf16"),
    ("naive-bf16", "cudnn-bf16"),
]


def times(name, way):
    """Median times of what ran, by context."""
    table = tables[name]
    fine = (table["direction"] == way) & (table["status"] == "ok")
    return table[fine].set_index("context")["median_ns"]


rows = []
for (old, new), way in itertools.product(CHANGES, WAYS):
    speedup = (times(old, way) / times(new, way)).dropna()
    if len(speedup):
        row = {"from": old, "to": new, "direction": way}
        row["at context"] = speedup.index[-1]
        row["speedup"] = speedup.iloc[-1]
        rows.append(row)
if rows:
    plots.table(pd.DataFrame(rows), {"speedup": "{:.2f}x"})

# %%
# The answer from the runs:

# fold: How the answer is put together
status = pd.concat(table["status"] for table in tables.values())
said = (
    f"{(status == 'ok').sum()} of {len(status)} cells ran on a CPU, which "
    f"cannot run the others."
)


def last(name, way):
    """Longest context at which a direction was fine."""
    contexts = times(name, way).index
    return int(contexts.max()) if len(contexts) else 0


if on_gpu:
    near = tables["naive-fp32"]
    near = near[near["status"] == "ok"].groupby("direction").tail(2)
    error = near["error"].abs().max()
    known = ends[ends["outcome"] != "not reached"]
    right = int((known["outcome"] == "as predicted").sum())
    said = (
        f"naive attention in fp32 went forward up to a context of "
        f"{last('naive-fp32', 'forward'):,} and backward up to "
        f"{last('naive-fp32', 'backward'):,}, of those tried; flash attention "
        f"in bf16 up to {last('flash-bf16', 'backward'):,}. {right} of "
        f"{len(known)} lines ended, or did not, as forecast, and peaks near "
        f"the end were predicted within {max(error, 1e-3):.1%}."
    )
ends_at = fits["backward"]
findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"a single head of naive attention, forward and backward, should fit "
        f"an H200 up to {ends_at['naive', 'fp32']:,} tokens in fp32, "
        f"{ends_at['naive', 'bf16']:,} in bf16, and "
        f"{ends_at['naive-compiled', 'fp32']:,} compiled in fp32. Flash "
        "attention grows with the context instead of its square, so a model's "
        "other tensors run out first."
    ),
    badge="predicted for an H200",
    **answers,
)
