"""
What does autocast really cast?
===============================

A model is trained "in bf16" with ``torch.autocast``, and its memory is far
from halved. Which of its tensors have 16 bits, and who decides?

.. in-short::
"""

# %%
# The symptom
# -----------
# The usual lines, and a question that few programs ask:
#
# .. code-block:: python
#
#    with torch.autocast("cuda", torch.bfloat16):
#        loss = model(tokens)
#    loss.backward()
#    optimizer.step()
#    print({p.dtype for p in model.parameters()})  # {torch.float32}
#
# Autocast changes no tensor. It changes operations: each may stand on a list
# of its device, and the list says in which type the operation is computed. An
# operation on no list follows its inputs, and takes the wider type if they
# differ.

# %%
# Predict: which of these have 16 bits?
# -------------------------------------
# On a GPU, under bf16 autocast: the weights, their gradients, AdamW's moments,
# the output of a linear layer, of a softmax, of ``F.layer_norm``, the sum on
# the residual path, the logits, the loss.
#
# .. dropdown:: Answer
#
#    The outputs of linear layers, and so the logits. Everything else in this
#    list is fp32. Weights are never touched. A gradient has the type of the
#    tensor that it belongs to, so those of weights are fp32, and AdamW's
#    moments are made like the weights. The others stand below.

# %%
# Evidence: the lists of CUDA
# ---------------------------
# PyTorch comes with a header that holds them, also where there is no GPU:

# sphinx_gallery_thumbnail_number = 1
import re
from pathlib import Path

import torch

GIVES = {
    "LOWER_PRECISION_FP": "16 bits",
    "FP32": "fp32",
    "FP32_SET_OPT_DTYPE": "fp32",
}
header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
lists = r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)+.*)"
cuda = {
    operation: GIVES[name]
    for name, text in re.findall(lists, header.read_text(encoding="utf-8"))
    for operation in re.findall(r"_\((\w+)", text)
    if name in GIVES
}

# %%
# For the operations of a transformer:

# fold: How the table is made
import pandas as pd

from nsightkit import plots
from nsightkit.investigations.pages import autocast_types

TRIED = (
    *("linear", "matmul", "scaled_dot_product_attention"),
    *("softmax", "log_softmax", "nll_loss", "layer_norm", "rms_norm"),
    *("pow", "rsqrt", "exp", "sum", "mean", "gelu"),
)
rows = [
    {
        "operation": name,
        "list": cuda.get(name, "none"),
        "gives, of 16 bits": autocast_types.result(cuda, name, "16 bits"),
        "gives, of fp32": autocast_types.result(cuda, name, "fp32"),
    }
    for name in TRIED
]
print("PyTorch", torch.__version__.partition("+")[0])
plots.table(pd.DataFrame(rows))

# %%
# ``rms_norm`` is on the list in newer versions only. From the list follows the
# type of every tensor in a model. This one has a norm behind each projection,
# so that its norms get 16 bits:

# fold: How the table is made
model = autocast_types.in_model(cuda, "written")
rows = [(name, *why) for name, why in model.items()]
plots.table(pd.DataFrame(rows, columns=["output of", "type", "because"]))

# %%
# Many readers are surprised by the residual path: it begins with an fp32
# embedding, and a sum of fp32 and anything is fp32. Each matrix product casts
# it again, and keeps the copy.

# %%
# Change one thing: the norm
# --------------------------
# A norm that is written out meets several rules at once:
#
# .. code-block:: diff
#
#    -centred = x - x.mean(-1, keepdim=True)
#    -scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
#    -x = centred * scale * weight + bias
#    +x = F.layer_norm(x, weight.shape, weight, bias, eps)
#
# Both give fp32 on a GPU: the first because of its weight, the second because
# of the list. They differ in what autograd keeps for backward. Here the casts
# of the list are written as ``.float()``, so that it can be counted anywhere:

import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

weight, bias = torch.ones(2, 4096, requires_grad=True)


def written(x):
    """Layer norm as a chain of elementary operations."""
    centred = x - x.mean(-1, keepdim=True)
    square = centred.float().pow(2)  # pow is on the fp32 list
    scale = torch.rsqrt(square.mean(-1, keepdim=True) + 1e-5)
    return centred * scale * weight + bias


def fused(x):
    """Layer norm as one operation, which is on the fp32 list."""
    return F.layer_norm(x.float(), weight.shape, weight, bias)


def kept(norm, x):
    """Bytes that are kept for backward, each storage once, by type."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        bits = "fp32" if tensor.itemsize == 4 else "16 bits"
        storages[storage.data_ptr()] = (bits, storage.nbytes())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    sizes = pd.DataFrame(storages.values(), columns=["type", "bytes"])
    return sizes.groupby("type")["bytes"].sum().to_dict()


# %%
# For inputs in fp32, and in the 16 bits that a projection gives:

# fold: How the figure is drawn
import matplotlib.pyplot as plt

PARTS = {"fp32": ("#2f7fc1", None), "16 bits": ("#d9690f", "//")}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def draw_kept(sizes, title, axis):
    """Stacked bars of what is kept, by type."""
    height = 1.6 + 0.36 * len(sizes)
    figure, axes = plt.subplots(figsize=(7.6, height), layout="constrained")
    said = []
    for row, (name, parts) in enumerate(sizes.items()):
        left = 0.0
        for part, (colour, hatch) in PARTS.items():
            label = part if row == 0 else None
            look = {"color": colour, "hatch": hatch, "edgecolor": "white"}
            size = parts.get(part, 0.0)
            axes.barh(row, size, 0.7, left=left, label=label, **look)
            left += size
        axes.text(left, row, f"  {left:.1f}", va="center", fontsize=9)
        said.append(f"{name} {left:.1f}")
    axes.set_yticks(range(len(sizes)), list(sizes))
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(axis)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    place = "outside lower center"
    figure.legend(frameon=False, fontsize=9, loc=place, ncols=2)
    figure.set_label(f"{title}, stacked bars, {axis}: {', '.join(said)}.")


KEPT = {}
for norm in (written, fused):
    for kind, dtype in DTYPES.items():
        x = torch.ones(512, 4096, dtype=dtype, requires_grad=True)
        found = kept(norm, x)
        KEPT[f"{norm.__name__}, {kind}"] = {
            bits: size / x.numel() for bits, size in found.items()
        }
draw_kept(
    KEPT,
    "What a norm keeps for backward, with CUDA's casts (exact)",
    "bytes for each element of the input",
)

# %%
# Written out, the norm keeps *more* under autocast than in fp32: the 16-bit
# value for the product, and a copy of it in fp32 for ``pow``. The fused norm
# keeps its input and two numbers a row.

# %%
# Verdict
# -------
# Weights, gradients and AdamW's moments cost the same as in fp32:

STATE = {"weights": 4, "gradients": 4, "AdamW's moments": 8}
print(f"{sum(STATE.values())} bytes a parameter:", STATE)

# %%
# Only what is kept for backward shrinks: to half at best, and not at all where
# a list or an fp32 operand says otherwise. Casting costs memory as well: a
# 16-bit copy of each weight is kept until backward. :doc:`13_memory_ledger`
# counts a whole step.

# %%
# Limits
# ------
# * The lists belong to a version of PyTorch and to a device. A CPU's list is
#   another one: there softmax and the norms leave 16 bits as they are. So a
#   test that passes on a CPU says nothing about the types on a GPU.
# * Bytes kept for backward are not the peak of memory. Temporaries and the
#   allocator's cache come on top.
# * fp16 needs a scaled loss, and bf16 does not: the smallest numbers of fp16
#   are too large for many gradients. The scale changes values, not types.

# %%
# Run it yourself
# ---------------
# With a GPU this looks at every tensor there, without one at those of a CPU:
#
# .. code-block:: console
#
#    $ python examples/06_what_autocast_casts.py
#
# Observing beats remembering. For a model of your own:
#
# .. code-block:: python
#
#    def note(module, _, output):
#        print(type(module).__name__, output.dtype)
#
#    for module in model.modules():
#        module.register_forward_hook(note)

# %%
# Exercises
# ---------
# 1. A norm of the Llama kind takes ``x.square().mean(-1, keepdim=True)``, and
#    another one ``(x * x).mean(-1, keepdim=True)``. Neither ``square`` nor
#    ``mul`` is on the list. With 16 bits in ``x``, which type does each give?
#
#    .. dropdown:: Answer
#
#       The first gives fp32, because ``square`` calls ``pow``, which is on the
#       list. The second gives 16 bits, and so does its mean. Most models call
#       ``x.float()`` first, and then it does not matter.
#
# 2. Is ``cross_entropy`` on the list? In which type is it computed?
#
#    .. dropdown:: Answer
#
#       The list does not name it. It calls ``log_softmax`` and ``nll_loss``,
#       which the list names, so 16-bit logits are copied to fp32: for a large
#       vocabulary that copy is one of the largest tensors of a step.
#
# 3. What would ``model.bfloat16()`` save that autocast does not, and what does
#    it risk?
#
#    .. dropdown:: Answer
#
#       Weights, gradients and moments take half the bytes: 8 a parameter, not
#       16. But updates are then added to 16-bit weights, and small ones are
#       lost.

# %%
# Measured here
# -------------
# .. own-run::
#
# A small language model in which a norm follows each projection. Forward hooks
# note what modules give, tensor hooks the gradients, and
# ``saved_tensors_hooks`` what is kept. First with the norm written out:

# fold: How the runs are compared
from nsightkit.investigations import headline, measure

before = measure("autocast", "before")
after = measure("autocast", "after")
on_gpu = bool(before.provenance["gpu"])
rules = dict(cuda if on_gpu else autocast_types.CPU)
known = before.values("listed/rms_norm")
if on_gpu and not (len(known) and known[0]):
    rules.pop("rms_norm", None)  # as in the version that measured
seen, by_bits = autocast_types.seen, autocast_types.by_bits
precisions = list(seen(before.samples, "output", "tk")["precision"].unique())
casts = [precision for precision in precisions if precision != "fp32"]
before

# %%
# Then with the fused one:

after

# %%
# The types of single operations under autocast, and of the model's tensors,
# against the list of the device that measured:

# fold: How the tables are made
tried = seen(before.samples, "operation", ["operation", "input", "output"])
tried[["input", "output"]] = tried[["input", "output"]].map(by_bits)
pairs = zip(tried["operation"], tried["input"], strict=True)
tried["expected"] = [autocast_types.operation(rules, *p) for p in pairs]
hits = list(tried["output"] == tried["expected"])
tables = []
for run, norm in ((before, "written"), (after, "fused")):
    expected = autocast_types.in_model(rules, norm)
    frame = pd.DataFrame(
        {"expected": {n: t for n, (t, _) in expected.items()}}
    )
    for what in ("output", "gradient"):
        found = seen(run.samples, what, ["tensor", "type"])
        for precision in casts:
            rows = found[found["precision"] == precision]
            types = rows.groupby("tensor", sort=False)["type"].agg(", ".join)
            frame[f"{what}, {precision}"] = types
            if what == "output":
                hits += list(types.map(by_bits) == frame["expected"])
    tables.append(frame.rename_axis("tensor").reset_index())
    tables[-1].insert(0, "norm", norm)
plots.table(pd.concat(tables))

# %%
# What belongs to the parameters, and what is kept for backward:

# fold: How the tables are made
owned = pd.concat(
    seen(before.samples, what, ["type"]).assign(what=what)
    for what in ("parameter", "parameter gradient", "optimizer")
)
fixed = (owned["type"] == "fp32").all()
sizes = {}
for run, norm in ((before, "written"), (after, "fused")):
    table = autocast_types.kept(run.samples) / 2**20
    table = table.groupby(table.index.str.split(", ").str[-1]).sum()
    sizes |= {f"{norm}, {p}": table[p].to_dict() for p in precisions}
draw_kept(
    sizes, f"What backward needs, by norm ({after.mode})", "MiB of a step"
)
plots.table(
    owned[["what", "precision", "type", "bytes"]], {"bytes": "{:,.0f}"}
)

# %%
# What the runs say:

# fold: How the answer is put together
whole = sum(sizes["written, fp32"].values())
was, now = (
    sum(sizes[f"{norm}, {casts[0]}"].values()) / whole
    for norm in ("written", "fused")
)
apart = max(
    abs(before.values(f"loss/{p}") - after.values(f"loss/{p}")).max()
    for p in precisions
)
said = (
    f"parameters, their gradients and the optimizer's state "
    f"{'stayed' if fixed else 'did not all stay'} fp32. What {casts[0]} keeps "
    f"for backward took {was:.0%} of fp32's bytes, and {now:.0%} with a fused "
    f"norm; the losses differ by at most {apart:.1g}. {sum(hits)} of "
    f"{len(hits)} types were as the lists for "
    f"{'CUDA' if on_gpu else 'a CPU'} say."
)
exact = {name: sum(parts.values()) for name, parts in KEPT.items()}
findings = headline(
    said,
    before,
    after,
    otherwise=(
        f"weights, gradients and AdamW's moments stay fp32; the outputs of "
        f"matrix products have 16 bits. A norm that is written out keeps "
        f"{exact['written, bf16']:.0f} bytes for each element under autocast "
        f"and {exact['written, fp32']:.0f} in fp32; a fused one keeps "
        f"{exact['fused, bf16']:.0f}."
    ),
    badge="exact",
)
downloads = {
    f"{run.part}, {run.mode}, as a timeline": run.trace
    for run in (before, after)
}
