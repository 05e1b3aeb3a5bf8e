"""Tables for pages: numbers with separators, shares as percent, and every text escaped."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nsightkit.safe import plain

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler

__all__ = ["table"]


def table(frame: pd.DataFrame, formats: dict[str, Any] | None = None, missing: str = "-") -> Styler:
    """Style a frame for a page.

    Kernel and range names come from a trace and often hold angle brackets. A plain
    ``frame.style`` passes them on as HTML; this makes text of every cell and every heading, and then escapes it.

    Parameters
    ----------
    frame : DataFrame
        The index is hidden. A cell may hold a list or a mapping.
    formats : dict of str to str or callable, optional
        Of columns; the rest goes by name and type: truth as ``yes`` and ``no``, ``share…`` in percent, integers and
        ``…_ns`` with thousands separators and no decimals, other numbers with four significant digits. What a format
        gives is text too, not HTML.
    missing : str
        What stands for a value that was not measured.

    Returns
    -------
    Styler
        Renders as HTML in a notebook or a gallery page. Needs jinja2.
    """
    chosen = {str(c): _format(str(c), frame[c]) for c in frame.columns} | (formats or {})
    written: dict[Any, Any] = {column: _escaping(form) for column, form in chosen.items()}
    # Numbers line up at their right, words at their left.
    left: Any = {c: [{"selector": "", "props": "text-align: left"}] for c in frame.columns if _worded(frame[c])}
    from pandas.io.formats.style import Styler  # needs jinja2, which drawing does not

    # Without an identifier for each cell, which nothing refers to and every page would carry.
    shown = Styler(frame, cell_ids=False).hide(axis="index").hide(axis="columns", names=True)
    shown = shown.format(written, na_rep=_escaped(missing)).format_index(_escaped, axis="columns")
    return shown.set_table_styles(left, overwrite=False)


def _worded(values: pd.Series) -> bool:
    return pd.api.types.is_bool_dtype(values) or not pd.api.types.is_numeric_dtype(values)


def _format(column: str, values: pd.Series) -> str | Callable[[Any], str]:
    if pd.api.types.is_bool_dtype(values):
        return lambda value: "yes" if value else "no"
    if column.startswith("share"):
        return "{:z.1%}"  # a rounded-off loss is not shown as "-0.0%"
    if _worded(values):
        return _text
    if pd.api.types.is_integer_dtype(values) or column.endswith("_ns"):
        return "{:,.0f}"
    return "{:,.4g}"


def _text(value: Any) -> str:
    """Write a value of any kind, with what is nested in it."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple, set, np.ndarray)):
        return "; ".join(_text(item) for item in value)
    if isinstance(value, float):
        return f"{value:,.4g}"
    return str(value)


def _escaping(form: str | Callable[[Any], str]) -> Callable[[Any], str]:
    if isinstance(form, str):
        return lambda value: _escaped(form.format(value))
    return lambda value: _escaped(form(value))


def _escaped(text: object) -> str:
    return html.escape(plain(text))
