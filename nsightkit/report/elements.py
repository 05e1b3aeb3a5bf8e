"""HTML from parts, where text is escaped unless it was made here."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from nsightkit.safe import plain

#: Longest text of a trace in one place; kernels fused by a compiler have been seen with 3,000 characters.
_LONGEST = 400


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
    written = [
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value), quote=True)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    ]
    return Markup(f"<{name}{''.join(written)}>{_inner(children)}</{name}>")


def _inner(child: object) -> str:
    if child is None:
        return ""
    if isinstance(child, Iterable) and not isinstance(child, str):
        return "".join(map(_inner, child))
    return str(child) if isinstance(child, Markup) else html.escape(str(child), quote=True)


def section(name: str, title: str, *parts: object) -> Markup:
    """Make a part of the page that its heading names and a link can reach."""
    return tag("section", tag("h2", title, id=f"h-{name}"), *parts, id=name, aria_labelledby=f"h-{name}")


def scrolled(caption: str, head: object, body: object, **attributes: Any) -> Markup:
    """Make a table that scrolls within itself where it is wider than the screen, by keyboard too."""
    header = None if head is None else tag("thead", head)
    table = tag("table", tag("caption", caption), header, tag("tbody", body), **attributes)
    return tag("div", table, class_="scroll", role="group", tabindex=0, aria_label=f"Table: {caption}")
