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
# record: 20 s
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
from _lib import autocast_types

from nsightkit import plots

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
# To run this page's script. With a GPU it looks at the tensors there, without
# one at those of a CPU:
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
from _lib import autocast

from nsightkit.guide import headline, measure

# Types are the same at any size; bytes are not. With 4,096 tokens of width
# 1024 a layer keeps tens of tensors of 8 MB (bf16) and its scores, 67 MB. The
# bf16 copies of its 12.6 M weights are 25 MB.
sizes = dict(vocabulary=8192, hidden=1024, layers=4, heads=16)
sizes |= dict(context=512, batch=8)

before = measure(
    "autocast/before",
    autocast.run,
    gpu=dict(**sizes, norm="written"),
    small=dict(norm="written"),
)
after = measure(
    "autocast/after",
    autocast.run,
    gpu=dict(**sizes, norm="fused"),
    small=dict(norm="fused"),
)
before

# %%
# Then with the fused one:

after

# %%
# The types of single operations under autocast, and of the model's tensors,
# against the list of the device that measured:

# fold: How the tables are made
by_bits = autocast_types.by_bits


def rules_of(run):
    """Give the list of the device, as the version that measured has it."""
    if run.gpu is None:
        return autocast_types.CPU
    rules = dict(cuda)
    listed = run.rows.loc[run.rows["what"] == "listed", "value"]
    if not (listed == 1).any():
        rules.pop("rms_norm", None)
    return rules


def right_operations(run, rules):
    """Say for each operation that was tried whether the list gave its type."""
    tried = run.rows[run.rows["what"] == "operation"]
    right = []
    for row in tried.itertuples():
        expected = autocast_types.result(rules, row.name, by_bits(row.input))
        right.append(by_bits(row.type) == expected)
    return right


def types_in_model(run, rules):
    """Give the expected and the observed types of the model's tensors."""
    norm = run.parameters["norm"]
    expected = {}
    for name, (kind, _) in autocast_types.in_model(rules, norm).items():
        expected[name] = kind
    frame = pd.DataFrame({"expected": expected})
    for what in ("output", "gradient"):
        observed = autocast_types.types(run.rows, what)
        for precision in observed.columns.drop("fp32", errors="ignore"):
            frame[f"{what}, {precision}"] = observed[precision]
    frame.insert(0, "norm", norm)
    return frame.rename_axis("tensor").reset_index()


right, tensors = [], pd.DataFrame()
if before and after:
    rules = rules_of(before)
    right = right_operations(before, rules)
    tables = [types_in_model(run, rules) for run in (before, after)]
    tensors = pd.concat(tables)
    for column in tensors.filter(like="output"):
        right += list(tensors[column].map(by_bits) == tensors["expected"])
plots.table(tensors) if right else None

# %%
# What belongs to the parameters, and what is kept for backward:

# fold: How the tables are made
OWNED = ("parameter", "parameter gradient", "optimizer")


def kept_by_type(run):
    """MiB that are kept for backward, by type, for each precision."""
    table = autocast_types.kept(run.rows) / 2**20
    return table.groupby(table.index.str.split(", ").str[-1]).sum()


sizes_kept, owned = {}, pd.DataFrame()
if before and after:
    for run in (before, after):
        for precision, parts in kept_by_type(run).items():
            name = f"{run.parameters['norm']}, {precision}"
            sizes_kept[name] = parts.to_dict()
    draw_kept(
        sizes_kept,
        f"What backward needs, by norm ({after.mode})",
        "MiB of a step",
    )
    rows = before.rows[before.rows["what"].isin(OWNED)]
    by_type = rows.groupby(["what", "precision", "type"], sort=False)
    owned = by_type["bytes"].sum().reset_index()
plots.table(owned, {"bytes": "{:,.0f}"}) if len(owned) else None

# %%
# What the runs say:

# fold: How the answer is put together
said = ""
if before and after:
    total = {name: sum(parts.values()) for name, parts in sizes_kept.items()}
    cast = next(p for p in before.rows["precision"].unique() if p != "fp32")
    was = total[f"written, {cast}"] / total["written, fp32"]
    now = total[f"fused, {cast}"] / total["written, fp32"]
    losses = []
    for run in (before, after):
        losses.append(run.rows.loc[run.rows["what"] == "loss", "value"])
    apart = abs(losses[0].to_numpy() - losses[1].to_numpy()).max()
    stayed = "stayed" if set(owned["type"]) == {"fp32"} else "did not all stay"
    lists = "a CPU" if before.gpu is None else "CUDA"
    said = (
        f"parameters, their gradients and the optimizer's state {stayed} "
        f"fp32. What {cast} keeps for backward took {was:.0%} of fp32's "
        f"bytes, and {now:.0%} with a fused norm; the losses differ by at "
        f"most {apart:.1g}. {sum(right)} of {len(right)} types were as the "
        f"lists for {lists} say."
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
