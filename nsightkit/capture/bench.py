"""The end-to-end benchmark: step time and peak memory of a language model.

Each cell (a model, a mode, a precision) runs in a separate process, so that it shares no memory, settings or compiled
code with the next cell. Running out of memory is a result: its row names the phase. ``bench.schema.json`` beside this
file describes the document that :func:`bench` returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nsightkit
from nsightkit import hardware
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.capture.children import ask_child, has_gpu
from nsightkit.configurations import Configuration, find
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.text import Json
from nsightkit.trace.files import replacing

#: Version of the document's layout.
FORMAT = 1
#: Fields of a Configuration that the child's LMConfig has as well.
_SIZES = ("batch", "context", "d_model", "layers", "d_ff", "heads", "vocabulary")
#: The same for all cells, with their defaults.
_SWITCHES = {"attention": "sdpa", "compiled": False, "nvtx": False, "annotate_mha": False}
#: Fields of a row from the child; null where it gives none.
_RESULTS = ("where", "detail", "first_step_ns", "peak_allocated_bytes", "peak_reserved_bytes", "clock")
#: Fields of a row computed from its samples.
_FIGURES = ("median_ns", "mean_ns", "std_ns", "tokens_per_s", "tflops", "mfu_datasheet")
#: Time limit of a cell.
_TIMEOUT_S = 600.0


class Cell(NamedTuple):
    """One thing to measure.

    Parameters
    ----------
    configuration : Configuration
        The model, and the batch of one forward pass.
    switches : dict
        ``mode``, ``precision`` and the others that :func:`cells` takes.
    """

    configuration: Configuration
    switches: Json


def cells(
    names: Iterable[str],
    *,
    contexts: Sequence[int] = (),
    batch: int | None = None,
    modes: Sequence[str] = ("train",),
    precisions: Sequence[str] = ("fp32",),
    **switches: Any,
) -> list[Cell]:
    """Make a cell, one thing for :func:`bench` to measure, of every combination.

    Parameters
    ----------
    names : iterable of str
        Configurations.
    contexts : sequence of int
        Context lengths; default: the configuration's own.
    batch : int, optional
        Default: the configuration's own.
    modes : sequence of {"fwd", "fwd_bwd", "train"}
        Forward without autograd; forward and backward; or both and a step of AdamW.
    precisions : sequence of {"fp32", "tf32", "bf16", "fp16"}
    **switches
        The same for all cells: ``attention`` (sdpa or naive); ``compiled``; ``nvtx``, ranges for the timed steps
        (``measure``), each step and its phases; ``annotate_mha``, ranges for the parts of attention in the forward
        pass.

    Returns
    -------
    list of Cell
        Precisions vary fastest.

    Raises
    ------
    UsageError
        An unknown name or mode, or an invalid size.
    """
    switches = _SWITCHES | switches
    if switches["compiled"] and switches["annotate_mha"]:
        raise UsageError("a compiled model has no ranges inside: its parts are fused; leave out one of the two")
    combinations = []
    for name in names:
        model = find(name)
        if batch is not None:
            model = dataclasses.replace(model, batch=batch)
        for context in contexts or (model.context,):
            sized = dataclasses.replace(model, context=context)
            for mode in modes:
                for precision in precisions:
                    combinations.append(Cell(sized, {"mode": mode, "precision": precision, **switches}))
    return combinations


def bench(
    cells_to_measure: Sequence[Cell],
    *,
    device: str | None = None,
    warmup: int = 5,
    steps: int = 10,
    progress: Callable[[int, str], object] = lambda *_: None,
) -> Json:
    """Measure cells, one after the other.

    Parameters
    ----------
    cells_to_measure : sequence of Cell
    device : str, optional
        ``"cpu"`` or a CUDA device; by default CUDA when there is one.
    warmup : int
        Warm-up steps. With 0 the first sample includes all first-use costs.
    steps : int
        Timed steps.
    progress : callable, optional
        Called with the number of finished cells and the label of the next.

    Returns
    -------
    dict
        JSON values; ``docs/bench.md`` describes them.

    Raises
    ------
    UsageError
        The device does not exist.
    """
    document: Json = {
        "format": FORMAT,
        "nsightkit": nsightkit.__version__,
        "device": _chosen_device(device),
        "gpu": None,
        "warmup": warmup,
        "steps": steps,
        "provenance": None,
        "rows": [],
    }
    for number, cell in enumerate(cells_to_measure):
        model, switches = cell
        progress(number, f"{model.name} context {model.context} {switches['mode']} {switches['precision']}")
        try:
            result = _measure_in_child(cell, document)
        except NsightkitError as error:  # a failing cell does not stop the others
            result = {"status": "failed", "detail": str(error)}
        # From the first child that gives them.
        document["provenance"] = document["provenance"] or result.pop("provenance", None)
        document["gpu"] = document["gpu"] or result.get("gpu")
        document["rows"].append(_row_of_cell(cell, result))
    progress(len(cells_to_measure), "")
    return document


def _chosen_device(device: str | None) -> str:
    """Return the device to measure on, by default CUDA where there is one; UsageError if it does not exist."""
    if device is None:
        if has_gpu():
            return "cuda"
        return "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(f"device {device!r} is neither cpu nor cuda nor cuda:N")
    if device != "cpu" and not has_gpu():
        raise UsageError(f"device {device!r}: torch sees no CUDA GPU here; run 'nsightkit doctor'")
    return device


def _measure_in_child(cell: Cell, document: Json) -> Json:
    """Measure a cell in a child process.

    Gives fields of its row; on a GPU also that one's name as ``gpu``; and while the document lacks it, ``provenance``.
    """
    if cell.switches["precision"] == "tf32" and document["device"] == "cpu":
        return {"status": "unsupported", "detail": "TF32 is a mode of tensor cores; on a CPU it would be fp32 again"}
    job = {name: document[name] for name in ("device", "warmup", "steps")}
    job["describe"] = document["provenance"] is None  # the machine is described once, by the first child
    # Fields of LMConfig: the child gets sizes, not names.
    parameters = {name: getattr(cell.configuration, name) for name in _SIZES} | cell.switches
    parameters["annotate"] = parameters.pop("nvtx")  # as LMConfig calls it
    return ask_child("nsightkit.capture.bench_child", {**job, "parameters": parameters}, _TIMEOUT_S)


def _row_of_cell(cell: Cell, result: Json) -> Json:
    """Make a cell's row of the document: its sizes and switches, the child's results, and figures from the samples."""
    model, switches = cell
    cost = envelope(model)  # parameters and FLOPs, computed from the sizes
    row: Json = {"config": model.name, "params": cost.params, "batch": model.batch, "context": model.context}
    row |= switches
    row["status"] = result["status"]
    row |= {name: result.get(name) for name in _RESULTS}
    row |= dict.fromkeys(_FIGURES)  # null without samples; std_ns also with one, mfu_datasheet without a peak
    row["flops"] = cost.fwd_flops if switches["mode"] == "fwd" else cost.train_flops
    row["peak_tflops"] = None
    with contextlib.suppress(UsageError):  # a CPU, or an unlisted GPU
        peak = hardware.find(result.get("gpu") or "").peak(switches["precision"])
        if peak:
            row["peak_tflops"] = peak.tflops
    samples_ns = result.get("samples_ns") or []
    row["samples_ns"] = samples_ns
    if not samples_ns:
        return row
    median_ns = statistics.median(samples_ns)
    row["median_ns"] = round(median_ns)
    row["mean_ns"] = round(statistics.fmean(samples_ns))
    if len(samples_ns) > 1:
        row["std_ns"] = round(statistics.stdev(samples_ns))
    row["tokens_per_s"] = model.tokens / median_ns * 1e9
    row["tflops"] = row["flops"] / median_ns / 1e3  # FLOPs per ns are GFLOP/s
    if row["peak_tflops"]:
        row["mfu_datasheet"] = row["tflops"] / row["peak_tflops"]
    return row


def write(document: Json, path: Path) -> None:
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
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode())
