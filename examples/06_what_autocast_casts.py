"""
What does autocast really cast?
===============================

A model is trained "in bf16" with ``torch.autocast``, and its memory is far
from halved. Which of its tensors are bf16, and what decides that?

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
# Autocast never changes a tensor. It changes operations. PyTorch has two lists
# for each device: operations computed in the lower precision, and operations
# computed in fp32. An operation on neither list follows its inputs and takes
# the wider type if they differ.

# %%
# Predict: which of these are bf16?
# ---------------------------------
# On a GPU, under bf16 autocast: the weights, their gradients, AdamW's moments,
# the output of a linear layer, of a softmax, of ``F.layer_norm``, the sum on
# the residual path, the logits, the loss.
#
# .. dropdown:: Answer
#
#    The outputs of linear layers, and so the logits. Everything else in this
#    list is fp32. Weights are never touched. A gradient has the type of its
#    tensor, so weight gradients are fp32, and AdamW's moments are created like
#    the weights. We derive the rest below.

# %%
# Evidence: what do CUDA's lists contain?
# ---------------------------------------
# PyTorch ships a header that contains the lists, even in a CPU build:

# sphinx_gallery_thumbnail_number = 1
# record: 20 s
import re
from pathlib import Path

import torch

GIVES = {
    "LOWER_PRECISION_FP": "half precision",
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
        "from bf16": autocast_types.result(cuda, name, "half precision"),
        "from fp32": autocast_types.result(cuda, name, "fp32"),
    }
    for name in TRIED
]
print("PyTorch", torch.__version__.partition("+")[0])
plots.table(pd.DataFrame(rows))

# %%
# ``rms_norm`` is on the list in newer versions only. From the lists follows
# the type of every tensor in a model. In this model a norm follows each
# projection, so that its norms receive bf16:

# fold: How the table is made
model = autocast_types.in_model(cuda, "written")
rows = [(name, *why) for name, why in model.items()]
plots.table(pd.DataFrame(rows, columns=["output of", "type", "because"]))

# %%
# The residual path surprises many readers. It starts from an fp32 embedding,
# and fp32 plus anything is fp32. Each matmul then casts it again and keeps the
# copy.

# %%
# Change one thing: the norm
# --------------------------
# A hand-written norm meets several rules at once:
#
# .. code-block:: diff
#
#    -centred = x - x.mean(-1, keepdim=True)
#    -scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
#    -x = centred * scale * weight + bias
#    +x = F.layer_norm(x, weight.shape, weight, bias, eps)
#
# Both versions return fp32 on a GPU: the first because of its weight, the
# second because of the list. They differ in the tensors that autograd keeps
# for backward. We write the list's casts as ``.float()`` here, so that the
# bytes can be counted on any machine:

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
        bits = "fp32" if tensor.itemsize == 4 else "half precision"
        storages[storage.data_ptr()] = (bits, storage.nbytes())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    sizes = pd.DataFrame(storages.values(), columns=["type", "bytes"])
    return sizes.groupby("type")["bytes"].sum().to_dict()


# %%
# For fp32 inputs, and for the bf16 output of a projection:

# fold: How the figure is drawn
import matplotlib.pyplot as plt

PARTS = {"fp32": ("#2f7fc1", None), "half precision": ("#d9690f", "//")}
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
# Under autocast the hand-written norm keeps *more* than in fp32: the bf16
# value for the multiplication, and an fp32 copy of it for ``pow``. That is
# :measured:`06_what_autocast_casts.written_bf16:.0f` bytes per element instead
# of :measured:`06_what_autocast_casts.written_fp32:.0f`. The fused norm keeps
# its input and two numbers per row.

# %%
# Verdict
# -------
# Weights, gradients and AdamW's moments cost the same as in fp32:

STATE = {"weights": 4, "gradients": 4, "AdamW's moments": 8}
print(f"{sum(STATE.values())} bytes a parameter:", STATE)

# %%
# Only the tensors kept for backward shrink, to half at most, and those on the
# fp32 list or with an fp32 operand do not shrink. Casting costs memory as
# well: a bf16 copy of each weight is kept until backward.
# :doc:`11_memory_ledger` adds up a whole step, and :doc:`09_precision` asks
# what bf16 does to its time. (The :ref:`worked example <example-left>` of the
# guide ran in fp32.)

# %%
# Limits
# ------
# * The lists belong to a version of PyTorch and to a device. A CPU has
#   different lists: softmax and norms keep bf16 there. A test that passes on a
#   CPU therefore tells us nothing about types on a GPU.
# * Bytes kept for backward are not the peak of memory. Temporaries and the
#   allocator's cache come on top.
# * fp16 needs a scaled loss, and bf16 does not: many gradients are smaller
#   than fp16's smallest numbers. The scale changes values, not types.

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
# Print the dtypes of your own model instead of memorizing the list:
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
# 1. A Llama-style norm computes ``x.square().mean(-1, keepdim=True)``, and
#    another one ``(x * x).mean(-1, keepdim=True)``. Neither ``square`` nor
#    ``mul`` is on the list. With bf16 in ``x``, which type does each give?
#
#    .. dropdown:: Answer
#
#       The first gives fp32, because ``square`` calls ``pow``, which is on the
#       list. The second gives bf16, and so does its mean. Most models call
#       ``x.float()`` first, and then it does not matter.
#
# 2. Is ``cross_entropy`` on the list? In which type is it computed?
#
#    .. dropdown:: Answer
#
#       The list does not name it. It calls ``log_softmax`` and ``nll_loss``,
#       which are on the fp32 list, so bf16 logits are copied to fp32. For a
#       large vocabulary that copy is one of the largest tensors of a step.
#
# 3. What would ``model.bfloat16()`` save that autocast does not, and what does
#    it risk?
#
#    .. dropdown:: Answer
#
#       Weights, gradients and moments take half the bytes: 8 per parameter
#       instead of 16. But updates are then added to bf16 weights, and small
#       ones are lost (:doc:`05_mixed_precision_accumulation`).

# %%
# Measured here
# -------------
# .. own-run::
#
# A small language model in which a norm follows each projection. Forward hooks
# record the types of outputs, tensor hooks those of gradients, and
# ``saved_tensors_hooks`` the bytes kept. First with the hand-written norm:

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
# The types of single operations under autocast and of the model's tensors,
# compared with the list of the device that ran them:

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
# The tensors that belong to the parameters, and those kept for backward:

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
# The answer from the runs:

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
        f"matmuls are bf16. A hand-written norm keeps "
        f"{exact['written, bf16']:.0f} bytes per element under autocast "
        f"and {exact['written, fp32']:.0f} in fp32; a fused one keeps "
        f"{exact['fused, bf16']:.0f}."
    ),
    badge="exact",
    written_bf16=exact["written, bf16"],
    written_fp32=exact["written, fp32"],
)
