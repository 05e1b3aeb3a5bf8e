"""
How long can the context get before attention breaks?
=====================================================

Attention that writes its scores out needs memory that grows with the square
of the context, so there is a context at which it fails. At which one, and what
moves it: a compiler, a fused kernel, or fewer bits?

.. in-short::
"""

# %%
# The symptom
# -----------
# Attention by itself, one head, a batch of eight, forward and backward, at one
# context after the other until memory runs out:
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
batch, context = 8, 16_384
print(f"{batch * context**2 * 4 / 2**30:g} GiB")

# %%
# How many of them live at the same time in the forward pass, and how many in
# the backward pass? And how much further does bf16 get?
#
# .. dropdown:: Answer
#
#    Two in the forward pass: a softmax reads one and writes one. One is kept.
#    Going back through the softmax takes three. So the backward pass breaks
#    first. bf16 halves each matrix, and the context enters squared: it gets
#    further by the square root of two.

# %%
# Evidence: the end is known beforehand
# -------------------------------------
# The operators say what lives when, so the peak at each context is arithmetic.
# On an H200, with queries of width 64:

from nsightkit import hardware, plots
from nsightkit.investigations.pages import sweep

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
plots.sweep_memory(
    pd.DataFrame(rows),
    H200,
    planned[planned["implementation"] != "math"],
    limit="an H200",
    title="Memory of attention to its end (predicted)",
)

# %%
# The dotted lines in the corner show two slopes: of what grows with the
# context, and of what grows with its square. ``naive-compiled`` is the code
# above after ``torch.compile``; ``efficient`` and ``flash`` are fused kernels.

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
fits["times as far as the first"] = (
    fits["backward"] / fits.loc[("naive", "fp32"), "backward"]
)
fits = fits.loc[[(n, k) for k, names in COLUMNS.items() for n in names]]
plots.table(fits.reset_index(), {fits.columns[-1]: "{:,.2f}"})

# %%
# A compiler that works in place needs one matrix less. A fused kernel never
# writes any, so its memory grows with the context alone. ``math``, PyTorch's
# fallback, computes bf16 in fp32: fewer bits move nothing there.

# %%
# Verdict
# -------
# Fewer bits and a compiler move the end by a factor below two. Only a kernel
# without a matrix of scores removes it: then time, which still grows with the
# square, is what ends the growth.

# %%
# Limits
# ------
# * Attention alone, one head, without projections. What else a model holds
#   takes its share of memory first; :doc:`11_memory_against_context` counts
#   that.
# * The limit is the capacity in the datasheet. A CUDA context and the
#   allocator's rounding take some of it, and fused kernels have workspaces of
#   their own.
# * Time is not predicted here. At short contexts it is that of the launches,
#   and a comparison of implementations compares those.
# * Flash attention and cuDNN's have no fp32.

# %%
# Run it yourself
# ---------------
# With a GPU this measures, without one it runs small on the CPU:
#
# .. code-block:: console
#
#    $ python examples/14_attention_until_it_breaks.py
#
# What a step of a model with either attention needs, and who allocated it:
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
#       :measured:`14_attention_until_it_breaks.cards:.2f` times as far: the
#       square root of the ratio of the memories. Memory buys context slowly
#       where it goes with the square.
#
# 2. With eight heads in place of one, which of the numbers in the table
#    change, and by how much?
#
#    .. dropdown:: Answer
#
#       Each head has its own matrix, so the naive ends shrink by about the
#       square root of eight: backward from
#       :measured:`14_attention_until_it_breaks.heads_1:,.0f` tokens to
#       :measured:`14_attention_until_it_breaks.heads_8:,.0f`. The width of all
#       heads together stays, and so do the ends of flash attention, nearly:
#       one number a row and head is all that is added.
#
# 3. The mask ``future`` has an element for each pair of tokens, too. Why is it
#    not counted eight times?
#
#    .. dropdown:: Answer
#
#       It is the same for each sequence of the batch and holds one byte an
#       element, so it is a thirty-second of the scores in fp32. ``is_causal``
#       needs none.

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
# One process for each implementation takes all sizes in turn. Each direction
# has a status of its own: where backward runs out of memory, forward is timed
# all the same. On a CPU the limit is one that a counter of tensors enforces.

# fold: How the runs are read
from nsightkit.investigations import headline, measure
from nsightkit.investigations import parts as investigations

first = measure("attention-sweep", "naive-fp32")
on_gpu = first.provenance["gpu"] is not None
runs = {"naive-fp32": first}
for name in investigations.INVESTIGATIONS["attention-sweep"]:
    small = name in ("math-fp32", "naive-bf16", "flash-bf16")
    if name not in runs and (on_gpu or small):
        runs[name] = measure("attention-sweep", name)
cells = pd.concat([sweep.cells(run.samples) for run in runs.values()])
cells["column"] = cells["implementation"] + "-" + cells["precision"]
widths = sorted(cells["d"].unique())
D = 64 if 64 in widths else widths[0]
cells = cells[cells["d"] == D]


def columns(*names):
    """Cells of some columns, in that order."""
    return pd.concat([cells[cells["column"] == name] for name in names])


first

# %%
# Time in fp32. Where a line is flat, the time is not that of the arithmetic:
# on a GPU it is that of the launches.

# fold: How the figure is drawn
ladder = [f"{name}-fp32" for name in COLUMNS["fp32"]]
ladder = [name for name in ladder if name in runs]
lines = columns(*ladder)
plots.sweep_times(
    lines,
    sweep.launch_bound(lines),
    title=f"Time of attention, fp32 ({first.mode})",
)
runs["flash-bf16"]

# %%
# Memory, with the ends that were forecast and those that came:

# fold: How the figure is drawn
limits = pd.concat([sweep.limits(run.samples) for run in runs.values()])
ends = sweep.ends(cells, limits, on_gpu=on_gpu)
plots.sweep_memory(
    columns(*ladder, "flash-bf16"),
    limits["naive-fp32"],
    ends,
    limit="memory of the GPU" if on_gpu else "simulated limit",
    title=f"Memory of attention to its end ({first.mode})",
)

# %%
# Which back end really ran, read from the profile, and the slopes at the long
# end of each line: one is O(S), two is O(S²).

# fold: How the tables are made
ran = pd.concat([sweep.backends(run.trace) for run in runs.values()])
kinds = ["implementation", "precision", "direction"]
back_ends = ran.groupby(kinds, sort=False)["backend"].agg(
    lambda names: ", ".join(sorted(set(names)))
)
slopes = sweep.exponents(cells).set_index(kinds)[["time", "memory"]]
plots.table(
    slopes.join(back_ends.rename("ran")).reset_index(),
    {"time": "{:.2f}", "memory": "{:.2f}"},
)

# %%
# What each change gave, at the longest context that both sides have:

# fold: How the table is made
bf16 = ("naive", "naive-compiled", "efficient", "flash", "cudnn")
bf16 = [f"{name}-bf16" for name in bf16 if f"{name}-bf16" in runs]
tf32 = [(name, name.replace("fp32", "tf32")) for name in ladder]
steps = [*itertools.pairwise(ladder), ("naive-fp32", bf16[0])]
steps += [(bf16[0], name) for name in bf16[1:]]
steps += [pair for pair in tf32 if pair[1] in runs]
rows = []
for (old, new), way in itertools.product(steps, WAYS):
    table = columns(old, new)
    table = table[(table["direction"] == way) & (table["status"] == "ok")]
    ns = table.pivot_table(
        index="context", columns="column", values="median_ns"
    )
    ns = ns.reindex(columns=[old, new]).dropna()
    if len(ns):
        row = {"from": old, "to": new, "direction": way}
        row |= {"at context": ns.index[-1]}
        rows.append(
            row | {"times as fast": ns[old].iloc[-1] / ns[new].iloc[-1]}
        )
plots.table(pd.DataFrame(rows), {"times as fast": "{:.2f}"})

# %%
# What the runs say:

# fold: How the answer is put together
compared = sweep.compare(columns("naive-fp32"), on_gpu=on_gpu)
largest = compared.sort_values("context").groupby("direction").tail(2)
error = float(largest["error"].abs().max())
known = ends[ends["outcome"] != "not reached"]
right = int((known["outcome"] == "as forecast").sum())


def last(column, way):
    """Longest context at which a direction was fine."""
    table = columns(column)
    fine = table[(table["direction"] == way) & (table["status"] == "ok")]
    return int(fine["context"].max()) if len(fine) else 0


said = (
    f"attention written out in fp32 went forward up to a context of "
    f"{last('naive-fp32', 'forward'):,} and backward up to "
    f"{last('naive-fp32', 'backward'):,}, of those tried; flash attention in "
    f"bf16 up to {last('flash-bf16', 'backward'):,}. {right} of {len(known)} "
    f"lines ended, or did not, as forecast, and peaks near the end were "
    f"predicted within {max(error, 1e-3):.1%}."
)
ends_at = fits["backward"]
findings = headline(
    said,
    *runs.values(),
    otherwise=(
        f"forward and backward, attention written out should fit an H200 up "
        f"to {ends_at['naive', 'fp32']:,} tokens in fp32, and up to "
        f"{ends_at['naive', 'bf16']:,} in bf16; compiled, in fp32, up to "
        f"{ends_at['naive-compiled', 'fp32']:,}. With flash attention memory "
        f"grows with the context, not its square: "
        f"{ends_at['flash', 'bf16'] / 1e6:.0f} million tokens fit."
    ),
    badge="predicted for an H200",
    **answers,
)
downloads = {
    f"{name}, {run.mode}, as a timeline": run.trace
    for name, run in runs.items()
}
