"""What the gallery does around a script: reset the interpreter, pick up its findings and its downloads."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measured
from sphinx.errors import ExtensionError


def reset(gallery_conf: dict[str, Any], fname: str | None) -> None:
    """Give the next script a fresh interpreter as far as one process can: scripts share it."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    plt.close("all")
    mpl.rcdefaults()
    mpl.rcParams["figure.max_open_warning"] = 0
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def scrape(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Export ``findings`` and offer ``downloads``: the two names of a script that the site looks at.

    ``findings`` maps names to numbers for the ``measured`` role; ``downloads`` maps link texts to a Trace (written as
    Chrome JSON, which holds no host or user) or to the path of a file.
    """
    names = block_vars["example_globals"]
    script = Path(block_vars["src_file"])
    if isinstance(findings := names.get("findings"), Mapping):
        labels = [v.label for v in names.values() if hasattr(v, "label") and hasattr(v, "provenance")]
        measured.export(script.stem, findings, labels)
    downloads = names.get("downloads")
    if not isinstance(downloads, Mapping) or block_vars.get("_offered") is downloads:
        return ""
    block_vars["_offered"] = downloads
    folder = Path(block_vars["target_file"]).parent / "files" / script.stem
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["", "**Downloads**", ""]
    if any(_is_trace(what) for what in downloads.values()):
        opened = (
            "A timeline opens in Perfetto (ui.perfetto.dev, *Open trace file*; it stays in your browser) and with "
            "every command of ``nsightkit``."
        )
        lines += [opened, ""]
    for title, what in downloads.items():
        saved = _save(title, what, folder)
        uri = Path(os.path.relpath(saved, gallery_conf["src_dir"])).as_posix()
        lines.append(f"* :download:`{title} </{uri}>` ({saved.stat().st_size / 1024:,.0f} KiB)")
    return "\n".join([*lines, "", ""])


def _is_trace(what: Any) -> bool:
    return hasattr(what, "kernels") and hasattr(what, "meta")


def _save(title: str, what: Any, folder: Path) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    if _is_trace(what):
        from nsightkit.trace import chrome

        path = folder / f"{name}.json.gz"
        chrome.write(what, path)
        return path
    source = Path(what)
    if not source.is_file():
        message = f"downloads[{title!r}]: {source} is no file"
        raise ExtensionError(message)
    return Path(shutil.copyfile(source, folder / (name + "".join(source.suffixes))))
