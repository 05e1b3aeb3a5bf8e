"""Where the memory of a language model's step goes, by the allocator (page 11).

Only a GPU's allocator keeps an account; a CPU runs the same steps and reports sizes that follow from the model alone.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from nsightkit.workloads import lm
from nsightkit.workloads.models import Workload

_WATCHED = ("forward", "backward", "optimizer")


class MemoryRun(lm.Run):
    """A language model's run that notes the allocator's account at each phase of a step.

    Attributes
    ----------
    moments : dict of str to int
        Bytes in the last step: ``before_the_step_bytes``, and of each phase ``…_peak_bytes`` and ``…_end_bytes``.
    """

    def __init__(self, config: lm.LMConfig, device: str) -> None:
        super().__init__(config, device)
        self.moments: dict[str, int] = {}
        self.rule_out_cudnn_attention()  # the prediction is for flash attention's workspace

    def step(self) -> None:
        """Run the model once, and note the moments."""
        if self.device.type == "cuda":
            self.moments = {"before_the_step_bytes": torch.cuda.memory_allocated(self.device)}
        super().step()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Open a phase; on a GPU, note its peak and its end."""
        watched = name in _WATCHED and self.device.type == "cuda"
        if watched:
            torch.cuda.reset_peak_memory_stats(self.device)
        with super().phase(name):
            yield
        if watched:
            self.moments[f"{name}_peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
            self.moments[f"{name}_end_bytes"] = torch.cuda.memory_allocated(self.device)

    def samples(self) -> dict[str, list[float]]:
        """Give the account of the last step, in bytes.

        Returns
        -------
        dict of str to list of float
            One value each: ``weights_bytes``, ``gradients_bytes`` and ``optimizer_states_bytes``, which follow from the
            model, and on a GPU :attr:`moments`. Then ``loss``, one per step.
        """
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        sizes = {"weights_bytes": weights, "gradients_bytes": weights, "optimizer_states_bytes": 0}
        if self.config.mode == "fwd":
            sizes["gradients_bytes"] = 0
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                for value in state.values():
                    if value.dim():  # counts of steps lie on the CPU
                        sizes["optimizer_states_bytes"] += value.nbytes
        sizes |= self.moments
        return {name: [float(size)] for name, size in sizes.items()} | super().samples()


class Contexts(Workload):
    """One model at several contexts, the shortest first, until one does not fit.

    Parameters
    ----------
    contexts : list of int
        Ascending.
    parameters : dict
        Fields of :class:`nsightkit.workloads.lm.LMConfig` but ``context``.
    device : str
    """

    def __init__(self, contexts: list[int], parameters: dict[str, Any], device: str) -> None:
        super().__init__(device)
        self.contexts = contexts
        self.parameters = parameters

    def rows(self) -> Iterator[dict[str, Any]]:
        """Run two steps at each context: an optimizer's states come with the first.

        Yields
        ------
        dict
            ``context``, ``status`` (ok or oom), ``peak_bytes`` and ``limit_bytes`` (what the allocator could have had);
            NaN on a CPU.
        """
        for context in self.contexts:
            self._clean()
            row = self._row(context)
            yield row
            if row["status"] == "oom":
                return

    def _row(self, context: int) -> dict[str, Any]:
        row = {"context": context, "status": "ok", "peak_bytes": float("nan"), "limit_bytes": float("nan")}
        try:
            with run(str(self.device), context=context, **self.parameters) as work:
                work.step()
                work.step()
        except torch.OutOfMemoryError:
            row["status"] = "oom"
            return row
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            row["limit_bytes"] = free + torch.cuda.memory_reserved(self.device)
            row["peak_bytes"] = max(size for name, size in work.moments.items() if name.endswith("_peak_bytes"))
        return row

    def _clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


def run(device: str, **parameters: Any) -> MemoryRun:
    """Run a language model whose memory is watched.

    Parameters
    ----------
    device : str
    **parameters
        Fields of :class:`nsightkit.workloads.lm.LMConfig`.

    Returns
    -------
    MemoryRun
    """
    return MemoryRun(lm.LMConfig(**parameters), device)


def contexts(device: str, context: list[int], **parameters: Any) -> Contexts:
    """Run a language model at several contexts until memory runs out.

    Parameters
    ----------
    device : str
    context : list of int
        Ascending.
    **parameters
        The other fields of :class:`nsightkit.workloads.lm.LMConfig`.

    Returns
    -------
    Contexts
    """
    return Contexts(context, parameters, device)
