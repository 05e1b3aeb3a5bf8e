"""Cells of the benchmark as parts of an investigation: a language model's step, and the memory it needed."""

from __future__ import annotations

from typing import Any

import torch

from nsightkit.workloads import lm

__all__ = ["CellRun", "start"]


class CellRun(lm.Run):
    """A language model's run that also says what it saw."""

    def observed(self) -> dict[str, list[float]]:
        """Give losses, and on a GPU the highest memory so far.

        Returns
        -------
        dict of str to list
            ``loss``, one a step; ``peak_allocated_bytes`` and ``peak_reserved_bytes``, one value each. PyTorch's
            allocator counts memory on a GPU only, so a CPU gives none.
        """
        found: dict[str, list[float]] = {"loss": self.losses()}
        if self.device.type == "cuda":
            found["peak_allocated_bytes"] = [torch.cuda.max_memory_allocated(self.device)]
            found["peak_reserved_bytes"] = [torch.cuda.max_memory_reserved(self.device)]
        return found


def start(device: str, **parameters: Any) -> CellRun:
    """Begin to run a cell.

    Parameters
    ----------
    device : str
    **parameters
        Fields of :class:`nsightkit.workloads.lm.LMConfig`.

    Returns
    -------
    CellRun
    """
    return CellRun(lm.LMConfig(**parameters), device)
