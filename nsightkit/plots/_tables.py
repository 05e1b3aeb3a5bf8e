"""Tables for pages: numbers with separators, shares as percent, and every text escaped."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_integer_dtype, is_numeric_dtype

from nsightkit.safe import plain

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler

__all__ = ["table"]


def table(frame: pd.DataFrame, formats: Mapping[str, Any] | None = None, missing: str = "-") -> Styler:
    """Style a frame for a page.

    Kernel and range names come from a trace and often hold angle brackets. A plain
    ``frame.style`` passes them on as HTML; this makes text of every cell and every heading, and then escapes it.

    Parameters
    ----------
    frame : DataFrame
        The index is hidden. A cell may hold a list or a mapping.
    formats : mapping of str to str or callable, optional
        Of columns; the rest goes by name and type: truth as ``yes`` and ``no``, ``share…`` in percent, integers and
        ``…_ns`` with thousands separators and no decimals, other numbers with four significant digits. What a format
        gives is text too, not HTML.
    missing : str
        Text for a value that was not measured.

    Returns
    -------
    Styler
        Renders as HTML in a notebook or a gallery page. Needs jinja2.
    """
    from pandas.io.formats.style import Styler  # needs jinja2, which drawing does not

    formats = formats or {}
    written: dict[Any, Any] = {}
    words: dict[Any, Any] = {}
    for column, values in frame.items():
        written[column] = _escaping(formats.get(str(column)) or _format(str(column), values))
        if is_bool_dtype(values) or not is_numeric_dtype(values):
            words[column] = [{"selector": "", "props": "text-align: left"}]  # numbers line up at their right
    # Without an identifier for each cell, which nothing refers to and every page would carry.
    shown = Styler(frame, cell_ids=False).hide(axis="index").hide(axis="columns", names=True)
    shown = shown.format(written, na_rep=_escaped(missing)).format_index(_escaped, axis="columns")
    return shown.set_table_styles(words, overwrite=False)


def _format(column: str, values: pd.Series) -> str | Callable[[Any], str]:
    if column.startswith("share"):
        return "{:z.1%}"  # a rounded-off loss is not shown as "-0.0%"
    if is_bool_dtype(values) or not is_numeric_dtype(values):
        return _text
    if is_integer_dtype(values) or column.endswith("_ns"):
        return "{:,.0f}"
    return "{:,.4g}"


def _text(value: Any) -> str:
    """Write a value of any kind, with what is nested in it."""
    if value is None:
        return "-"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple | set | np.ndarray):
        return "; ".join(_text(item) for item in value)
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _escaping(form: str | Callable[[Any], str]) -> Callable[[Any], str]:
    write = form.format if isinstance(form, str) else form
    return lambda value: _escaped(write(value))


def _escaped(text: object) -> str:
    return html.escape(plain(text))
