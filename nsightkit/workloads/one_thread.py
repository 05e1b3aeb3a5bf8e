"""A program that keeps a GPU "100 % utilised" with a single thread that does nothing.

NVML's GPU utilisation is the share of *time* in which any kernel ran. It says nothing about how much of
the GPU that kernel used, and this is the smallest program that shows it.
"""

from __future__ import annotations

import time
from typing import Self

import torch

from nsightkit.workloads.phases import phase

__all__ = ["OneThread", "start"]


class OneThread:
    """Steps that occupy one thread of one multiprocessor (on a CPU: additions to one number).

    Parameters
    ----------
    step_ms : float
        Roughly how long a step lasts.
    device : str
    """

    def __init__(self, step_ms: float, device: str = "cpu") -> None:
        self._step_ms, self._device = step_ms, torch.device(device)
        self._number = torch.ones(1, device=self._device)
        self.data_wait_ns: list[int] = []
        self.parameters = {"step_ms": step_ms}
        # torch.cuda._sleep spins one thread for so many clock ticks; 1.5 GHz is near any clock in use.
        self._ticks = int(step_ms * 1.5e6)

    def step(self) -> None:
        """Keep the device occupied for a while."""
        with phase("step"):
            if self._device.type == "cuda":
                torch.cuda._sleep(self._ticks)  # type: ignore[no-untyped-call]
            else:
                end = time.perf_counter() + self._step_ms / 1e3
                while time.perf_counter() < end:
                    self._number.add_(1)

    def losses(self) -> list[float]:
        """Give nothing: there is nothing to learn here."""
        return []

    def close(self) -> None:
        """Do nothing: there is nothing to end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start(device: str, **parameters: float) -> OneThread:
    """Begin.

    Parameters
    ----------
    device : str
    **parameters
        `step_ms`.

    Returns
    -------
    OneThread
    """
    return OneThread(device=device, **parameters)
