"""What the gallery does around a script: reset the interpreter, pick up its findings and its downloads."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import measured
from sphinx.errors import ExtensionError

# Looking for garbage among the objects of imported libraries again and again takes time.
gc.set_threshold(200_000)


def reset(gallery_conf: dict[str, Any], fname: str | None) -> None:
    """Give the next script a fresh interpreter as far as one process can: scripts share it."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    plt.close("all")
    mpl.rcdefaults()
    mpl.rcParams["figure.max_open_warning"] = 0
    gc.collect()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.manual_seed(0)


def scrape(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Export ``findings`` and offer ``downloads``: the two names of a script that the site looks at.

    ``findings`` maps names to numbers for the ``measured`` role; the recordings of the page are offered with them.
    ``downloads`` maps link texts to a Trace (written as Chrome JSON, which holds no host or user) or to a file's path.
    """
    names = block_vars["example_globals"]
    script = Path(block_vars["src_file"])
    folder = Path(block_vars["target_file"]).parent / "files" / script.stem
    saved_as: dict[str, Path] = {}
    lines = ["", "**Downloads**", ""]
    downloads = names.get("downloads")
    if isinstance(downloads, Mapping) and block_vars.get("_offered") is not downloads:
        block_vars["_offered"] = downloads
        if any(_is_trace(what) for what in downloads.values()):
            opened = (
                "A timeline opens in Perfetto (ui.perfetto.dev, *Open trace file*; it stays in your browser). "
                "To analyse it with ``nsightkit``, take the original trace instead."
            )
            lines += [opened, ""]
        for title, what in downloads.items():
            saved_as[title] = _save(title, what, folder)
    findings = names.get("findings")
    if isinstance(findings, Mapping):
        measured.export(script.stem, findings, [str(findings.get("badge", ""))])
        recorded = [measurement for measurement in _measurements(names) if measurement.mode == "recorded"]
        if recorded:
            title = "The recordings of this page: samples, traces and where they were made"
            saved_as[title] = _pack(recorded, folder / "recordings.zip")
    if not saved_as:
        return ""
    for title, saved in saved_as.items():
        uri = Path(os.path.relpath(saved, gallery_conf["src_dir"])).as_posix()
        lines.append(f"* :download:`{title} </{uri}>` ({saved.stat().st_size / 1024:,.0f} KiB)")
    return "\n".join([*lines, "", ""])


def _measurements(names: Mapping[str, Any]) -> list[Any]:
    """Measurements among a script's values, and among what those hold."""
    from nsightkit.guide import Measurement

    values: list[Any] = []
    for value in names.values():
        if isinstance(value, dict | list | tuple):
            values += value.values() if isinstance(value, dict) else value
        else:
            values.append(value)
    return [value for value in values if isinstance(value, Measurement)]


def _pack(recorded: Iterable[Any], packed: Path) -> Path:
    """Put recordings into one file, in the folders that a folder of recordings has."""
    names = {measurement.folder: measurement.name for measurement in recorded}
    packed.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as into:  # what is in them is compressed
        for folder, name in sorted(names.items()):
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                into.write(path, f"{name}/{folder.name}/{path.relative_to(folder).as_posix()}")
    return packed


def _is_trace(what: Any) -> bool:
    from nsightkit.trace import Trace

    return isinstance(what, Trace)


def _save(title: str, what: Any, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    if _is_trace(what):
        from nsightkit.trace import chrome

        path = folder / f"{name}.json.gz"
        chrome.write(what, path, overwrite=True)  # of the last build
        return path
    source = Path(what)
    if not source.is_file():
        raise ExtensionError(f"downloads[{title!r}]: {source} is not a file")
    return Path(shutil.copyfile(source, folder / (name + "".join(source.suffixes))))
