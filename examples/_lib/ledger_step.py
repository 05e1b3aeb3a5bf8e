"""One step of the language model on paper: what each operator allocates, and what is alive after it.

The tables of ``ledger_step.toml`` list the operators of :mod:`nsightkit.workloads.lm` in the order in which PyTorch
2.13 dispatches them, and are tested against it. A row is another table's name with what to fill in, or an operator with
five columns:

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
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nsightkit.configurations import Configuration
from nsightkit.errors import UsageError

__all__ = ["ITEMS", "MOMENTS", "OPTIMIZERS", "WORDS", "Options", "run"]

_STEP = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
#: Items of the ledger: ``alive``, ``formula`` and ``divided_from`` of each.
WORDS: Mapping[str, Mapping[str, Any]] = _STEP["items"]
#: What the allocator gives out, by item.
ITEMS = tuple(WORDS)[:-3]
#: Moments of a step: a "peak" is the highest of a phase, an "end" comes after it.
MOMENTS = ("before the step", "forward peak", "forward end", "backward peak", "backward end", "optimizer peak")
#: Bytes an optimizer keeps for a parameter, and bytes it allocates for a parameter while it steps on a GPU.
OPTIMIZERS: Mapping[str, tuple[int, int]] = _STEP["optimizers"]
_TABLES = _STEP["tables"]
_LAYER_WEIGHTS = _STEP["weights"]
_ITEM_OF = {"temporary": "temporary buffers", "cache": "autocast cache"}
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
    """How a step is run; :func:`_lib.ledger.predict` describes each."""

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

    @property
    def casts(self) -> bool:
        """Whether autocast runs."""
        return self.precision in ("bf16", "fp16")


# ---------------------------------------------------------------- what is alive


def _elements(c: Configuration, options: Options) -> dict[str, float]:
    """What the letters of the tables count."""
    width = c.tokens * c.d_model
    rows = c.context
    on_gpu = options.device == "cuda"
    if on_gpu and options.attention == "sdpa" and not options.casts:
        rows = math.ceil(c.context / 32) * 32  # the memory-efficient kernel
    log_sum_exp = 4 * c.batch * c.heads * rows
    sums = log_sum_exp if on_gpu else 0
    if on_gpu and options.casts:  # flash attention's sum for the gradient of q
        sums += 4 * width
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
        "L": log_sum_exp,
        "A": sums,
    }


def _conditions(options: Options) -> set[str]:
    """When operators run."""
    on_gpu = options.device == "cuda"
    conditions = {"-", options.mode, options.attention, "16" if options.casts else "32"}
    if options.attention == "naive":  # autocast has softmax in fp32 on a GPU, and in bf16 on a CPU
        conditions.add("softmax32" if options.casts and on_gpu else "softmax")
    # The memory-efficient kernel's result is as the projection reads it.
    if options.attention == "naive" or options.casts or not on_gpu:
        conditions.add("copied")
    return conditions


class _Memory:
    """What is alive, tensor by tensor."""

    def __init__(self, c: Configuration, options: Options) -> None:
        self.elements = _elements(c, options)
        self._conditions = _conditions(options)
        self._options = options
        self._has_graph = options.mode != "fwd"
        self._alive: dict[str, tuple[str, int]] = {}
        self._by_item = dict.fromkeys(ITEMS, 0)
        self._moment = ""
        #: What was alive when it was most, in all and by item, at each moment of the step.
        self.highest: dict[str, dict[str, Any]] = {}

    def note(self, moment: str) -> None:
        """Note what is alive; up to the next note it is this moment."""
        self._moment = moment
        total = sum(self._by_item.values())
        if moment not in self.highest or total > self.highest[moment]["total_bytes"]:
            self.highest[moment] = {"moment": moment, "total_bytes": total, **self._by_item}

    def run(self, table: str, layer: int, *filled: str) -> None:
        """Run the operators of a table, with what to fill in."""
        text = _TABLES[table].format(*filled).replace("#+", str(layer + 1)).replace("#", str(layer))
        for line in text.strip().splitlines():
            when, *operator = line.split()
            if when in _TABLES:
                self.run(when, layer, *operator)
            elif when in self._conditions:
                self._run_operator(*operator)

    def _run_operator(self, result: str, item: str, size: str, *unread: str) -> None:
        count = size[:-1]
        if count == "a":
            count = "2" if self._options.casts else "4"
        self.make(result, _ITEM_OF.get(item, item), int(count) * self.elements[size[-1]])
        for tensor in unread:
            if tensor != result:
                self.free(tensor)

    def make(self, name: str, item: str, size: float) -> None:
        """Allocate a tensor; it may replace one of its name, which the operator has read."""
        if item == "temporary buffers" and not self._has_graph:
            item = "activations"  # nothing is kept: what the layers need is all alike
        if self._options.stage >= WORDS[item].get("divided_from", math.inf):
            size /= self._options.ranks
        unit = _BLOCK_BYTES if self._options.device == "cuda" else 1
        rounded = math.ceil(size / unit) * unit
        self._by_item[item] += rounded
        self.note(self._moment)
        self.free(name)
        self._alive[name] = item, rounded

    def free(self, name: str) -> None:
        """Free a tensor, if there is one of that name and autograd does not keep it."""
        item, size = self._alive.get(name, ("", 0))
        is_kept = item == "activations" and self._has_graph and self._moment == "forward peak"
        if item and not is_kept:
            del self._alive[name]
            self._by_item[item] -= size


# ---------------------------------------------------------------- a step


def run(configuration: Configuration, options: Options) -> pd.DataFrame:
    """Run a step through, and give its moments as :func:`_lib.ledger.moments` does."""
    c = configuration
    if options.attention == "sdpa" and options.device == "cuda" and c.d_head > _FLASH_HEAD:
        raise UsageError(f"no fused kernel takes heads of {c.d_head}: predict attention='naive'")
    memory = _Memory(c, options)
    weights = _weights(c, memory.elements)
    _make_residents(memory, weights, c, options)
    memory.highest.clear()
    memory.note("before the step")
    memory.note("forward peak")
    memory.run("embedding", 0)
    for layer in range(c.layers):
        memory.run("layer", layer)
    memory.run("head", c.layers)
    if options.mode == "fwd":
        for name in weights:
            memory.free(f"{name}.w")  # the region ends; with a graph the GEMMs keep the copies
    memory.run("loss", c.layers)
    memory.note("forward end")
    if options.mode != "fwd":
        memory.note("backward peak")
        memory.run("head-backward", c.layers)
        for layer in reversed(range(c.layers)):
            memory.run("layer-backward", layer)
        memory.run("embedding-backward", 0)
        memory.note("backward end")
    memory.free("logits")  # a local variable until here
    if options.mode == "train":
        _, transient_bytes = OPTIMIZERS[options.optimizer]
        memory.note("optimizer peak")
        memory.make("roots", "temporary buffers", transient_bytes * _roots(weights, options))
    return pd.DataFrame(list(memory.highest.values()))


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
        memory.make(f"weight {name}", "weights", 4 * elements)
        if options.mode == "train":
            memory.make(f"state {name}", "optimizer states", kept_bytes * elements)
    tables = 2 * c.context * (c.d_head // 2) * 4
    if options.attention == "naive":
        tables += c.context**2
    tokens = 4 * c.batch * (c.context + 1)
    memory.make("inputs", "inputs and tables", 8 * tokens + tables)
    if options.ranks > 1:
        # Without stages DistributedDataParallel copies every gradient into its buckets. With them one is reduced while
        # the next fills; or weights of this and the next, whole, and a gradient.
        elements = sum(weights.values())
        if options.stage:
            layer = sum(memory.elements[letter] for letter in _LAYER_WEIGHTS.values())
            elements = (3 if options.stage == 3 else 2) * max(layer, memory.elements["H"])
        memory.make("buckets", "communication buckets", 4 * elements)
    if options.device == "cuda":
        handles = 1 if options.mode == "fwd" else 2
        workspace = 32 if options.capability == "9.0" else 8.125
        memory.make("workspace", "library workspaces", handles * workspace * _MIB)


def _roots(weights: Mapping[str, float], options: Options) -> float:
    """Elements that AdamW needs while it steps: roots of second moments, all at once or tensor by tensor."""
    if options.device == "cuda":
        return sum(weights.values()) / (options.ranks if options.stage >= 1 else 1)
    # The root, its quotient, and the quotient of the tensor before, which its name holds until it is reused.
    sizes = pd.Series(weights)
    return float((2 * sizes + sizes.shift(fill_value=0)).max())
