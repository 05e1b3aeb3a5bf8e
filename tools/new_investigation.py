#!/usr/bin/env python3
"""Begin an investigation: a page, a workload, its entry and a test, which build and pass as they are.

``python tools/new_investigation.py SLUG "Title?"``, or ``nox -s new -- SLUG "Title?"``. Nothing is replaced.
"""

from __future__ import annotations

import re
import string
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: In the list of investigations, a line before which new ones go.
MARK = "        # new ones\n"


def scaffold(root: Path, slug: str, title: str) -> list[Path]:
    """Write the files of a new investigation.

    Parameters
    ----------
    root : Path
        The source tree.
    slug : str
        Words with dashes between them: how the recorder and the page call it.
    title : str
        The question it answers.

    Returns
    -------
    list of Path
        What was written or changed.

    Raises
    ------
    ValueError
        A name or a title that will not do, or that is taken; nothing was written then.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", slug):
        raise ValueError(
            f"{slug!r} is not a name of an investigation: small letters and digits, with dashes between words"
        )
    title = " ".join(title.split())
    if not title.endswith("?") or '"' in title or "\\" in title:
        raise ValueError(f"{title!r} is not a title: a question in plain words, with a question mark at its end")
    module = slug.replace("-", "_")
    number = 1 + max((int(p.name[:2]) for p in (root / "examples").glob("[0-9][0-9]_*.py")), default=0)
    names = {
        "slug": slug,
        "module": module,
        "title": title,
        "underline": "=" * len(title),
        "stem": f"{number:02}_{module}",
        "class_name": "".join(word.capitalize() for word in module.split("_")),
    }
    templates = Path(__file__).parent / "templates"
    files = {
        root / "examples" / f"{names['stem']}.py": "page.py.txt",
        root / "nsightkit" / "workloads" / f"{module}.py": "workload.py.txt",
        root / "tests" / "workloads" / f"test_{module}.py": "test.py.txt",
    }
    taken = [path for path in files if path.exists()]
    registry = root / "nsightkit" / "investigations" / "parts.py"
    listed = registry.read_text(encoding="utf-8")
    if taken or f'"{slug}"' in listed:
        raise ValueError(f"{slug!r} is taken: {', '.join(str(p.relative_to(root)) for p in taken) or registry.name}")
    if listed.count(MARK) != 1:
        raise ValueError(f"{registry.name} has no line {MARK.strip()!r} to put the entry before")
    entry = (
        f'        "{slug}": _pair(\n'
        f'            "{slug}",\n'
        f'            "faulty",\n'
        f'            {{"size": 4096, "products": 20}},\n'
        f'            {{"size": 64, "products": 20}},\n'
        f"            10,\n"
        f'            workload="workloads.{module}:start",\n'
        f"        ),\n"
    )
    for path, template in files.items():
        text = string.Template((templates / template).read_text(encoding="utf-8")).substitute(names)
        path.write_text(text, encoding="utf-8")
    registry.write_text(listed.replace(MARK, entry + MARK), encoding="utf-8")
    return [*files, registry]


def main(arguments: list[str]) -> int:
    """Begin an investigation; see the module's text.

    Parameters
    ----------
    arguments : list of str

    Returns
    -------
    int
        The exit status.
    """
    if len(arguments) != 2:
        print(
            'usage: nox -s new -- SLUG "Title?"     such as: pinned-copies "Does pinned memory pay?"', file=sys.stderr
        )
        return 2
    try:
        written = scaffold(ROOT, *arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    page = written[0]
    print("\n".join(["Written:", *(f"  {path.relative_to(ROOT)}" for path in written)]))
    print(f"\nIt builds as it is:\n  nox -s docs -- --only {arguments[0]}")
    print(f"  python {page.relative_to(ROOT)}")
    print("Then put in your workload, your expectation and your verdict, and check them:")
    print(f"  nox -s tests -- tests/workloads/test_{page.stem[3:]}.py")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
