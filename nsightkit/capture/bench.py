"""The end-to-end benchmark: how long a step of a language model takes, and how much memory it wants.

Each cell (a model, a mode, a precision) is measured in a process of its own, so that one cell's memory, settings
and compiled code are not the next one's. Running out of memory is a result: a row that says where. The document
:func:`bench` gives is described by ``bench.schema.json`` beside this file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import nsightkit
from nsightkit import hardware
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.capture.children import ask_child, has_gpu
from nsightkit.configurations import Configuration, find
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.trace.files import replacing

__all__ = ["FORMAT", "MODES", "PRECISIONS", "Cell", "bench", "cells", "write"]

#: Version of the document's layout.
FORMAT = 1
MODES = ("fwd", "fwd_bwd", "train")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
_NO_TF32 = {"status": "unsupported", "detail": "TF32 is a mode of tensor cores; on a CPU it would be fp32 again"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Parameters
    ----------
    configuration : Configuration
        The model, and the batch of one forward pass.
    mode : {"fwd", "fwd_bwd", "train"}
        Forward without a graph; forward and backward; or these and a step of AdamW.
    precision : {"fp32", "tf32", "bf16", "fp16"}
    attention : {"sdpa", "naive"}
    compiled : bool
    accumulate : int
        Forward and backward passes a step.
    nvtx : bool
        Mark the timed steps (``measure``), each step and its phases.
    annotate_mha : bool
        Mark the parts of attention in the forward pass.
    """

    configuration: Configuration
    mode: str = "train"
    precision: str = "fp32"
    attention: str = "sdpa"
    compiled: bool = False
    accumulate: int = 1
    nvtx: bool = False
    annotate_mha: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("mode", self.mode, MODES),
            ("precision", self.precision, PRECISIONS),
            ("attention", self.attention, ("sdpa", "naive")),
        ):
            if value not in known:
                raise UsageError(f"{name} {value!r} is not one of {', '.join(known)}")
        if self.accumulate < 1:
            raise UsageError(f"accumulate must be at least 1, not {self.accumulate}")
        if self.compiled and self.annotate_mha:
            raise UsageError("a compiled model has no ranges inside: its parts are fused; leave out one of the two")

    @property
    def flops(self) -> int:
        """FLOPs of a step, as :mod:`nsightkit.analysis.roofline.envelope` counts them."""
        one = envelope(self.configuration)
        return self.accumulate * (one.fwd_flops if self.mode == "fwd" else one.train_flops)


def cells(
    names: Iterable[str],
    *,
    contexts: Sequence[int] = (),
    batch: int | None = None,
    modes: Sequence[str] = ("train",),
    precisions: Sequence[str] = ("fp32",),
    **switches: Any,
) -> list[Cell]:
    """Make a cell of every combination.

    Parameters
    ----------
    names : iterable of str
        Configurations.
    contexts : sequence of int
        Context lengths; the configuration's own when there are none.
    batch : int, optional
        The configuration's own when omitted.
    modes, precisions : sequence of str
    **switches
        The same for all: other fields of :class:`Cell`.

    Returns
    -------
    list of Cell
        Precisions vary fastest.

    Raises
    ------
    UsageError
        A name, a mode or a size that cannot be.
    """
    batches: dict[str, Any] = {} if batch is None else {"batch": batch}
    sizes = [batches | {"context": context} for context in contexts] or [batches]
    return [
        Cell(dataclasses.replace(find(name), **size), mode, precision, **switches)
        for name, size, mode, precision in itertools.product(names, sizes, modes, precisions)
    ]


def bench(
    chosen: Sequence[Cell],
    *,
    device: str | None = None,
    warmup: int = 5,
    steps: int = 10,
    memory_cap_bytes: int | None = None,
    measured_tflops: float | None = None,
    timeout_s: float = 600.0,
    progress: Callable[[int, str], object] | None = None,
) -> dict[str, Any]:
    """Measure cells, one after the other.

    Parameters
    ----------
    chosen : sequence of Cell
    device : str, optional
        ``"cpu"`` or a CUDA device; CUDA when there is one.
    warmup : int
        Steps before the first sample. With 0 the first sample holds all first-use costs.
    steps : int
        Steps timed.
    memory_cap_bytes : int, optional
        What a cell may allocate: of the GPU's memory, or on a CPU (Linux only) on top of what the process has when
        torch is loaded.
    measured_tflops : float, optional
        A ceiling measured on this very card, such as a large GEMM's, in the cells' precision: `mfu_measured` is
        against it.
    timeout_s : float
        Of a cell.
    progress : callable, optional
        Called with how many cells are done and which is next.

    Returns
    -------
    dict
        JSON values; ``docs/bench.md`` describes them.

    Raises
    ------
    UsageError
        There is no such device, or an argument cannot be honoured.
    """
    if warmup < 0 or steps < 1:
        raise UsageError(f"warmup must be at least 0 and steps at least 1, not {warmup} and {steps}")
    if device is None:
        device = "cuda" if has_gpu() else "cpu"
    elif not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(f"device {device!r} is neither cpu nor cuda nor cuda:N")
    elif device != "cpu" and not has_gpu():
        raise UsageError(f"device {device!r}: torch sees no CUDA GPU here; run 'nsightkit doctor'")
    if memory_cap_bytes is not None and device == "cpu" and not sys.platform.startswith("linux"):
        raise UsageError("a memory cap on a CPU needs Linux")
    counts = {"warmup": warmup, "steps": steps, "memory_cap_bytes": memory_cap_bytes}
    document: dict[str, Any] = {
        "format": FORMAT,
        "nsightkit": nsightkit.__version__,
        "device": device,
        "gpu": None,
        **counts,
        "measured_tflops": measured_tflops,
        "provenance": None,
        "rows": [],
    }
    said = progress or (lambda *_: None)
    for number, cell in enumerate(chosen):
        one = cell.configuration
        said(number, f"{one.name} context {one.context} {cell.mode} {cell.precision}")
        asked = {"nvtx": cell.nvtx, "provenance": document["provenance"] is None}
        job = {"device": device, "parameters": _parameters(cell), **asked, **counts}
        try:
            unsupported = cell.precision == "tf32" and device == "cpu"
            found = _NO_TF32 if unsupported else ask_child("nsightkit.capture.bench_child", job, timeout_s)
        except NsightkitError as error:  # whatever goes wrong is that cell's, not the others'
            found = {"status": "failed", "detail": str(error)}
        document["provenance"] = document["provenance"] or found.get("provenance")
        document["gpu"] = document["gpu"] or found.get("gpu")
        document["rows"].append(_row(cell, found, measured_tflops))
    said(len(chosen), "")
    return document


def write(document: dict[str, Any], path: Path) -> None:
    """Write a benchmark's document.

    Parameters
    ----------
    document : dict
        From :func:`bench`.
    path : Path

    Raises
    ------
    UsageError
        It cannot be written there.
    """
    with replacing(path) as file:
        file.write(json.dumps(document, indent=2, allow_nan=False).encode() + b"\n")


def _parameters(cell: Cell) -> dict[str, Any]:
    """Fields of ``LMConfig``: the child gets sizes, not names."""
    sizes = ("batch", "context", "d_model", "layers", "d_ff", "heads", "vocabulary")
    return {
        **{name: getattr(cell.configuration, name) for name in sizes},
        **{name: getattr(cell, name) for name in ("mode", "precision", "attention", "compiled", "accumulate")},
        "annotate": cell.nvtx,
        "annotate_mha": cell.annotate_mha,
    }


def _row(cell: Cell, found: dict[str, Any], measured_tflops: float | None) -> dict[str, Any]:
    one = cell.configuration
    samples = found.get("samples_ns") or []
    median = statistics.median(samples) if samples else None
    achieved = None if median is None else cell.flops / median / 1e3
    peak = None
    with contextlib.suppress(UsageError):  # a CPU, or a GPU whose peaks are not known
        known = hardware.find(found.get("gpu") or "").peak(cell.precision)
        peak = float(known.tflops) if known else None
    return {
        "config": one.name,
        "params": envelope(one).params,
        "batch": one.batch,
        "context": one.context,
        "mode": cell.mode,
        "precision": cell.precision,
        "attention": cell.attention,
        "compiled": cell.compiled,
        "accumulate": cell.accumulate,
        "nvtx": cell.nvtx,
        "annotate_mha": cell.annotate_mha,
        "status": found["status"],
        "where": found.get("where"),
        "detail": found.get("detail"),
        "requested_bytes": found.get("requested_bytes"),
        "median_ns": None if median is None else round(median),
        "mean_ns": round(statistics.fmean(samples)) if samples else None,
        "std_ns": round(statistics.stdev(samples)) if len(samples) > 1 else None,
        "first_step_ns": found.get("first_step_ns"),
        "tokens_per_s": None if median is None else cell.accumulate * one.tokens / median * 1e9,
        "peak_allocated_bytes": found.get("peak_allocated_bytes"),
        "peak_reserved_bytes": found.get("peak_reserved_bytes"),
        "flops": cell.flops,
        "tflops": achieved,
        "peak_tflops": peak,
        "mfu_datasheet": achieved / peak if achieved is not None and peak else None,
        "mfu_measured": achieved / measured_tflops if achieved is not None and measured_tflops else None,
        "clock": found.get("clock"),
        "samples_ns": samples,
    }
