"""A decoder language model to be measured: forward, backward and optimizer, in any precision, with or without ranges.

Hand-written RMSNorm, rotary positions, causal attention (written out, or PyTorch's fused one), a gated MLP, an
untied head, no biases: the model whose cost :mod:`nsightkit.analysis.roofline.envelope` works out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nsightkit.workloads.models import Decoder, DecoderConfig, part
from nsightkit.workloads.workload import Workload, autocast

__all__ = ["PHASES", "LMConfig", "Run", "model", "start"]

#: What a run is at, as its ``doing`` says.
PHASES = ("setup", "copy", "forward", "backward", "optimizer", "zero_grad")

#: Batches that take turns: a step must not find its tokens' embedding rows in the cache because it just used them.
_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """Sizes, and how the model is run.

    Parameters
    ----------
    batch, context, d_model, layers, d_ff, heads, vocabulary : int
        Sizes; `batch` is that of one forward pass. The defaults suit a CPU.
    mode : {"fwd", "fwd_bwd", "train"}
        Forward without a graph; forward and backward; or these and a step of AdamW.
    precision : {"fp32", "tf32", "bf16", "fp16"}
        ``bf16`` and ``fp16`` are autocast over fp32 weights, ``fp16`` with a gradient scaler; ``fp32`` has TF32 off.
    attention : {"sdpa", "naive"}
        PyTorch's fused attention, or one that writes its scores out.
    compiled : bool
        Run the model through ``torch.compile``.
    accumulate : int
        Forward and backward passes a step; each has its own batch.
    feed : {"device", "host"}
        Where a batch comes from: tokens that lie on the device beforehand, or a copy from pinned host memory within the
        step, in a range ``copy``.
    annotate : bool
        Mark ``step`` and its phases for a profiler; within forward the ``loss`` and, unless compiled, the ``head``.
    annotate_mha : bool
        Mark the parts of attention in the forward pass. What autograd does for them in the backward is not marked.
    seed : int
    """

    batch: int = 4
    context: int = 64
    d_model: int = 64
    layers: int = 2
    d_ff: int = 192
    heads: int = 4
    vocabulary: int = 512
    mode: Literal["fwd", "fwd_bwd", "train"] = "train"
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    attention: Literal["sdpa", "naive"] = "sdpa"
    compiled: bool = False
    accumulate: int = 1
    feed: Literal["device", "host"] = "device"
    annotate: bool = True
    annotate_mha: bool = False
    seed: int = 0


def model(config: LMConfig) -> Decoder:
    """Build the model of a configuration, on the device that is the default."""
    return Decoder(
        DecoderConfig(
            vocabulary=config.vocabulary,
            width=config.d_model,
            layers=config.layers,
            heads=config.heads,
            context=config.context,
            d_ff=config.d_ff,
            attention=config.attention,
            mark_attention=config.annotate_mha,
            mark_head=config.annotate and not config.compiled,  # a mark would break the graph in two
        )
    )


class Run(Workload):
    """A model that is run a step at a time.

    Attributes
    ----------
    doing : str
        What the step is at, one of :data:`PHASES`. When memory runs out it says where.
    tokens : Tensor
        Batches that take turns, (4, batch, context + 1).
    scaler : GradScaler
        Of the loss; it does something in fp16 only.

    Notes
    -----
    The precision of fp32 GEMMs is a setting of the whole process, taken back by ``close``.
    """

    def __init__(self, config: LMConfig, device: str = "cpu") -> None:
        self.doing = "setup"
        super().__init__(config, device)
        self._set_fp32_products(config.precision)
        torch.manual_seed(config.seed)
        with self.device:
            self.model = model(config)
            # Never token 0, and never the same batch twice in a row: nothing may be cheap because it is zero or cached.
            self.tokens = torch.randint(1, config.vocabulary, (_BATCHES, config.batch, config.context + 1))
        if config.feed == "host":
            self.tokens = self.tokens.cpu()
            if self.device.type == "cuda":
                self.tokens = self.tokens.pin_memory()
        self._run = torch.compile(self.model) if config.compiled else self.model
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3) if config.mode == "train" else None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self._given = 0

    def step(self) -> None:
        """Run the model once, and learn from it if the mode says so."""
        with self._phase("step"):
            losses = [self.run_batch() for _ in range(self.config.accumulate)]
            if self._optimizer is not None:
                with self._phase("optimizer"):
                    self.scaler.step(self._optimizer)
                    self.scaler.update()
            if self.config.mode != "fwd":
                with self._phase("zero_grad"):
                    self.model.zero_grad(set_to_none=True)
        # Of several passes, their mean.
        self._losses.append(losses[0] if len(losses) == 1 else torch.stack(losses).mean())

    def run_batch(self) -> Tensor:
        """Pass the next batch forward and, unless the mode is ``fwd``, its loss backward; gives the loss."""
        tokens = self.tokens[self._given % _BATCHES]
        self._given += 1
        learning = self.config.mode != "fwd"
        if self.config.feed == "host":
            with self._phase("copy"):
                tokens = tokens.to(self.device, non_blocking=True)
        with self._phase("forward"), torch.set_grad_enabled(learning):
            with autocast(self.device, self.config.precision):
                logits = self._run(tokens[:, :-1])
            with self._phase("loss"):
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        if learning:
            with self._phase("backward"):
                share = loss if self.config.accumulate == 1 else loss / self.config.accumulate
                torch.autograd.backward(self.scaler.scale(share))
        return loss.detach()

    def _phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        if name in PHASES:
            self.doing = name
        return part(name, self.config.annotate)

    def observed(self) -> dict[str, list[float]]:
        """Give losses, and on a GPU the highest memory so far.

        Returns
        -------
        dict of str to list
            ``loss``, one a step; ``peak_allocated_bytes`` and ``peak_reserved_bytes``, one value each. PyTorch's
            allocator counts memory on a GPU only, so a CPU gives none.
        """
        if self.device.type != "cuda":
            return {"loss": self.losses()}
        allocated, reserved = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return {"loss": self.losses(), "peak_allocated_bytes": [allocated], "peak_reserved_bytes": [reserved]}


def start(device: str, **parameters: Any) -> Run:
    """Begin to run a model, with fields of :class:`LMConfig`."""
    return Run(LMConfig(**parameters), device)
