"""The ceilings of this machine's GPU: what large GEMMs and transfers really reach on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nsightkit.analysis.roofline import sol
from nsightkit.capture.children import has_gpu
from nsightkit.errors import NsightkitError
from nsightkit.hardware import slowed_by
from nsightkit.investigations.measurement import measure as measure_part
from nsightkit.investigations.parts import INVESTIGATIONS

__all__ = ["measure"]


def measure(*, echo: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """Measure GEMMs in every precision and transfers, each in a process of its own.

    Parameters
    ----------
    echo : callable, optional
        Takes lines of progress.

    Returns
    -------
    list of dict
        The columns of :func:`nsightkit.hardware.rows`. ``source`` begins with "measured" and says what ran, and when;
        ``clock_mhz`` is the median SM clock meanwhile. Three more: ``power_w``, the median draw; ``busy_pct``, the
        median utilisation, for a ceiling holds at its duty cycle; and ``slowed_by``, what held the clock down in at
        least half of the readings. What could not be read is None. The product of zeros is left out: no work is like
        it.

    Raises
    ------
    NsightkitError
        There is no GPU, or nothing could be measured on it.
    """
    if not has_gpu():
        raise NsightkitError("--measure needs a CUDA GPU, and torch sees none here; run 'nsightkit doctor'")
    say = echo or (lambda _: None)
    rows: list[dict[str, Any]] = []
    for name, part in INVESTIGATIONS["ceilings"].items():
        if part.gpu.get("zeros"):
            continue
        say(f"measuring {name} ...")
        try:
            run = measure_part("ceilings", name)
        except NsightkitError as error:  # a card without this unit; the others count all the same
            say(f"{name}: {error}")
            continue
        times = run.values("step_ns")
        found = sol.ceiling(run.parameters, float(np.median(times)))
        clock, power, busy = (run.median(metric) for metric in ("sm_clock_mhz", "power_w", "gpu_utilization_percent"))
        date = str(run.provenance["utc"])[:10]
        rows.append(
            {
                "gpu": run.provenance["gpu"]["name"],
                "unit": found["unit"],
                "accumulate": None if found["unit"] == "memory" else "fp32",
                "tflops": found["tflops"],
                "gb_per_s": found["gb_per_s"],
                "clock_mhz": None if clock is None else round(clock),
                "source": f"measured {date}: {found['what']}, median of {len(times)}",
                "power_w": None if power is None else round(power),
                "busy_pct": None if busy is None else round(busy),
                "slowed_by": slowed_by(run.values("slowdown_mask")),
            }
        )
    if not rows:
        raise NsightkitError("nothing could be measured on this GPU; the lines above say why")
    return rows
