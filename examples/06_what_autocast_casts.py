"""
What does autocast really cast?
===============================

A model trained "in bf16" with ``torch.autocast`` holds numbers of two types
side by side. Which of its tensors have 16 bits, who decides, and which memory
does that save?

What is measured: the type and the bytes of every tensor in a training step,
by hooks, in fp32 and under autocast. What came out:
:measured:`06_what_autocast_casts.verdict`

What one needs: nothing to read this page, a minute and a CPU with PyTorch to
repeat it. Its types are those of the device it was measured on: the CPU's
lists are not CUDA's.
"""

# %%
# Expectation
# -----------
# Autocast changes no tensor. It changes operations: each may stand on a list
# of its device, and the list says in which type the operation is computed.
# What stands on none follows its inputs, and takes the wider type if they
# differ. The lists, for the operations of a transformer:

# sphinx_gallery_thumbnail_number = 1
import pandas as pd

from nsightkit import plots

LISTS = {  # operation: (CUDA, CPU)
    "linear": ("16 bits", "16 bits"),
    "matmul": ("16 bits", "16 bits"),
    "scaled_dot_product_attention": ("16 bits", "16 bits"),
    "softmax": ("fp32", "none"),
    "log_softmax": ("fp32", "none"),
    "cross_entropy": ("fp32", "fp32"),
    "layer_norm": ("fp32", "none"),
    "rms_norm": ("by version", "none"),
    "pow": ("fp32", "none"),
    "rsqrt": ("fp32", "none"),
    "exp": ("fp32", "none"),
    "sum": ("fp32", "none"),
    "mean": ("none", "none"),
    "gelu": ("none", "none"),
    "product with an fp32 weight": ("none", "none"),
}
lists = [(name, *both) for name, both in LISTS.items()]
plots.table(pd.DataFrame(lists, columns=["operation", "CUDA", "CPU"]))

# %%
# ``rms_norm`` is on CUDA's list in newer versions of PyTorch only; the process
# that measures looks it up in the header of its own. From the lists follows
# the type of every result, and from these the types in a model:


def result(rule, given):
    """Type of a result: by the list, else as wide as the input."""
    return given if rule == "none" else rule


def expected(device, norm):
    """Types in a model whose norms get the output of a projection."""
    column = ("CUDA", "CPU").index(device)
    rule = {name: both[column] for name, both in LISTS.items()}
    # written out, the norm ends in a product with its fp32 weight
    fused = result(rule["layer_norm"], "16 bits")
    return {
        "embedding": "fp32",  # on no list, and its weight is fp32
        "linear": rule["linear"],
        "scores": rule["matmul"],
        "softmax": result(rule["softmax"], "16 bits"),
        "weighted": rule["matmul"],
        "norm": "fp32" if norm == "written" else fused,
        "gelu": result(rule["gelu"], "16 bits"),
        "residual": "fp32",  # fp32 of the embedding plus anything
        "logits": rule["linear"],
        "loss": rule["cross_entropy"],
    }


both = {d: expected(d, "written") for d in ("CUDA", "CPU")}
frame = pd.DataFrame(both).rename_axis("output of").reset_index()
plots.table(frame)

# %%
# The gradient of a tensor has the type of that tensor. So parameters, which
# autocast leaves in fp32, get fp32 gradients, while the gradient of 16-bit
# logits has 16 bits. AdamW's two moments are shaped and typed like the
# parameters. For each parameter that makes, in every precision:

held = {"parameters": 4, "parameter gradients": 4, "optimizer state": 8}
print(f"{sum(held.values())} bytes:", held)

# %%
# Only what is kept for backward can shrink: to half at best, and by less the
# more of it is computed in fp32. Casting costs memory as well: a 16-bit copy
# of each weight is kept until backward.

# %%
# Measure
# -------
# A small language model in which a norm follows each projection, so that it
# gets what a matrix product wrote. The norm is a layer norm written out, from
# ``mean``, ``pow``, ``rsqrt`` and products. Forward hooks note what modules
# give, tensor hooks the gradients, ``saved_tensors_hooks`` what is kept.

from nsightkit.investigations import measure

before = measure("autocast", "before")
before

# %%
# Read
# ----
# First single operations, whose input has 16 bits or is fp32, under autocast
# in each type that the device supports.

device = "CUDA" if before.provenance["gpu"] else "CPU"


def seen(run, what, names):
    """Count the tensors of a kind and their bytes."""
    rows = run.samples[run.samples["metric"].str.startswith(f"{what}/")]
    sums = rows.groupby("metric", sort=False)["value"].agg(["count", "sum"])
    parts = [metric.split("/")[1:] for metric in sums.index]
    frame = pd.DataFrame(parts, columns=["precision", *names])
    sums.columns = ["tensors", "bytes"]
    return frame.join(sums.reset_index(drop=True))


def by_bits(kind):
    """Call both 16-bit types the same."""
    return "16 bits" if kind in ("bf16", "fp16") else kind


def listed(name, where):
    """Look up the list an operation is on, in the version that measured."""
    rule = LISTS[name][("CUDA", "CPU").index(where)]
    if rule == "by version":
        known = before.values(f"listed/{name}")
        rule = "fp32" if len(known) and known[0] else "none"
    return rule


def judged(name, given, where):
    """Type that an operation's result should have."""
    if name == "product with an fp32 weight":
        return "fp32"
    return result(listed(name, where), given)


tried = seen(before, "operation", ["operation", "input", "output"])
tried[["input", "output"]] = tried[["input", "output"]].map(by_bits)
for column, where in (("expected", device), ("on CUDA", "CUDA")):
    pairs = zip(tried["operation"], tried["input"], strict=True)
    tried[column] = [judged(*pair, where) for pair in pairs]
both = tried["output"].groupby([tried["operation"], tried["input"]])
wide = both.agg(lambda kinds: ", ".join(sorted(set(kinds)))).unstack()
wide = wide.reindex(list(LISTS)).add_prefix("of ").reset_index()
wide.insert(1, f"list ({device})", [listed(n, device) for n in LISTS])
agree = (tried["output"] == tried["expected"]).groupby(tried["operation"])
wide["as expected"] = wide["operation"].map(agree.all())
plots.table(wide)

# %%
# That is the device of the provenance block. On a CPU, ``softmax`` and the
# norms leave 16 bits as they are; on CUDA they should not. A test that passes
# on a CPU says nothing about the types on a GPU.
#
# Now the model. One row for each kind of output, with its gradient:

outputs = seen(before, "output", ["tensor", "type"])
gradients = seen(before, "gradient", ["tensor", "type"])
precisions = list(outputs["precision"].unique())
casts = [p for p in precisions if p != "fp32"]


def types(frame, precision):
    """Types of each kind of tensor in one precision."""
    chosen = frame[frame["precision"] == precision]
    return chosen.groupby("tensor", sort=False)["type"].agg(", ".join)


def table_of(run, norm):
    """Put expected and observed types side by side."""
    made = seen(run, "output", ["tensor", "type"])
    back = seen(run, "gradient", ["tensor", "type"])
    frame = pd.Series(expected(device, norm), name="expected").to_frame()
    for precision in precisions:
        frame[precision] = types(made, precision)
    for precision in casts:
        frame[f"gradient, {precision}"] = types(back, precision)
    return frame.rename_axis("output of").reset_index()


model = table_of(before, "written")
plots.table(model)

# %%
# The residual path is the surprise for many: it begins with an fp32
# embedding, and a sum of fp32 and anything is fp32. Each matrix product casts
# it again, and keeps the copy. Parameters and what belongs to them:

kinds = {
    "parameter": "parameters",
    "parameter gradient": "parameter gradients",
    "optimizer": "optimizer state",
}
rows = []
for kind, name in kinds.items():
    found = seen(before, kind, ["type"])
    for _, row in found.iterrows():
        rows.append({"what": name, **row[["precision", "type", "bytes"]]})
owned = pd.DataFrame(rows).astype({"bytes": "int64"})
plots.table(owned)

# %%
# All of it is fp32, whatever autocast is set to. The number of parameters from
# the sizes of the model, and the bytes that it predicts for each row:

sizes = before.parameters
d, layers = sizes["hidden"], sizes["layers"]
number = 2 * sizes["vocabulary"] * d + layers * (12 * d**2 + 4 * d)
for name, each in held.items():
    match = owned.loc[owned["what"] == name, "bytes"]
    more = match.max() - number * each
    print(f"{name}: {number * each:,} bytes, found {more:,} more")

# %%
# What the optimizer has more are its step counters, one number for each
# tensor. Now what is kept for backward, each storage counted once however many
# operations hold it, without the parameters themselves:

import matplotlib.pyplot as plt


def kept(run):
    """Bytes kept for backward in each precision, by kind and type."""
    frame = seen(run, "saved", ["kind", "type"])
    frame = frame[frame["kind"] != "parameter"]
    named = frame["kind"].str.cat(frame["type"].map(by_bits), sep=", ")
    named = named.where(frame["type"].isin(["fp32", *casts]), "other")
    sums = frame["bytes"].groupby([named, frame["precision"]]).sum()
    return sums.unstack(fill_value=0.0)[precisions]


PARTS = {  # colour and hatch of a part of a bar
    "activation, fp32": ("#2f7fc1", None),
    "activation, 16 bits": ("#d9690f", "//"),
    "weight copy, 16 bits": ("#17936b", ".."),
    "other": ("#7d8590", None),
}


def bars(runs, title):
    """Draw a bar for each run and precision."""
    names = [(n, p) for n in runs for p in precisions]
    height = 1.6 + 0.36 * len(names)
    figure, axes = plt.subplots(figsize=(7.6, height), layout="constrained")
    tables = {name: kept(run) for name, run in runs.items()}
    most = max(table.sum().max() for table in tables.values())
    scale, unit = (2**20, "MiB") if most > 2**20 else (2**10, "KiB")
    said = []
    for row, (name, precision) in enumerate(names):
        left, whole = 0.0, tables[name][precision]
        for part, (colour, hatch) in PARTS.items():
            size = whole.get(part, 0.0) / scale
            label = part if row == 0 else None
            look = {"color": colour, "hatch": hatch, "edgecolor": "white"}
            axes.barh(row, size, left=left, height=0.7, label=label, **look)
            left += size
        axes.text(left, row, f"  {left:.1f}", va="center", fontsize=9)
        said.append(f"{name} {precision} {left:.1f} {unit}".strip())
    ticks = [f"{name} {precision}".strip() for name, precision in names]
    axes.set_yticks(range(len(names)), ticks)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(f"kept for backward ({unit})")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    place = "outside lower center"
    figure.legend(frameon=False, fontsize=9, loc=place, ncols=2)
    figure.set_label(f"{title}, stacked bars: {', '.join(said)}.")


bars({"": before}, f"What backward needs ({before.mode})")

# %%
# In shares of the fp32 run, activations and weight copies apart:


def shares(run):
    """Bytes kept, as shares of what fp32 with the written norm keeps."""
    table = kept(run)
    activations = table.drop(index="weight copy, 16 bits", errors="ignore")
    sums = activations.sum()
    copies = table.sum() - sums
    frame = pd.DataFrame({"activations": sums, "weight copies": copies})
    whole = kept(before)["fp32"].sum()
    return (frame / whole).add_prefix("share ")


first = shares(before)
plots.table(first.reset_index())

# %%
# Change one thing
# ----------------
# The norm. What it computes stays the same; it is one operation and not a
# chain:
#
# .. code-block:: python
#
#    x = F.layer_norm(x, weight.shape, weight, bias)
#
# The types it should give follow from its place on the lists, above. The chain
# keeps what each of its operations needs for backward; the fused operation
# keeps its input and two numbers a row, in every precision.

# %%
# Measure again
# -------------

after = measure("autocast", "after")
after

# %%
# The norm's types, before and after:

fused = table_of(after, "fused")
norms = pd.concat([t[t["output of"] == "norm"] for t in (model, fused)])
norms.insert(0, "norm", ["written", "fused"])
plots.table(norms.drop(columns="output of"))

# %%
# And what is kept:

runs = {"written,": before, "fused,": after}
bars(runs, f"What backward needs, by norm ({after.mode})")

# %%
# The losses of the two runs say whether they computed the same, up to the
# rounding of each type:

gpus = [(run.provenance["gpu"] or {}).get("name") for run in (before, after)]
comparable = before.mode == after.mode and gpus[0] == gpus[1]
if comparable:
    for precision in precisions:
        metric = f"loss/{precision}"
        apart = abs(before.values(metric) - after.values(metric)).max()
        print(f"{precision}: losses differ by at most {apart:.2g}")

# %%
# Verdict
# -------
# Computed from the tables above:

import textwrap

hits = list(tried["output"] == tried["expected"])
for table in (model, fused):
    for precision in casts:
        hits += list(table[precision].map(by_bits) == table["expected"])
differ = tried[tried["output"] != tried["on CUDA"]]["operation"].unique()
fixed = (owned["type"] == "fp32").all()
fixed &= (owned.groupby("what")["bytes"].nunique() == 1).all()
second = shares(after)
cast = casts[0]
was, now = (s.loc[cast, "share activations"] for s in (first, second))
where = "in a smoke run on a CPU, " if after.mode == "smoke" else ""
stayed = "stayed fp32" if fixed else "did not all stay fp32"
verdict = (
    f"{where}parameters, their gradients and the optimizer's state {stayed}; "
    f"activations in {cast} took {was:.0%} of fp32's bytes, and {now:.0%} "
    f"with a fused norm. {sum(hits)} of {len(hits)} types were as the lists "
    f"for {'CUDA' if device == 'CUDA' else 'a CPU'} say"
)
if device == "CPU":
    verdict += f"; {len(differ)} operations would differ on CUDA"
verdict += "."
if not comparable:
    verdict = "the two runs are not of the same machine; nothing to compare."
findings = {"verdict": verdict, "written": was, "fused": now}
print(textwrap.fill(verdict))

# %%
# Where the device at hand is not CUDA, this is what would differ there:

print(", ".join(differ) or "nothing")

# %%
# Limits
# ------
# The lists belong to a version of PyTorch and a device. Observing beats
# remembering: a forward hook on one's own model takes three lines.
#
# Bytes kept for backward are not the peak of memory: temporaries, the
# allocator's cache and what the optimizer needs in between come on top. With
# parameters this small, activations are most of it; in a large model with a
# short context they are not, and then autocast saves little. Attention is
# written out here; the fused forms of ``scaled_dot_product_attention`` keep no
# scores at all.
#
# fp16 needs a scaled loss, bf16 does not: the smallest numbers of fp16 are too
# large for many gradients. The scale changes values, not types.

# %%
# The traces of this page, to open in Perfetto or with ``nsightkit``. Each
# precision is a range, and each cast in it an ``aten::_to_copy``:

downloads = {
    f"{run.part}, {run.mode}, as a timeline": run.trace
    for run in (before, after)
}

# %%
# Run it yourself
# ---------------
# With a GPU this measures there, without one the small version on the CPU:
#
# .. code-block:: console
#
#    $ python examples/06_what_autocast_casts.py
#
# For single operations on a device of your own:
#
# .. code-block:: python
#
#    from nsightkit.workloads import autocast
#
#    for (name, given), made in autocast.probe("cuda", "bf16").items():
#        print(f"{name} of {given}: {made}")
#
# To keep a GPU's results for this page:
#
# .. code-block:: console
#
#    $ python -m nsightkit record --only autocast
