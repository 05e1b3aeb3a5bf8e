"""A program that keeps a GPU "100 % utilised" with a single thread that does nothing.

NVML's GPU utilisation is the share of *time* in which any kernel ran. It says nothing about how much of
the GPU that kernel used, and this is the smallest program that shows it.
"""

from __future__ import annotations

import dataclasses
import time

import torch

from nsightkit.workloads.phases import phase
from nsightkit.workloads.workload import Workload

__all__ = ["OneThread", "OneThreadConfig", "start"]


@dataclasses.dataclass(frozen=True)
class OneThreadConfig:
    """Roughly how long a step lasts."""

    step_ms: float


class OneThread(Workload):
    """Steps that occupy one thread of one multiprocessor (on a CPU: additions to one number)."""

    def __init__(self, config: OneThreadConfig, device: str = "cpu") -> None:
        super().__init__(config, device)
        self._number = torch.ones(1, device=self.device)

    def step(self) -> None:
        """Keep the device occupied for a while."""
        with phase("step"):
            if self.device.type == "cuda":
                # It spins one thread for so many clock ticks; 1.5 GHz is near any clock in use.
                torch.cuda._sleep(int(self.config.step_ms * 1.5e6))  # type: ignore[no-untyped-call]
            else:
                end = time.perf_counter() + self.config.step_ms / 1e3
                while time.perf_counter() < end:
                    self._number.add_(1)


def start(device: str, **parameters: float) -> OneThread:
    """Begin, with fields of :class:`OneThreadConfig`."""
    return OneThread(OneThreadConfig(**parameters), device)
