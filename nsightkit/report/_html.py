"""HTML from parts, where text is escaped unless it was made here."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from nsightkit.analysis.core.text import plain

__all__ = ["Markup", "scrolled", "section", "shown", "tag"]

#: Longest text of a trace in one place; kernels fused by a compiler have been seen with 3,000 characters.
_LONGEST = 400
_VOID = frozenset({"meta"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def shown(text: object, longest: int = _LONGEST) -> str:
    """Make text from a trace fit to be shown: on one line, without what cannot be seen, not endless.

    Parameters
    ----------
    text : object
    longest : int
    """
    line = plain(str(text)[: 4 * longest])
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def tag(name: str, *children: object, **attributes: Any) -> Markup:
    """Make an element.

    Parameters
    ----------
    name : str
    *children : object
        Markup goes in as it is, a list or an iterator of children one by one, nothing for None; the rest is text.
    **attributes
        ``class_`` and ``for_`` stand for names that Python takes, ``data_v`` for ``data-v``; None and False leave an
        attribute away, True gives it no value.
    """
    opened = [name]
    for key, value in attributes.items():
        label = key.rstrip("_").replace("_", "-")
        if value is True:
            opened.append(label)
        elif value is not None and value is not False:
            opened.append(f'{label}="{html.escape(str(value), quote=True)}"')
    start = f"<{' '.join(opened)}>"
    return Markup(start if name in _VOID else f"{start}{_inner(children)}</{name}>")


def _inner(children: Iterable[object]) -> str:
    parts = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(str(child))
        elif isinstance(child, str):
            parts.append(html.escape(child, quote=True))
        elif isinstance(child, Iterable):
            parts.append(_inner(child))
        elif child is not None:
            parts.append(html.escape(str(child), quote=True))
    return "".join(parts)


def section(name: str, title: str, *parts: object) -> Markup:
    """Make a part of the page that its heading names and a link can reach."""
    heading = tag("h2", title, id=f"h-{name}")
    return tag("section", heading, *parts, id=name, aria_labelledby=f"h-{name}")


def scrolled(caption: str, head: object, body: object, **attributes: Any) -> Markup:
    """Make a table that scrolls within itself where it is wider than the screen, by keyboard too."""
    table = tag(
        "table",
        tag("caption", caption),
        None if head is None else tag("thead", head),
        tag("tbody", body),
        **attributes,
    )
    return tag("div", table, class_="scroll", role="group", tabindex=0, aria_label=f"Table: {caption}")
