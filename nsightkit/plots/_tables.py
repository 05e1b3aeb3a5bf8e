"""Tables for pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from nsightkit.table import Table, column_of


def table(
    frame: pd.DataFrame, formats: Mapping[str, str | Callable[[Any], object]] | None = None, missing: str = "-"
) -> Table:
    """Show a frame as a :class:`nsightkit.table.Table`, whole.

    Parameters
    ----------
    frame : DataFrame
        The index is not shown. A cell may hold a list.
    formats : mapping of str to str or callable, optional
        Of columns; the rest goes by name and type, numbers without a unit with four significant digits. What a format
        gives is text, not HTML.
    missing : str
        Text for a value that was not measured.
    """
    default_formats: dict[str, str | Callable[[Any], object]] = {}
    for name in frame.select_dtypes("float"):
        if column_of(str(name)).unit == "value":
            default_formats[str(name)] = "{:,.4g}"
    return Table.of(frame, len(frame), formats=default_formats | dict(formats or {}), missing=missing)
