"""
What does autocast really cast?
===============================

A model is trained "in bf16" with ``torch.autocast``, and its memory is far
from halved. Which of its tensors are bf16, and what decides that?

.. in-short::
"""

# %%
# The symptom: ten percent saved, not fifty
# -----------------------------------------
# The usual lines, and a check that few programs make:
#
# .. code-block:: python
#
#    with torch.autocast("cuda", torch.bfloat16):
#        loss = model(tokens)
#    loss.backward()
#    optimizer.step()
#    print({p.dtype for p in model.parameters()})  # {torch.float32}
#
# What a step of a model with 423 million parameters holds at its peak, in fp32
# and under autocast, from the ledger of :doc:`11_memory_ledger`. The peak is
# at the start of the backward pass, before any gradient exists:

# sphinx_gallery_thumbnail_number = 1
# record: 20 s
# fold: How the figure is made
import pandas as pd
import torch
import torch.nn.functional as F
from _lib import autocast, autocast_types, ledger

from nsightkit import plots
from nsightkit.configurations import find
from nsightkit.guide import headline, measure

peaks = {}
for precision in ("fp32", "bf16"):
    table = ledger.predict(find("medium"), precision=precision)
    peaks[precision] = table.set_index("item")["predicted_bytes"].dropna()
TITLE = "A training step at its peak (exact arithmetic)"
plots.stacks(peaks, quantity="memory", title=TITLE)

# %%
# Predict: which of these are bf16?
# ---------------------------------
# Autocast never changes a tensor. It changes operations. PyTorch has two lists
# for each device: operations computed in the lower precision, and operations
# computed in fp32. An operation on neither list follows its inputs and takes
# the wider type if they differ.
#
# On a GPU, under bf16 autocast, which of these are bf16: the weights, their
# gradients, AdamW's moments, the output of a linear layer, of a softmax, of
# ``F.layer_norm``, the sum on the residual path, the logits, the loss?
#
# .. dropdown:: Answer
#
#    The outputs of linear layers, and so the logits. Everything else in this
#    list is fp32. Weights are never touched. A gradient has the type of its
#    tensor, so weight gradients are fp32, and AdamW's moments are created like
#    the weights. We derive the rest below.

# %%
# Evidence: what do PyTorch's lists for CUDA contain?
# ---------------------------------------------------
# PyTorch ships the lists in a header, even in a CPU build. For the operations
# of a transformer:

# fold: How the lists are read
cuda = autocast_types.cuda_lists()
as_bf16 = {"half precision": "bf16"}  # the lists serve fp16 as well
listed = {"half precision": [], "fp32": [], "none": []}
for name in autocast_types.OF_A_TRANSFORMER:
    listed[cuda.get(name, "none")].append(name)
rows = [(kind, ", ".join(names)) for kind, names in listed.items()]
lists = pd.DataFrame(rows, columns=["list", "operations"])
plots.table(lists.replace(as_bf16))

# %%
# From the lists follows the type of every tensor in a model. In this one a
# norm follows each projection, so that its norms receive bf16:

# fold: How the table is made
model = autocast_types.in_model(cuda, "written")
rows = [(name, *why) for name, why in model.items()]
types = pd.DataFrame(rows, columns=["output of", "type", "because"])
plots.table(types.replace(as_bf16))

# %%
# The residual path starts from an fp32 embedding, and fp32 plus anything is
# fp32. Each matmul then casts it again and keeps the copy.

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
# for backward. We count their bytes, with the list's casts as ``.float()`` so
# that this works on any machine:

# fold: How the figure is made
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


kept = {}
for name, norm in {"hand-written": written, "fused": fused}.items():
    for kind, dtype in ("fp32", torch.float32), ("bf16", torch.bfloat16):
        x = torch.ones(512, 4096, dtype=dtype, requires_grad=True)
        sizes = autocast_types.saved_by(norm, x) / x.numel()
        kept[f"{name}, {kind}"] = sizes.rename(as_bf16)
plots.stacks(
    kept,
    quantity="memory",
    axis="kept for each element",
    title="What a norm keeps for backward, with CUDA's casts (exact)",
)

# %%
# Under autocast the hand-written norm keeps *more* than in fp32:
# :measured:`06_what_autocast_casts.written_bf16:.0f` bytes per element instead
# of :measured:`06_what_autocast_casts.written_fp32:.0f`. In fp32 these are two
# tensors of four bytes per element: the centred values, and the product that
# the gradient of ``weight`` needs. Under autocast that product is fp32 as
# well. The centred values are kept twice: in bf16 (two bytes) for the
# multiplication, and as an fp32 copy (four bytes) for ``pow``. The fused norm
# keeps its fp32 input and two numbers per row.

# %%
# Verdict
# -------
# Autocast casts the operands of matmuls. Operations on neither list follow
# their inputs. Weights, gradients and AdamW's moments cost the same as in
# fp32: four fp32 numbers per parameter. Only the tensors kept for backward
# shrink, to half at most. Those on the fp32 list or with an fp32 operand do
# not. Casting costs memory as well: a bf16 copy of each weight is kept until
# backward. If memory is the problem, look for hand-written norms and losses
# first. :doc:`09_precision` asks what bf16 does to the time.

# %%
# Limits
# ------
# * The lists belong to a version of PyTorch and to a device. A CPU has
#   different lists: softmax and norms keep bf16 there. A test that passes on a
#   CPU therefore proves nothing about types on a GPU.
# * Bytes kept for backward are not the peak of memory. Temporaries and the
#   allocator's cache come on top.
# * fp16 needs a scaled loss, and bf16 does not: many gradients are smaller
#   than fp16's smallest numbers. The scale changes values, not types.

# %%
# Run it yourself
# ---------------
# On a GPU, this page's script also records the types of a small model's
# tensors. Without a GPU it looks at those on the CPU, whose lists differ:
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
# A small language model in which a norm follows each projection, with the
# hand-written norm and with the fused one. Hooks record the types of outputs
# and gradients, and the bytes kept for backward.

# Types are the same at any size; bytes are not. With 4,096 tokens of width
# 1024, each layer keeps tens of tensors of 8 MB (bf16) and its scores, 67 MB.
# The bf16 copies of its 12.6 M weights are 25 MB.
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

# fold: How the tables are made
ran = [before, after] if before and after else []
tensors = autocast_types.compared(ran, cuda)
if ran:
    columns = autocast_types.kept_by_run(ran)
    title = f"What backward needs, by norm ({after.mode})"
    plots.stacks(columns, quantity="memory", title=title)
plots.table(tensors) if ran else None

# %%

owned = autocast_types.owned(before)
plots.table(owned, {"bytes": "{:,.0f}"}) if len(owned) else None

# %%

# fold: How the answer is put together
exact = {name: sizes.sum() for name, sizes in kept.items()}
saved = 1 - peaks["bf16"].sum() / peaks["fp32"].sum()
findings = headline(
    autocast_types.answer(ran, cuda) if ran else "",
    before,
    after,
    otherwise=(
        f"Only the operands of matmuls. Weights, gradients and AdamW's "
        f"moments stay fp32, so a training step saves only {saved:.1%} of its "
        f"memory. (The model has 423 M parameters.) A hand-written norm keeps "
        f"{exact['hand-written, bf16']:.0f} bytes per element under autocast "
        f"and {exact['hand-written, fp32']:.0f} in fp32; a fused one keeps "
        f"{exact['fused, bf16']:.0f}."
    ),
    badge="exact",
    written_bf16=exact["hand-written, bf16"],
    written_fp32=exact["hand-written, fp32"],
)
