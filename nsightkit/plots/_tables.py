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
    # Columns that are plain numbers by their name: no time, share or size.
    unitless = [str(name) for name in frame.select_dtypes("float") if column_of(str(name)).unit == "value"]
    all_formats = {**dict.fromkeys(unitless, "{:,.4g}"), **(formats or {})}
    return Table.of(frame, len(frame), formats=all_formats, missing=missing)
