"""One step of the language model on paper: what each operator allocates, and what is alive after it.

The tables below list the operators of :mod:`nsightkit.workloads.lm` in the order in which PyTorch 2.13 dispatches them,
and are tested against it. A row is another table's name with what to fill in, or an operator with five columns:

- when: ``-`` always, ``fwd`` without a graph, ``16`` under bf16 or fp16 autocast and ``32`` without, ``sdpa`` or
  ``naive`` attention, ``copied`` if attention's result comes in another layout than the projection reads, ``softmax32``
  if naive attention has its softmax in fp32 under autocast and ``softmax`` if not;
- the result, by name, which may replace a tensor of that name;
- the item of the ledger that it belongs to;
- its bytes: a number, or ``a`` for the bytes of an activation, times a letter;
- the tensors that nothing reads after it. A forward pass frees no activations that autograd keeps.

``#`` is the layer's number and ``#+`` the next one. The letters count elements: tokens M, the residual stream
W and half of it R, the MLP F, scores S, logits Z; of weights d (a norm), D (attention), N (MLP), H (head). L are the
bytes of log-sum-exps, A of the sums in the derivative of fused attention, T of the loss's targets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from nsightkit.configurations import Configuration
from nsightkit.errors import UsageError

__all__ = ["ITEMS", "MOMENTS", "OPTIMIZERS", "Options", "run"]

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"
ACTIVATIONS, LOGITS, TEMPORARY, CACHE = "activations", "logits", "temporary buffers", "autocast cache"
BUCKETS, INPUTS, WORKSPACE = "communication buckets", "inputs and tables", "library workspaces"

#: What the allocator gives out, by item.
ITEMS = (WEIGHTS, GRADIENTS, STATES, ACTIVATIONS, LOGITS, TEMPORARY, CACHE, BUCKETS, INPUTS, WORKSPACE)
#: Moments of a step: a "peak" is the highest of a phase, an "end" comes after it.
MOMENTS = ("before the step", "forward peak", "forward end", "backward peak", "backward end", "optimizer peak")
#: Bytes an optimizer keeps for a parameter, and bytes it allocates for a parameter while it steps on a GPU.
OPTIMIZERS: Mapping[str, tuple[int, int]] = {
    "adamw": (8, 4),
    "adamw-fused": (8, 0),
    "sgd-momentum": (4, 0),
    "sgd": (0, 0),
}
#: Items that the ranks share, and the stage of ZeRO from which they do.
_SHARED_FROM_STAGE = {WEIGHTS: 3, GRADIENTS: 2, STATES: 1}
#: The largest head that flash attention takes.
_FLASH_HEAD = 256
_BLOCK_BYTES = 512  # the allocator's granularity
_MIB = 1 << 20

_CHOICES: Mapping[str, tuple[object, ...]] = {
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "attention": ("sdpa", "naive"),
    "mode": ("fwd", "fwd_bwd", "train"),
    "optimizer": tuple(OPTIMIZERS),
    "device": ("cuda", "cpu"),
    "stage": (0, 1, 2, 3),
}


@dataclass(frozen=True)
class Options:
    """How a step is run; :func:`nsightkit.analysis.memory.ledger.predict` describes each."""

    precision: str = "bf16"
    attention: str = "sdpa"
    mode: str = "train"
    optimizer: str = "adamw"
    device: str = "cuda"
    stage: int = 0
    ranks: int = 1
    capability: str = "9.0"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"{name} is {value!r}; it can be {', '.join(map(str, allowed))}")
        if self.ranks < 1:
            raise UsageError(f"ranks must be at least 1, not {self.ranks}")


# ---------------------------------------------------------------- the operators

#: Of a layer, or of the last norm; autograd keeps a norm's result only if no cast of it is kept.
_NORM = """
-   square    temporary    4W
-   mean      temporary    4M  square
-   mean+eps  temporary    4M  mean
-   {0}.r     activations  4M  mean+eps
-   {0}.xr    activations  4W  {0}.r
16  {0}.n     temporary    4W  {0}.xr
32  {0}.n     activations  4W  {0}.xr
"""
#: Autocast's casts for a GEMM: of its weight, and of an input that is fp32.
_CAST_WEIGHT = """
16  {0}.w   cache        2{1}
"""
_CAST_BOTH = """
16  {0}.w   cache        2{1}
16  {0}.in  activations  2W
"""
_ROTATE = """
-   product1  temporary    2W
-   product2  temporary    2W
-   first     temporary    2W  product1 product2
-   product1  temporary    2W
-   product2  temporary    2W
-   second    temporary    2W  product1 product2
16  turned    temporary    4W
-   {0}       activations  aW  first second turned
"""
_ATTEND = """
sdpa       #.lse        activations  1L
sdpa       #.attended   activations  aW  #.lse
naive      product      temporary    aS
naive      scaled       temporary    aS  product
naive      masked       temporary    aS  scaled
softmax32  masked32     temporary    4S
softmax32  #.weights    activations  4S  masked32
softmax32  #.weights16  activations  aS
softmax    #.weights    activations  aS
naive      #.v          activations  aW
naive      #.attended   temporary    aW  #.v #.weights #.weights16 masked
copied     #.copy       activations  aW
"""
_EMBEDDING = """
-  x0  activations  4W
"""
_LAYER = """
norm         #.norm1
cast         #.q D
-            #.q0         temporary    aW  #.q.in
cast         #.k D
-            #.k0         temporary    aW  #.k.in
cast         #.v D
sdpa         #.v0         activations  aW  #.v.in
naive        #.v0         temporary    aW  #.v.in
rotate       #.q
rotate       #.k
-            -            temporary    0W  #.q0 #.k0
attend
cast-weight  #.out D
-            #.projected  temporary    aW  #.attended #.v0 #.copy #.q #.k #.norm1.n
-            #.middle     activations  4W  #.projected
norm         #.norm2
cast         #.gate N
-            #.gated      activations  aF  #.gate.in
-            #.silu       activations  aF  #.gated
cast         #.up N
-            #.upped      activations  aF  #.up.in
-            #.product    activations  aF  #.silu #.upped
cast-weight  #.down N
-            #.fed        temporary    aW  #.product
-            x#+          activations  4W  #.norm2.n #.fed #.middle x#
"""
#: The last norm, the head and the loss. In ``x#`` is the number of layers.
_HEAD = """
norm  norm
-     -        temporary  0W  x#
cast  head H
-     logits   logits     aZ  head.in norm.n
"""
_LOSS = """
16   logits32     logits     4Z
-    targets      temporary  1T
-    log_softmax  logits     4Z  logits32
fwd  -            temporary  0W  log_softmax targets
"""

# The backward pass: from gx, the gradient of a layer's result, to that of its input.

_HEAD_BACKWARD = """
-                  gloss    logits     4Z  targets
-                  glogits  logits     4Z  gloss log_softmax
16                 glogits  logits     2Z  glogits
gemm-to-norm       head H W glogits
-                  -        temporary  0W  norm.n
norm-backward      norm
norm-backward-end  norm x#
"""
_LAYER_BACKWARD = """
16                 gbranch  temporary  2W
gemm-backward      #.down N F gbranch #.product
-                  gsilu    temporary  aF
-                  gup      temporary  aF  gin #.silu #.upped
gemm-to-norm       #.up N W gup
-                  ggate    temporary  aF  gsilu #.gated
gemm-add-to-norm   #.gate N ggate #.norm2.n
norm-backward      #.norm2
-                  gx1      temporary  4W  gx1 gx
norm-backward-end  #.norm2 #.middle
16                 gbranch  temporary  2W
gemm-backward      #.out D W gbranch #.copy
attend-backward
rotate-backward    gk
rotate-backward    gq
naive              gv       temporary  aW  gv
gemm-to-norm       #.v D W gv
-                  gk       temporary  aW  gk
gemm-add-to-norm   #.k D gk -
-                  gq       temporary  aW  gq
gemm-add-to-norm   #.q D gq #.norm1.n
norm-backward      #.norm1
-                  gx1      temporary  4W  gx1 gx
norm-backward-end  #.norm1 x#
"""
_EMBEDDING_BACKWARD = """
-  embedding.gradient  gradients  4H  gx
"""
#: Both GEMMs of a derivative.
_GEMM_BACKWARD = """
16  gw            temporary  2{1}
32  {0}.gradient  gradients  4{1}
-   gin           temporary  a{2}  {3} {0}.w {0}.in {4}
16  {0}.gradient  gradients  4{1}  gw
"""
_GEMM_TO_NORM = """
16  gw            temporary  2{1}
32  {0}.gradient  gradients  4{1}
-   gnorm         temporary  a{2}  {3} {0}.w {0}.in
16  gnorm         temporary  4W    gnorm
16  {0}.gradient  gradients  4{1}  gw
"""
_GEMM_ADD_TO_NORM = """
16  gw            temporary  2{1}
32  {0}.gradient  gradients  4{1}
-   gmore         temporary  aW    {2} {0}.w {0}.in {3}
16  gmore         temporary  4W    gmore
-   gnorm         temporary  4W    gnorm gmore
16  {0}.gradient  gradients  4{1}  gw
"""
_NORM_BACKWARD = """
-  gxr           temporary  4W
-  product       temporary  4W
-  {0}.gradient  gradients  4d   product gnorm {0}.xr
-  gx1           temporary  4W
-  product       temporary  4W
-  gr            temporary  4M   product gxr
"""
_NORM_BACKWARD_END = """
-  r_cubed       temporary  12M  gr {0}.r
-  gmean         temporary  4W   r_cubed
-  x_copied      temporary  4W
-  2x            temporary  4W
-  gsquare       temporary  4W   x_copied 2x gmean {1}
-  gx            temporary  4W   gx1 gsquare
"""
_ATTEND_BACKWARD = """
sdpa       sums        temporary  1A
sdpa       gq          temporary  aW
sdpa       gk          temporary  aW
sdpa       gv          temporary  aW
sdpa       -           temporary  0W  gin sums #.q #.k #.v0 #.lse #.attended
naive      contiguous  temporary  aW  gin
naive      gv          temporary  aW
naive      gscores     temporary  aS
naive      -           temporary  0W  contiguous #.v #.weights16
softmax32  gscores     temporary  4S  gscores
softmax32  gscores     temporary  4S  gscores #.weights
softmax32  gscores     temporary  aS  gscores
softmax    gscores     temporary  aS  gscores #.weights
naive      gscores     temporary  aS  gscores
naive      gscores     temporary  aS  gscores
naive      gq          temporary  aW
naive      gk          temporary  aW  gscores #.q #.k
"""
_ROTATE_BACKWARD = """
16  {0}       temporary  4W  {0}
-   product1  temporary  2W
16  product1  temporary  1W  product1
-   product2  temporary  2W
16  product2  temporary  1W  product2
-   minus     temporary  2W
-   product3  temporary  2W
16  product3  temporary  1W  product3
-   -         temporary  0W  minus
-   sum1      temporary  aR  product1 product3
-   product4  temporary  2W
16  product4  temporary  1W  product4
-   -         temporary  0W  {0}
-   sum2      temporary  aR  product2 product4
-   {0}       temporary  aW  sum1 sum2
"""
_TABLES = {
    "norm": _NORM,
    "cast": _CAST_BOTH,
    "cast-weight": _CAST_WEIGHT,
    "rotate": _ROTATE,
    "attend": _ATTEND,
    "gemm-backward": _GEMM_BACKWARD,
    "gemm-to-norm": _GEMM_TO_NORM,
    "gemm-add-to-norm": _GEMM_ADD_TO_NORM,
    "norm-backward": _NORM_BACKWARD,
    "norm-backward-end": _NORM_BACKWARD_END,
    "attend-backward": _ATTEND_BACKWARD,
    "rotate-backward": _ROTATE_BACKWARD,
}
#: The letters of a layer's weights.
_LAYER_WEIGHTS = {
    "norm1": "d",
    "q": "D",
    "k": "D",
    "v": "D",
    "out": "D",
    "norm2": "d",
    "gate": "N",
    "up": "N",
    "down": "N",
}
_ITEM_OF = {"temporary": TEMPORARY, "cache": CACHE}


# ---------------------------------------------------------------- what is alive


def _elements(c: Configuration) -> dict[str, float]:
    """What the letters of the tables count."""
    width = c.tokens * c.d_model
    return {
        "M": c.tokens,
        "W": width,
        "R": width / 2,
        "F": c.tokens * c.d_ff,
        "S": c.batch * c.heads * c.context**2,
        "Z": c.tokens * c.vocabulary,
        "d": c.d_model,
        "D": c.d_model**2,
        "N": c.d_model * c.d_ff,
        "H": c.d_model * c.vocabulary,
        "T": 8 * c.tokens if c.batch > 1 else 0,  # of one sequence they are a view
    }


class _Memory:
    """What is alive, tensor by tensor."""

    def __init__(self, c: Configuration, options: Options) -> None:
        on_gpu = options.device == "cuda"
        casts = options.precision in ("bf16", "fp16")
        self._has_graph = options.mode != "fwd"
        self._block_bytes = _BLOCK_BYTES if on_gpu else 1
        self._activation_bytes = 2 if casts else 4
        self._ranks_of = {}
        for item, stage in _SHARED_FROM_STAGE.items():
            if options.stage >= stage:
                self._ranks_of[item] = options.ranks
        self._alive: dict[str, tuple[str, int]] = {}
        self._by_item = dict.fromkeys(ITEMS, 0)
        self.is_forward = False
        self.peak = self.restart()

        self.elements = _elements(c)
        self._conditions = {"-", options.mode, options.attention, "16" if casts else "32", "copied"}
        if options.attention == "naive":  # autocast has softmax in fp32 on a GPU, and in bf16 on a CPU
            self._conditions.add("softmax32" if casts and on_gpu else "softmax")
        rows = c.context
        if options.attention == "sdpa" and on_gpu and not casts:
            # The memory-efficient kernel: its log-sum-exps of the rows are in 32s, its result is as the projection
            # reads it.
            rows = math.ceil(c.context / 32) * 32
            self._conditions.remove("copied")
        log_sum_exp = 4 * c.batch * c.heads * rows
        self.elements["L"] = log_sum_exp
        self.elements["A"] = log_sum_exp if on_gpu else 0
        if on_gpu and casts:  # flash attention's sum for the gradient of q
            self.elements["A"] += 4 * c.tokens * c.d_model

    def run(self, table: str, layer: int) -> None:
        """Run the operators of a table."""
        table = table.replace("#+", str(layer + 1)).replace("#", str(layer))
        for line in table.strip().splitlines():
            when, *operator = line.split()
            if when in _TABLES:
                self.run(_TABLES[when].format(*operator), layer)
            elif when in self._conditions:
                self._run_operator(*operator)

    def _run_operator(self, result: str, item: str, size: str, *unread: str) -> None:
        number, letter = size[:-1], size[-1]
        count = self._activation_bytes if number == "a" else int(number)
        self.make(result, _ITEM_OF.get(item, item), count * self.elements[letter])
        for tensor in unread:
            if tensor != result:
                self.free(tensor)

    def make(self, name: str, item: str, size: float) -> None:
        """Allocate a tensor; it may replace one of its name, which the operator has read."""
        if item == TEMPORARY and not self._has_graph:
            item = ACTIVATIONS  # nothing is kept: what the layers need is all alike
        rounded = math.ceil(size / self._ranks_of.get(item, 1) / self._block_bytes) * self._block_bytes
        self._by_item[item] += rounded
        if sum(self._by_item.values()) > sum(self.peak.values()):
            self.peak = dict(self._by_item)
        self.free(name)
        self._alive[name] = item, rounded

    def free(self, name: str) -> None:
        """Free a tensor, if there is one of that name and autograd does not keep it."""
        item, size = self._alive.get(name, ("", 0))
        if item and not (item == ACTIVATIONS and self.is_forward and self._has_graph):
            del self._alive[name]
            self._by_item[item] -= size

    def restart(self) -> dict[str, int]:
        """Give what is alive now, and begin to look for the next peak from here."""
        self.peak = dict(self._by_item)
        return self.peak


# ---------------------------------------------------------------- a step


def run(configuration: Configuration, options: Options) -> pd.DataFrame:
    """Run a step through, and give its moments as :func:`nsightkit.analysis.memory.ledger.moments` does."""
    c = configuration
    if options.attention == "sdpa" and options.device == "cuda" and c.d_head > _FLASH_HEAD:
        raise UsageError(f"no fused kernel takes heads of {c.d_head}: predict attention='naive'")
    memory = _Memory(c, options)
    weights = _weights(c, memory.elements)
    _make_residents(memory, weights, c, options)
    amounts = [memory.restart()]
    memory.is_forward = True
    memory.run(_EMBEDDING, 0)
    for layer in range(c.layers):
        memory.run(_LAYER, layer)
    memory.run(_HEAD, c.layers)
    if options.mode == "fwd":
        for name in weights:
            memory.free(f"{name}.w")  # the region ends; with a graph the GEMMs keep the copies
    memory.run(_LOSS, c.layers)
    memory.is_forward = False
    amounts += [memory.peak, memory.restart()]
    if options.mode != "fwd":
        memory.run(_HEAD_BACKWARD, c.layers)
        for layer in reversed(range(c.layers)):
            memory.run(_LAYER_BACKWARD, layer)
        memory.run(_EMBEDDING_BACKWARD, 0)
        amounts += [memory.peak, memory.restart()]
    memory.free("logits")  # a local variable until here
    if options.mode == "train":
        memory.restart()
        _, transient_bytes = OPTIMIZERS[options.optimizer]
        memory.make("roots", TEMPORARY, transient_bytes * _roots(weights, options))
        amounts.append(memory.peak)
    items = list(ITEMS)
    table = pd.DataFrame(amounts, columns=items)
    table.insert(0, "moment", MOMENTS[: len(table)])
    table.insert(1, "total_bytes", table[items].sum(axis=1))
    return table


def _weights(c: Configuration, elements: Mapping[str, float]) -> dict[str, float]:
    """Elements of each weight."""
    weights = {"embedding": elements["H"], "norm": elements["d"], "head": elements["H"]}
    for layer in range(c.layers):
        for name, letter in _LAYER_WEIGHTS.items():
            weights[f"{layer}.{name}"] = elements[letter]
    return weights


def _make_residents(memory: _Memory, weights: Mapping[str, float], c: Configuration, options: Options) -> None:
    """Allocate what is there before a step."""
    kept_bytes, _ = OPTIMIZERS[options.optimizer]
    for name, elements in weights.items():
        memory.make(f"weight {name}", WEIGHTS, 4 * elements)
        if options.mode == "train":
            memory.make(f"state {name}", STATES, kept_bytes * elements)
    tables = 2 * c.context * (c.d_head // 2) * 4
    if options.attention == "naive":
        tables += c.context**2
    tokens = 4 * c.batch * (c.context + 1)
    memory.make("inputs", INPUTS, 8 * tokens + tables)
    if options.ranks > 1:
        # Without stages DistributedDataParallel copies every gradient into its buckets. With them one is reduced while
        # the next fills; or weights of this and the next, whole, and a gradient.
        elements = sum(weights.values())
        if options.stage:
            blocks = 3 if options.stage == 3 else 2
            layer = sum(memory.elements[letter] for letter in _LAYER_WEIGHTS.values())
            elements = blocks * max(layer, memory.elements["H"])
        memory.make("buckets", BUCKETS, 4 * elements)
    if options.device == "cuda":
        handles = 1 if options.mode == "fwd" else 2
        workspace = 32 if options.capability == "9.0" else 8.125
        memory.make("workspace", WORKSPACE, handles * workspace * _MIB)


def _roots(weights: Mapping[str, float], options: Options) -> float:
    """Elements that AdamW needs while it steps: roots of second moments, all at once or tensor by tensor."""
    if options.device == "cuda":
        return sum(weights.values()) / (options.ranks if options.stage >= 1 else 1)
    # The root, its quotient, and the quotient of the tensor before, which its name holds until it is reused.
    sizes = pd.Series(weights)
    return float((2 * sizes + sizes.shift(fill_value=0)).max())
