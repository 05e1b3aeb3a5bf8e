"""Text from a trace, made safe for a terminal, a page or a file: control and invisible characters become visible."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

#: A JSON object.
Json = dict[str, Any]


def plain(text: object) -> str:
    r"""Write text on one line; what a terminal or a page would obey or hide stands there as an escape.

    Parameters
    ----------
    text : object
        From anywhere: a name in a trace, the name of a file, another program's message.

    Examples
    --------
    >>> plain("step\n\x1b[31m1")
    'step\\n\\x1b[31m1'
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(c if _is_visible(c) else c.encode("unicode_escape").decode() for c in line)


def json_text(value: Any, *, indent: int | None = None, compact: bool = False) -> str:
    r"""Write JSON that is as safe to print as :func:`plain` text, and is read back as it was.

    Parameters
    ----------
    value : object
        Of what JSON knows; NaN and infinity are refused.
    indent : int, optional
        As :func:`json.dumps` takes it.
    compact : bool
        Without blanks between the members.

    Examples
    --------
    >>> json_text({"name": "\x9b2J π"})
    '{"name": "\\u009b2J π"}'
    """
    separators = None
    if compact:
        separators = (",", ":")
    text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)
    if text.isprintable():
        return text
    # Within strings, which is where they can stand; the line breaks are those of `indent`.
    return "".join(c if _is_visible(c) or c == "\n" else json.dumps(c)[1:-1] for c in text)


def _is_visible(character: str) -> bool:
    """Whether a character shows itself, or is a space of any width."""
    return character.isprintable() or unicodedata.category(character) == "Zs"
