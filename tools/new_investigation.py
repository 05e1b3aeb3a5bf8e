#!/usr/bin/env python3
"""Begin a page of the guide: a script that measures, and a test that runs it small. Both pass as they are.

``python tools/new_investigation.py SLUG "Title?"``, or ``nox -s new -- SLUG "Title?"``. Nothing is replaced.
"""

from __future__ import annotations

import re
import string
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def scaffold(root: Path, slug: str, title: str) -> list[Path]:
    """Write a new page and its test.

    Parameters
    ----------
    root : Path
        The source tree.
    slug : str
        Words with dashes between them: the page's name in its recordings.
    title : str
        The question it answers.

    Returns
    -------
    list of Path
        The page and the test.

    Raises
    ------
    ValueError
        The slug or the title is malformed, or the slug is taken; nothing was written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", slug):
        raise ValueError(f"{slug!r} is not a slug; give lower-case words and digits with dashes between them")
    title = " ".join(title.split())
    if not title.endswith("?") or '"' in title or "\\" in title:
        raise ValueError(f"{title!r} is not a title; give a question in plain words, with a question mark at its end")
    module = slug.replace("-", "_")
    examples = root / "examples"
    pages = sorted(examples.glob("[0-9][0-9]_*.py"))
    for page in pages:
        if page.stem[3:] == module or f'"{slug}/' in page.read_text(encoding="utf-8"):
            raise ValueError(f"{slug!r} is taken by {page.name}; choose another slug")
    number = int(pages[-1].name[:2]) + 1 if pages else 1
    stem = f"{number:02}_{module}"
    names = {"slug": slug, "title": title, "underline": "=" * len(title), "stem": stem}
    files = {
        examples / f"{stem}.py": "page.py.txt",
        root / "tests" / "examples" / f"test_{module}.py": "test.py.txt",
    }
    for path, template in files.items():
        text = (Path(__file__).parent / "templates" / template).read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(string.Template(text).substitute(names), encoding="utf-8")
    return list(files)


def main(arguments: list[str]) -> int:
    """Begin a page; see the module's text.

    Parameters
    ----------
    arguments : list of str

    Returns
    -------
    int
        The exit status.
    """
    if len(arguments) != 2:
        print('usage: nox -s new -- SLUG "Title?"', file=sys.stderr)
        print('such as: nox -s new -- pinned-copies "Does pinned memory pay?"', file=sys.stderr)
        return 2
    try:
        page, test = scaffold(ROOT, *arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"Written:\n  {page.relative_to(ROOT)}\n  {test.relative_to(ROOT)}\n\nBoth pass as they are:")
    print(f"  python {page.relative_to(ROOT)}")
    print(f"  nox -s docs -- --only {arguments[0]}")
    print(f"  nox -s tests -- {test.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
