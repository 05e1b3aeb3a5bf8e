"""Keep a GPU "100 % utilised" with a single thread that does nothing (page 01)."""

from __future__ import annotations

import time

import torch

from nsightkit.workloads.models import Workload
from nsightkit.workloads.phases import phase


class OneThread(Workload):
    """Steps that occupy one thread of one multiprocessor, or add to one number on a CPU."""

    def __init__(self, step_ms: float, device: str) -> None:
        super().__init__(device)
        self.step_ms = step_ms
        self.number = torch.ones(1, device=self.device)

    def step(self) -> None:
        """Keep the device occupied for a while."""
        with phase("step"):
            if self.device.type == "cuda":
                # It spins one thread for so many clock ticks; 1.5 GHz is near any clock in use.
                torch.cuda._sleep(int(self.step_ms * 1.5e6))
            else:
                end = time.perf_counter() + self.step_ms / 1e3
                while time.perf_counter() < end:
                    self.number.add_(1)


def run(device: str, step_ms: float) -> OneThread:
    """Occupy one thread.

    Parameters
    ----------
    device : str
    step_ms : float
        About how long a step lasts.

    Returns
    -------
    OneThread
    """
    return OneThread(step_ms, device)
