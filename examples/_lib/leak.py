"""A training step whose memory grows: a number kept for a plot keeps the graph that made it (page 12).

A hook watches how sure the model is of its predictions: their entropy, one number per step. The fault is that the
number is kept as it comes. It still knows how it was computed, and no backward pass runs through it, so what autograd
saved stays: the predicted probabilities and their logarithms, a row of the vocabulary for each token, every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsightkit.workloads import lm

#: Training steps of a run without a limit, which would otherwise never end.
_STEPS_WITHOUT_LIMIT = 3


class Watched(lm.Run):
    """A language model with a hook that keeps the entropy of each prediction.

    Attributes
    ----------
    entropies : list of Tensor
        One per forward pass, in nats.
    """

    def __init__(self, config: lm.LMConfig, device: str, keep_graph: bool) -> None:
        super().__init__(config, device)
        self.keep_graph = keep_graph
        self.entropies: list[Tensor] = []
        self.model.register_forward_hook(self._watch)

    def _watch(self, _: torch.nn.Module, __: Any, logits: Tensor) -> None:
        """Called by PyTorch after each forward pass."""
        logarithms = logits.float().log_softmax(-1)
        entropy = -(logarithms.exp() * logarithms).sum(-1).mean()
        self.entropies.append(entropy if self.keep_graph else entropy.detach())


class UntilFull(Watched):
    """The same, but the first step trains until the GPU is out of memory; those after it train one batch each.

    Attributes
    ----------
    trained : int
        Training steps that were finished before memory was out.
    out_of_memory : bool
    """

    def __init__(self, config: lm.LMConfig, device: str, keep_graph: bool, limit_bytes: int) -> None:
        super().__init__(config, device, keep_graph)
        self.trained = 0
        self.out_of_memory = False
        self.limited = self.device.type == "cuda"
        if self.limited:
            total_bytes = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total_bytes, 1.0))
            self.callback(torch.cuda.set_per_process_memory_fraction, 1.0)

    def step(self) -> None:
        """Train until memory is out; a CPU, which has no limit here, trains three steps."""
        self.entropies.clear()
        if self.out_of_memory:
            super().step()
            return
        self.trained = 0
        try:
            while self.limited or self.trained < _STEPS_WITHOUT_LIMIT:
                super().step()
                self.trained += 1
        except torch.OutOfMemoryError:
            self.out_of_memory = True
        self.model.zero_grad(set_to_none=True)

    def samples(self) -> dict[str, list[float]]:
        """Give the training steps that were finished."""
        return {"steps": [self.trained]}


def run(device: str, keep_graph: bool = False, limit_bytes: int | None = None, **parameters: Any) -> Watched:
    """Train a language model whose predictions are watched.

    Parameters
    ----------
    device : str
    keep_graph : bool
        Fault: keep the numbers as they come, each with its graph. It holds two fp32 values per logit and step:
        ``8 * batch * context * vocabulary`` bytes.
    limit_bytes : int, optional
        Memory that the process may have on a GPU. The first step then trains until it is out.
    **parameters
        Fields of :class:`nsightkit.workloads.lm.LMConfig`.

    Returns
    -------
    Watched
    """
    config = lm.LMConfig(**parameters)
    if limit_bytes is None:
        return Watched(config, device, keep_graph)
    return UntilFull(config, device, keep_graph, limit_bytes)
