"""Each page of the gallery as a notebook: to download and, where the repository's address is known, to open in Colab.

Colab opens notebooks from a branch of a GitHub repository; ``.github/workflows/publish.yml`` puts them into one. What
they need, case files and recordings among it, comes with nsightkit's source, which their first cell fetches.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docutils import nodes
from measured import look_up
from sphinx.application import Sphinx
from sphinx_gallery import gen_gallery
from sphinx_gallery.notebook import jupyter_notebook
from sphinx_gallery.py_source_parser import remove_config_comments, split_code_and_text_blocks

from nsightkit import plots

_FOLDER = "notebooks"
BRANCH = "notebooks"
_FIRST = """\
# Install nsightkit from its source, which has the case files and recordings
import importlib.util
import os
import sys

if importlib.util.find_spec("nsightkit") is None:
    !git clone --quiet --depth 1 {repository} nsightkit-source
    %pip install --quiet jinja2 -e "./nsightkit-source[torch,capture,plots]"
    # What was installed just now, a kernel that runs already does not see.
    sys.path.insert(0, os.path.abspath("nsightkit-source"))

import torch

if torch.cuda.is_available():
    print("GPU:", torch.cuda.get_device_name())
else:
    print("No GPU: what this page measures itself runs small, on the CPU.")
"""
_DROPPED = re.compile(r"^\.\. (?:in-short|own-run)::\s*?$\n?", re.MULTILINE)
_INCLUDED = re.compile(r"^\.\. literalinclude:: /(\S+)\n(?: +:.*\n)*", re.MULTILINE)
_ANSWER = re.compile(r"^( *)\.\. dropdown:: (.+)\n((?:\1 +\S.*\n|[ \t]*\n)+)", re.MULTILINE)
_TABLE = re.compile(r"^( *)\.\. list-table::.*\n((?:\1 +\S.*\n|[ \t]*\n)+)", re.MULTILINE)
_FOLD = re.compile(r"\A# fold: *(.+)")


def notebook(script: Path, repository: str, value: Callable[[str], str], link: Callable[[str], str]) -> dict[str, Any]:
    """Make a notebook of a page.

    Parameters
    ----------
    script : Path
        Of the gallery.
    repository : str
        The address that the first cell clones from. If it is empty, that cell is left out.
    value : callable
        Gives the text of a reference to a finding, ``page.name:format``.
    link : callable
        Gives the Markdown of a reference to a document.

    Returns
    -------
    dict
        In the format of Jupyter.
    """
    _, blocks = split_code_and_text_blocks(str(script))
    made: dict[str, Any] = jupyter_notebook(blocks, gen_gallery.DEFAULT_GALLERY_CONF, script.parent)
    for cell in made["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            cell["source"] = _plain(text, value, link)
        else:
            text = remove_config_comments(text).strip("\n")
            if fold := _FOLD.match(text):  # Colab shows a cell with a title without its code
                text, cell["metadata"] = f"# @title {fold[1]}{text[fold.end() :]}", {"cellView": "form"}
            cell["source"] = text + ";" * _draws(text)
    if repository:
        first = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
        made["cells"].insert(0, first | {"source": _FIRST.format(repository=repository)})
    made["metadata"]["accelerator"] = "GPU"  # Colab: ask for one
    return made


def _draws(code: str) -> bool:
    """Whether a cell's last line gives a figure, which Jupyter would show twice: it is open, and it is the result."""
    last = ast.parse(code).body[-1:]
    called = (
        last[0].value.func if last and isinstance(last[0], ast.Expr) and isinstance(last[0].value, ast.Call) else None
    )
    if not (isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "plots"):
        return False
    return "Figure" in str(inspect.signature(getattr(plots, called.attr)).return_annotation)


def _plain(text: str, value: Callable[[str], str], link: Callable[[str], str]) -> str:
    """Turn what only this site's Sphinx understands into Markdown."""
    text = _DROPPED.sub("", text)
    text = _INCLUDED.sub(r"The file is `docs/\1`.\n", text)
    text = _TABLE.sub(_tabled, _ANSWER.sub(_folded, text))
    text = re.sub(r":measured:`([^`]+)`", lambda found: value(found[1]), text)
    return re.sub(r":doc:`([^`]+)`", lambda found: link(found[1]), text).strip("\n")


def _folded(found: re.Match[str]) -> str:
    indent, title, body = found.groups()
    answer = textwrap.indent(textwrap.dedent(body).strip("\n"), indent)
    return f"{indent}<details><summary>{title}</summary>\n\n{answer}\n\n{indent}</details>\n\n"


def _tabled(found: re.Match[str]) -> str:
    indent, body = found.groups()
    rows: list[list[str]] = []
    for line in textwrap.dedent(body).splitlines():
        if line.startswith("* - "):
            rows.append([line[4:]])
        elif line.startswith("  - "):
            rows[-1].append(line[4:])
        elif rows and line.strip():
            rows[-1][-1] += f" {line.strip()}"
    rows.insert(1, ["---"] * len(rows[0]))
    return "".join(f"{indent}| {' | '.join(row)} |\n" for row in rows) + "\n"


def _value(reference: str) -> str:
    name, _, spec = reference.partition(":")
    try:
        return look_up(name.strip(), spec.strip())[0]
    except FileNotFoundError:  # of a page that is not built; measured.py has said so
        return "(see the page)"


def _linked(app: Sphinx, reference: str) -> str:
    title, _, target = reference.rpartition("<")
    target = target.rstrip(">").strip()
    document = target.lstrip("/") if target.startswith("/") else f"gallery/{target}"
    shown = " ".join(title.split()) or (app.env.titles[document].astext() if document in app.env.titles else target)
    site = app.config.html_baseurl.rstrip("/")
    return f"[{shown}]({site}/{document}.html)" if site else f"*{shown}*"


def _pages(app: Sphinx) -> list[Path]:
    examples = Path(app.confdir, "examples")
    return [path for path in sorted(examples.glob("[0-9]*.py")) if f"gallery/{path.stem}" in app.env.found_docs]


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir, _FOLDER)
    folder.mkdir(exist_ok=True)
    for script in _pages(app):
        made = notebook(script, app.config.notebooks_repository, _value, lambda reference: _linked(app, reference))
        folder.joinpath(f"{script.stem}.ipynb").write_text(json.dumps(made, indent=1), encoding="utf-8")


def colab(repository: str, page: str) -> str:
    """Give the address at which Colab opens a page's notebook; empty where it cannot."""
    site = "https://github.com/"
    if not repository.startswith(site):
        return ""
    return f"https://colab.research.google.com/github/{repository.removeprefix(site)}/blob/{BRANCH}/{page}.ipynb"


def _offer(app: Sphinx, doctree: nodes.document) -> None:
    """Put the links into the box at the top of a page."""
    folder, _, page = app.env.docname.rpartition("/")
    for box in doctree.findall(nodes.container):
        if folder != "gallery" or "nsightkit-in-short" not in box["classes"]:
            continue
        links = [f'<a href="../{_FOLDER}/{page}.ipynb" download>Notebook</a>']
        if address := colab(app.config.notebooks_repository, page):
            links.append(f'<a class="nsightkit-colab" href="{address}">Open in Colab</a>')
        box[0] += nodes.Text(" ")
        box[0] += nodes.raw("", f'<span class="nsightkit-notebook">{" ".join(links)}</span>', format="html")


def setup(app: Sphinx) -> dict[str, Any]:
    """See the extension API of Sphinx."""
    app.add_config_value("notebooks_repository", "", "env", str)
    app.connect("doctree-read", _offer)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
