"""Case files: recordings that other people published of their GPUs, analysed here and now.

``docs/cases/<case>`` holds the recordings and ``source.json``: repository, commit, licence, GPU and limits. Traces are
the Parquet folders that ``nsightkit convert`` writes, a memory snapshot is a pickle as PyTorch writes it, a report of
Nsight Compute is a CSV of its counters.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import nsightkit
from nsightkit.errors import UsageError
from nsightkit.text import Json
from nsightkit.trace import ncu
from nsightkit.trace import snapshot as snapshots

if TYPE_CHECKING:
    from nsightkit.api import Trace

#: The case that is installed with nsightkit, so that there is a trace to try.
DEMO = "v100-starved-loader"


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One recording of a case file, and where it comes from.

    Parameters
    ----------
    name, which : str
        The case, and which of its recordings.
    path : Path
        What every command reads: a trace's Parquet folder, a snapshot's pickle, or a CSV of Nsight Compute's counters.
    source : dict
        ``repository, commit, paths, licence, licence_file, gpu, program, limits``, as in ``source.json``.
    """

    name: str
    which: str
    path: Path
    source: Json

    @functools.cached_property
    def trace(self) -> Trace:
        """The whole trace, with the questions as methods."""
        return nsightkit.load(self.path, cache=False)

    @functools.cached_property
    def snapshot(self) -> snapshots.Snapshot:
        """The memory snapshot, for :mod:`nsightkit.analysis.memory.snapshot`."""
        return snapshots.read(self.path)

    @functools.cached_property
    def report(self) -> ncu.Report:
        """The report of Nsight Compute, for :mod:`nsightkit.analysis.roofline.counters`."""
        return ncu.read(self.path)

    @property
    def label(self) -> str:
        """Where the figures come from, in words."""
        return f"case file, {self.source['gpu']}"

    @property
    def url(self) -> str:
        """Address of the published file that was converted, at the commit that was read."""
        source = self.source
        return f"https://github.com/{source['repository']}/tree/{source['commit']}/{source['paths'][self.which]}"

    def _origin_facts(self) -> dict[str, str]:
        """Say where the recording comes from: facts by the label that a reader sees."""
        source = self.source
        commit = f"{source['repository']}, commit {source['commit'][:9]}"
        return {"Recorded by": commit, "Licence": source["licence"], "GPU": source["gpu"], "Limits": source["limits"]}

    def __repr__(self) -> str:
        facts = "\n".join(f"  {name}: {value}" for name, value in self._origin_facts().items())
        return f"{self.name}, {self.which}: {self.source['program']}\n{facts}"

    def _repr_html_(self) -> str:
        title = html.escape(f"{self.name}, {self.which}")
        program = html.escape(f"{self.source['program']}, on {self.source['gpu']}")
        return (
            f'<aside class="nsightkit-provenance" data-mode="case" aria-label="Provenance: {title}">'
            f'<p><span class="nsightkit-badge">case file</span> <strong>{title}:</strong> '
            f'{program}; <a href="{html.escape(self.url)}">the published recording</a>, analysed when this page was '
            f"built</p>{folded_facts('Source and limits', self._origin_facts().items())}</aside>"
        )


def folded_facts(summary: str, facts: Iterable[tuple[str, str]]) -> str:
    """Write facts as HTML for a page of the guide, folded under a summary, which is HTML already."""
    rows = ""
    for name, value in facts:
        rows += f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
    return f"<details><summary>{summary}</summary><dl>{rows}</dl></details>"


def folder() -> Path:
    """Say where the case files lie.

    Returns
    -------
    Path
        ``docs/cases`` of a source tree, which has all of them; in an installed package, a folder with the one to try.
    """
    package = Path(nsightkit.__file__).parent
    tree = package.parent / "docs" / "cases"
    if tree.is_dir():
        return tree
    return package / "cases"


def names() -> dict[str, list[str]]:
    """List the case files that are here.

    Returns
    -------
    dict
        Names of the recordings of each case, by the case's name.
    """
    case_folders = sorted(file.parent for file in folder().glob("*/source.json"))
    return {case_folder.name: list(_read_source(case_folder)["paths"]) for case_folder in case_folders}


def _read_source(case_folder: Path) -> Json:
    """Read where a case file comes from: its source.json."""
    return dict(json.loads((case_folder / "source.json").read_text(encoding="utf-8")))


def case(name: str, which: str) -> Case:
    """Open one recording of a case file.

    Parameters
    ----------
    name, which : str
        Such as ``"v100-starved-loader", "workers-0"``.

    Returns
    -------
    Case

    Raises
    ------
    UsageError
        It is not here. Only a source tree of nsightkit has every case file.
    """
    recordings = names()
    if which not in recordings.get(name, ()):
        cases_here = ", ".join(recordings) or "none"
        raise UsageError(
            f"no case file {name}/{which} here; there are {cases_here}. All of them come with nsightkit's source, in "
            "docs/cases: clone its repository and install it from there, with pip install -e ."
        )
    case_folder = folder() / name
    return Case(name, which, next(case_folder.glob(f"{which}.*")), _read_source(case_folder))


def demo(to: Path) -> list[Case]:
    """Copy the case file that is installed with nsightkit.

    Parameters
    ----------
    to : Path
        A folder that does not exist yet.

    Returns
    -------
    list of Case
        Its traces, at their new place.

    Raises
    ------
    UsageError
        Something is there already, and is left as it is; or the folder cannot be written.
    """
    if to.exists():
        raise UsageError(f"{to} exists already; choose another name, or remove it")
    try:
        shutil.copytree(folder() / DEMO, to)
    except OSError as error:
        shutil.rmtree(to, ignore_errors=True)
        why = error.strerror or "not every file could be copied"  # copytree's own error, of several files, has none
        raise UsageError(f"{to} cannot be written ({why}); choose another place") from error
    cases = []
    for which in names()[DEMO]:
        installed = case(DEMO, which)
        cases.append(dataclasses.replace(installed, path=to / installed.path.name))
    return cases
