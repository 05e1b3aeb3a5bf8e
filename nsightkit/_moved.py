"""Names that are looked up when they are asked for: what takes long to import, and the old names of what has moved.

Old names work for one release, with a warning.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

__all__ = ["MOVED", "install", "lazy", "renamed"]

#: Old module to new one, both within nsightkit.
MOVED = {
    "analysis.accounts": "analysis.ranks.one_rank",
    "analysis.baseline": "analysis.compare.baseline",
    "analysis.calls": "analysis.timeline.calls",
    "analysis.categories": "analysis.core.categories",
    "analysis.check": "analysis.compare.check",
    "analysis.clocks": "analysis.ranks.alignment",
    "analysis.communication": "analysis.ranks.collectives",
    "analysis.compare.sources": "analysis.compare.two_tools",
    "analysis.compare.words": "analysis.compare.diff_words",
    "analysis.diff": "analysis.compare.diff",
    "analysis.diff_memory": "analysis.memory.diff",
    "analysis.diff_text": "analysis.compare.diff_words",
    "analysis.envelope": "analysis.roofline.envelope",
    "analysis.gaps": "analysis.timeline.gaps",
    "analysis.grouped": "analysis.core.grouped",
    "analysis.intervals": "analysis.core.intervals",
    "analysis.kernels": "analysis.timeline.kernels",
    "analysis.ladder": "investigations.pages.climb",
    "analysis.meetings": "analysis.ranks.alignment",
    "analysis.memops": "analysis.timeline.memops",
    "analysis.names": "analysis.core.names",
    "analysis.ncu": "analysis.roofline.counters",
    "analysis.noise": "analysis.core.noise",
    "analysis.nvtx_ops": "analysis.roofline.nvtx_ops",
    "analysis.op_costs": "analysis.roofline.costs",
    "analysis.operators": "analysis.timeline.operators",
    "analysis.overview": "analysis.timeline.overview",
    "analysis.pairing": "analysis.compare.match",
    "analysis.phases": "analysis.timeline.phases",
    "analysis.ranges": "analysis.timeline.ranges",
    "analysis.ranks.accounts": "analysis.ranks.one_rank",
    "analysis.ranks.clocks": "analysis.ranks.alignment",
    "analysis.ranks.meetings": "analysis.ranks.alignment",
    "analysis.ranks.time_spent": "analysis.ranks.one_rank",
    "analysis.replay.handover": "analysis.replay.waiting_threads",
    "analysis.replay.layout": "analysis.replay.play",
    "analysis.roofline.operations": "analysis.roofline.costs",
    "analysis.run_metrics": "analysis.compare.runs",
    "analysis.selection": "analysis.timeline.selection",
    "analysis.snapshot": "analysis.memory.snapshot",
    "analysis.sol": "analysis.roofline.sol",
    "analysis.sources": "analysis.compare.two_tools",
    "analysis.steps": "analysis.timeline.steps",
    "analysis.stepwise": "analysis.compare.per_step",
    "analysis.stragglers": "analysis.ranks.lateness",
    "analysis.sweep": "investigations.pages.sweep",
    "analysis.timeline.gaps.ends": "analysis.timeline.gaps",
    "analysis.timeline.gaps.words": "analysis.timeline.gaps",
    "analysis.whatif": "analysis.replay.whatif",
    "capture.captured": "capture.profiling",
    "capture.child": "investigations.child",
    "capture.investigation": "investigations.measurement",
    "capture.keys": "investigations.what_runs",
    "capture.measured_peaks": "investigations.measure_ceilings",
    "capture.measuring": "investigations.ways_to_measure",
    "capture.observing": "investigations.ways_to_measure",
    "capture.out_of_memory": "workloads.out_of_memory",
    "capture.record": "investigations.record",
    "capture.recordings": "investigations.recordings",
    "capture.remembering": "investigations.ways_to_measure",
    "capture.repeating": "investigations.under_nsight",
    "capture.second": "investigations.under_nsight",
    "capture.sweeping": "investigations.sweep_column",
    "capture.warm": "capture.children",
    "cells": "workloads.attention_samples",
    "investigations.accept": "investigations.recordings",
    "investigations.forked": "capture.children",
    "investigations.keys": "investigations.what_runs",
    "investigations.measured_peaks": "investigations.measure_ceilings",
    "investigations.measuring": "investigations.ways_to_measure",
    "investigations.observing": "investigations.ways_to_measure",
    "investigations.pages.ladder": "investigations.pages.climb",
    "investigations.pages.products": "investigations.pages.published",
    "investigations.pages.published_rates": "investigations.pages.published",
    "investigations.pages.reported": "investigations.pages.published",
    "investigations.plan": "investigations.record",
    "investigations.profiled": "investigations.under_nsight",
    "investigations.remembering": "investigations.ways_to_measure",
    "investigations.repeating": "investigations.under_nsight",
    "investigations.second": "investigations.under_nsight",
    "investigations.sweeping": "investigations.sweep_column",
    "investigations.warm": "capture.children",
    "terminal": "show",
    "trace.scrub": "trace.share",
    "trace.scrub_json": "trace.share.files",
    "trace.scrub_ledger": "trace.share.secrets",
    "trace.scrub_nsys": "trace.share.nsys",
    "trace.secrets": "trace.share.secrets",
    "trace.share.documents": "trace.share.files",
    "trace.share.snapshots": "trace.share.clean",
    "workloads.bench_steps": "workloads.lm",
    "workloads.cells": "workloads.attention_samples",
    "workloads.investigations": "investigations.parts",
    "workloads.played": "workloads.simulated_programs",
}


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} has moved to {new}", DeprecationWarning, stacklevel=3)


class _Old(MetaPathFinder, Loader):
    """Finds the old names; a module of an old name asks the new one for everything."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        package, _dot, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "nsightkit" and name in MOVED else None

    def create_module(self, _: ModuleSpec) -> None:
        """Let the import system make an ordinary one."""

    def exec_module(self, module: ModuleType) -> None:
        new = f"nsightkit.{MOVED[module.__name__.partition('.')[2]]}"
        _warn(module.__name__, new)
        module.__dict__["__getattr__"] = lambda name: getattr(importlib.import_module(new), name)


def install() -> None:
    """Let the old names be imported."""
    if not any(isinstance(finder, _Old) for finder in sys.meta_path):
        sys.meta_path.append(_Old())


def lazy(
    package: str,
    names: Collection[str] = (),
    places: Mapping[str, str] = MappingProxyType({}),
    moved: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Give a package a ``__getattr__`` that imports what is asked for, also the modules that it had, and a ``__dir__``.

    Parameters
    ----------
    package : str
    names : collection of str
        All that it has: modules of its own, and what is in `places`.
    places : mapping of str to str
        The module that a name is in, where it is not a module itself.
    moved : mapping of str to str
        The same of names that the package had.
    """
    there = {**places, **moved}

    def attribute(name: str) -> Any:
        if name in moved:
            _warn(f"{package}.{name}", f"{moved[name]}.{name}")
        if name in there:
            return getattr(importlib.import_module(there[name]), name)
        if name in names or f"{package}.{name}".partition(".")[2] in MOVED:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute, lambda: sorted(names)


def renamed(module: str, names: Mapping[str, tuple[str, Any]]) -> Callable[[str], Any]:
    """Give a module a ``__getattr__`` for functions that have another name now.

    Parameters
    ----------
    module : str
    names : mapping of str to tuple
        By old name: what to write now, and what it gives.
    """

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new, found = names[name]
        _warn(f"{module}.{name}", f"{module}.{new}")
        return found

    return attribute
