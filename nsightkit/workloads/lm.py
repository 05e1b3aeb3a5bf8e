"""A decoder language model to measure: forward, backward and optimizer, in any precision, with or without phases.

RMSNorm written as a chain of operations, rotary positions, causal attention (naive, or PyTorch's fused one), SwiGLU, an
untied head, no biases: the model whose cost :mod:`nsightkit.analysis.roofline.envelope` works out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsightkit.workloads.models import Decoder, DecoderConfig, Samples, Workload, autocast, marked

#: Values of ``Run.doing``.
PHASES = ("setup", "copy", "forward", "backward", "optimizer", "zero_grad")

#: Batches that take turns, so that no step finds the embedding rows of its tokens still in the cache.
_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class LMConfig(DecoderConfig):
    """Sizes of the model, which :class:`nsightkit.workloads.models.DecoderConfig` has, and how it runs.

    Parameters
    ----------
    batch : int
        Sequences in one forward pass.
    mode : {"fwd", "fwd_bwd", "train"}
        Forward without a graph; forward and backward; or these and a step of AdamW.
    precision : {"fp32", "tf32", "bf16", "fp16"}
        ``bf16`` and ``fp16`` are autocast over fp32 weights, ``fp16`` with a gradient scaler; ``fp32`` has TF32 off.
    compiled : bool
        Run the model through ``torch.compile``.
    feed : {"device", "host"}
        Tokens that lie on the device, or a copy from pinned host memory within the step, in a phase ``copy``.
    annotate : bool
        Open ``step`` and its phases for a profiler; within forward the ``loss`` and, unless compiled, the ``head``.
    seed : int
    """

    batch: int = 4
    mode: str = "train"
    precision: str = "fp32"
    compiled: bool = False
    feed: str = "device"
    annotate: bool = True
    seed: int = 0


class Run(Workload):
    """A language model that runs one step at a time.

    Parameters
    ----------
    config : LMConfig
    device : str

    Attributes
    ----------
    doing : str
        The current phase, one of :data:`PHASES`; after an out-of-memory error it says where that happened.
    tokens : Tensor
        Batches that take turns, (4, batch, context + 1).
    scaler : GradScaler
        Scales the loss; enabled in fp16 only.
    """

    def __init__(self, config: LMConfig, device: str = "cpu") -> None:
        super().__init__(device)
        self.config = config
        self.doing = "setup"
        self.set_fp32_matmul(config.precision)
        torch.manual_seed(config.seed)
        with self.device:
            self.model = model(config)
            # Never token 0: nothing may be cheap because it is zero.
            self.tokens = torch.randint(1, config.vocabulary, (_BATCHES, config.batch, config.context + 1))
        if config.feed == "host":
            self.tokens = self.tokens.cpu()
            if self.device.type == "cuda":
                self.tokens = self.tokens.pin_memory()
        self.optimizer = None
        if config.mode == "train":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.losses: list[Tensor] = []
        self._forward = torch.compile(self.model) if config.compiled else self.model
        self._batches_taken = 0

    def step(self) -> None:
        """Run the model once, and update the weights in mode ``train``."""
        with self.phase("step"):
            loss = self._run_batch()
            if self.optimizer is not None:
                with self.phase("optimizer"):
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
            if self.config.mode != "fwd":
                with self.phase("zero_grad"):
                    self.model.zero_grad(set_to_none=True)
        self.losses.append(loss)

    def _run_batch(self) -> Tensor:
        """Run forward and, unless the mode is ``fwd``, backward on the next batch; return its loss."""
        tokens = self.tokens[self._batches_taken % _BATCHES]  # drawn once, and used in turn
        self._batches_taken += 1
        has_backward = self.config.mode != "fwd"
        if self.config.feed == "host":
            with self.phase("copy"):
                tokens = tokens.to(self.device, non_blocking=True)
        with self.phase("forward"), torch.set_grad_enabled(has_backward):
            with autocast(self.device, self.config.precision):
                logits = self._forward(tokens[:, :-1])
            with self.phase("loss"):
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        if has_backward:
            with self.phase("backward"):
                torch.autograd.backward(self.scaler.scale(loss))
        return loss.detach()

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Note a phase of :data:`PHASES` in `doing`, and open any phase if the configuration asks for phases.

        Parameters
        ----------
        name : str
        """
        if name in PHASES:
            self.doing = name
        return marked(name, self.config.annotate)

    def samples(self) -> Samples:
        """Give the losses.

        Returns
        -------
        dict of str to list of float
            ``loss``, one per step.
        """
        return {"loss": [float(loss) for loss in self.losses]}


def model(config: LMConfig) -> Decoder:
    """Build the model of a configuration on the default device."""
    # A phase would break a compiled graph in two.
    return Decoder(config, mark_head=config.annotate and not config.compiled)


def run(device: str, **parameters: Any) -> Run:
    """Run a language model.

    Parameters
    ----------
    device : str
        ``"cuda"`` or ``"cpu"``.
    **parameters
        Fields of :class:`LMConfig`.

    Returns
    -------
    Run
        A context manager with ``step()`` and ``samples()``.
    """
    return Run(LMConfig(**parameters), device)
