"""The ceilings of this machine's GPU: what large GEMMs and transfers really reach on it."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsightkit.analysis.roofline import sol
from nsightkit.capture.children import has_gpu
from nsightkit.errors import NsightkitError
from nsightkit.hardware import slowed_by
from nsightkit.investigations.child import read_result, run_children
from nsightkit.investigations.parts import INVESTIGATIONS

__all__ = ["measure"]


def measure(*, echo: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """Measure GEMMs in every precision and transfers, one after the other in one process.

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
    chosen = {name: part for name, part in INVESTIGATIONS["ceilings"].items() if not part.gpu.get("zeros")}
    say(f"measuring {', '.join(chosen)}: about {sum(part.seconds for part in chosen.values()):.0f} s ...")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="nsightkit-", ignore_cleanup_errors=True) as scratch:
        folders = {Path(scratch, name): part for name, part in chosen.items()}
        for folder in folders:
            folder.mkdir()
        failures = run_children(folders, "live", kind="", command="nsightkit peaks --measure", timeout_s=1200.0)
        for folder, failure in zip(folders, failures, strict=True):
            if failure is None:
                rows.append(_row(*read_result(folder)))
            else:  # what a card lacks the unit for is left out, and the others count all the same
                say(f"{folder.name}: {failure}")
    if not rows:
        raise NsightkitError("nothing could be measured on this GPU; the lines above say why")
    return rows


def _row(samples: dict[str, list[float]], provenance: dict[str, Any]) -> dict[str, Any]:
    """Say what one ceiling came to."""
    times = samples["step_ns"]
    found = sol.ceiling(provenance["parameters"], statistics.median(times))
    read = ("sm_clock_mhz", "power_w", "gpu_utilization_percent")
    clock, power, busy = (round(statistics.median(samples[name])) if name in samples else None for name in read)
    return {
        "gpu": provenance["gpu"]["name"],
        "unit": found["unit"],
        "accumulate": None if found["unit"] == "memory" else "fp32",
        "tflops": found["tflops"],
        "gb_per_s": found["gb_per_s"],
        "clock_mhz": clock,
        "source": f"measured {str(provenance['utc'])[:10]}: {found['what']}, median of {len(times)}",
        "power_w": power,
        "busy_pct": busy,
        "slowed_by": slowed_by(samples.get("slowdown_mask", ())),
    }
