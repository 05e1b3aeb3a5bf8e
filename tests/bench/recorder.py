"""What a part costs beside its measurement, by the old way and by today's; and a window on a GPU, played.

``python tests/bench/recorder.py`` records small parts on the CPU, each in a fresh interpreter that asks for all
versions and is waited for, and then as the recorder does it; the table has the seconds beside each measurement. Then it
plays a window of 26 minutes on an H200, in three commands, with the times that were estimated for it.
Options: ``--parts N``, ``--window`` for the window alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

from nsightkit.capture import children
from nsightkit.capture.provenance import FORMAT, slug, tools
from nsightkit.errors import NsightkitError
from nsightkit.investigations import child, record, recordings
from nsightkit.investigations.parts import INVESTIGATIONS, Part, find
from nsightkit.trace import load

#: Minutes of groups of parts as they were estimated for an H200, with 12 s of overhead in each part; of a group, the
#: parts that take longer than the others, in seconds. Second captures are left out.
MINUTES: Mapping[tuple[str, ...], tuple[float, Mapping[str, float]]] = {
    ("gpu-util", "starved-input", "hidden-sync", "tiny-kernels"): (2.2, {}),
    ("bench", "precision"): (3.5, {}),
    ("training-step",): (0.8, {}),
    ("matrix",): (3.7, {}),
    ("ledger", "memory-context", "memory-snapshot"): (5.5, {}),
    ("gate", "one-change"): (3.0, {}),
    ("ceilings",): (4.0, {}),
    ("ladder",): (7.0, {"autotuned": 120}),
    ("decode",): (7.0, {"sums": 120, "triton": 37.5, "streamed": 37.5, "overlapped": 37.5, "one-mlp": 37.5}),
    ("attention-sweep",): (10.0, {}),
    ("roofline", "limiters"): (1.6, {}),
    ("accumulation", "autocast", "late-rank"): (1.5, {}),
}
_OLD_S = 12.0
#: What a CUDA context and CUPTI take, which a fork cannot save, and a CPU does not have.
_CONTEXT_S = 2.5
#: What a second capture was estimated to take.
_CAPTURE_S = 40.0
_GPU = "NVIDIA H200"


def estimated() -> dict[Part, float]:
    """Seconds that parts measure, by the table above."""
    found = {}
    for group, (minutes, slow) in MINUTES.items():
        parts = [part for name in group for part in INVESTIGATIONS[name].values()]
        rest = minutes * 60 - sum(slow.values())
        each = rest / sum(part.name not in slow for part in parts)
        found |= {part: max(slow.get(part.name, each) - _OLD_S, 0.5) for part in parts}
    return found


class AtOnce:
    """An executor that does what it gets there and then, for a thread would see later times."""

    def __init__(self, _workers: int) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@contextmanager
def played(clock: Clock, overhead_s: float, pages: Callable[[float, str], None]) -> Iterator[None]:
    """Replace processes and files by their times: a part takes what was estimated, a process the overhead."""
    takes = estimated()

    def run_children(folders: Mapping[Path, Part], *_: Any, timeout_s: float, **__: Any) -> list[Any]:
        end, found = clock.now + timeout_s, []
        clock.now += overhead_s / 2  # the rest is a part's own: its profile, its provenance
        for folder, part in folders.items():
            clock.now += takes[part] + overhead_s / 2
            if clock.now > end:
                clock.now = end
                found.append(NsightkitError("not done"))
                continue
            facts = {"format": FORMAT, "kind": "measured", "investigation": part.investigation, "part": part.name}
            facts |= {"key": recordings.part_key(part), "gpu": {"name": _GPU}, "duration_s": takes[part]}
            (folder / child.RESULT).write_text(json.dumps({"samples": {}, "provenance": facts}))
            found.append(None)
        return found

    def write(_trace: Any, _samples: Any, provenance: Mapping[str, Any], where: Path, **more: Any) -> Path:
        place = where / provenance["investigation"] / slug(_GPU) / provenance["part"]
        (place / "trace").mkdir(parents=True, exist_ok=True)
        for made in ("samples.parquet", "snapshot.pickle"):
            (place / made).touch()
        (place / "provenance.json").write_text(json.dumps(provenance))
        if more.get("nsys"):
            (place / recordings.NSYS).mkdir()
        if more.get("ncu"):
            (place / recordings.NCU).touch()
        return place

    def capture(part: Part, _mode: str, folder: Path, timeout_s: float) -> dict[str, Any]:
        clock.now += min(timeout_s, _CAPTURE_S)
        if timeout_s < _CAPTURE_S:
            return {"notice": "not done"}
        (folder / recordings.NSYS).mkdir() if part.profiled == "nsys" else (folder / recordings.NCU).touch()
        return {"command": f"{part.profiled} ..."}

    def results(*_: Any) -> list[Any]:
        clock.now += 60  # of at most 90
        return []

    def say(have: Any, last: Part, real: Any = record.completed) -> tuple[str, ...]:
        done = real(have, last)
        for page in done:
            pages(clock.now, page)
        return tuple(done)

    here = {"gpu_name": lambda: _GPU, "tools": dict, "run_children": run_children, "capture_child": capture}
    here |= {"ThreadPoolExecutor": AtOnce, "load": lambda *_, **__: True, "completed": say}
    with (
        mock.patch.multiple(record, **here),
        mock.patch.object(record.time, "monotonic", clock.monotonic),
        mock.patch.object(record.recordings, "write", write),
        mock.patch.object(record.checks, "results", results),
        mock.patch.object(recordings.Recording, "samples", return_value=None),
    ):
        yield


def window(
    where: Path, overhead_s: float, commands: tuple[float, ...] = (520.0, 520.0, 520.0)
) -> tuple[list[tuple[float, str]], list[dict[str, Any]], list[float]]:
    """Play a window in several commands.

    Returns the pages with the seconds until each was complete, what the recorder reported, and the seconds by which
    each command was late.
    """
    clock, pages, rows, late = Clock(), [], [], []
    with played(clock, overhead_s, lambda now, page: pages.append((now, page))):
        for number, budget_s in enumerate(commands):
            begin = clock.now
            rows += record.record(budget_s=budget_s, out=where, preflight=number == 0)
            late.append(clock.now - begin - budget_s)
            clock.now = begin + budget_s
    return pages, rows, late


def one_by_one(parts: list[Part], folder: Path) -> list[float]:
    """Record parts as it was done: a fresh interpreter each, all versions asked in each, nothing side by side."""
    beside = []
    for part in parts:
        begin = time.perf_counter()
        raw = folder / "raw" / part.name
        raw.mkdir(parents=True)
        name = f"{part.investigation}/{part.name}"
        job = {"parts": {str(raw): name}, "mode": "smoke", "kind": "dry-run"}
        children.ask_child("nsightkit.investigations.child", job, 600.0)
        beside.append(_written(raw, folder / "old", begin))
    return beside


def _written(raw: Path, where: Path, begin: float) -> float:
    samples, provenance = child.read_result(raw)
    trace = load(raw / "trace.json.gz", cache=False)
    recordings.write(trace, recordings.frame(samples), provenance, where, dry_run=True)
    return time.perf_counter() - begin - float(provenance["duration_s"])


def as_it_is(parts: list[Part], folder: Path) -> list[float]:
    """Record the same parts with the recorder; what all of them share is shared out."""
    known = tools()  # asked once
    children.fork_child("json.tool", {}, 60.0)  # the process that others are forked from
    begin = time.perf_counter()
    with mock.patch.object(record, "tools", return_value=known):
        rows = record.record([f"{p.investigation}/{p.name}" for p in parts], out=folder / "new", dry_run=True)
    took = time.perf_counter() - begin
    measured = sum(
        float(json.loads((Path(row["detail"]) / "provenance.json").read_text())["duration_s"]) for row in rows
    )
    return [(took - measured) / len(parts)]


def main() -> None:
    """Measure, play and print."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--parts", type=int, default=6)
    options.add_argument("--window", action="store_true")
    given = options.parse_args()
    share = 1 / 3
    if not given.window:
        names = ["before", "fp32", "tf32", "fp16", "layer", "copy", "qkv", "out", "down", "triad", "read"]
        matrix = [part.name for part in INVESTIGATIONS["matrix"].values()]
        groups = {"a process each": ("matrix", matrix), "one process": ("ceilings", names)}
        print(f"{'seconds beside the measurement, a part':42}{'before':>9}{'now':>9}{'share':>9}")
        for label, (group, chosen) in groups.items():
            parts = [find(group, each) for each in chosen[: given.parts]]
            with tempfile.TemporaryDirectory() as folder:
                old, new = one_by_one(parts, Path(folder)), as_it_is(parts, Path(folder))
            before, now = statistics.median(old), statistics.median(new)
            print(f"{f'{group}, {label}, {len(parts)} parts':42}{before:9.2f}{now:9.2f}{now / before:9.0%}")
            share = now / before if label == "a process each" else share
    overhead_s = share * _OLD_S + _CONTEXT_S
    print(f"\na window of 26 minutes in three commands, {overhead_s:.1f} s of overhead a process (was {_OLD_S:g})")
    with tempfile.TemporaryDirectory() as folder:
        pages, rows, late = window(Path(folder), overhead_s)
    for number, (now, page) in enumerate(pages, 1):
        print(f"{now:7.0f} s  {number:2}  {page}")
    for status in ("recorded", "captured", "not captured", "over budget", "failed"):
        print(f"{status}: {len({(r['investigation'], r['part']) for r in rows if r['status'] == status})}")
    print(f"late by {max(late):.0f} s at most")


if __name__ == "__main__":
    main()
