"""Read Parquet files as a test, and give their columns; :mod:`nsightkit.trace.parquet` runs this file as a process.

A few hundred bytes of Parquet can expand to gigabytes, and pyarrow ends the process on some damaged files. In this
process only this process ends. Nothing else of nsightkit is imported: it is to start fast.
"""

from __future__ import annotations

import os
import sys
from typing import Any

#: Every row counts with all columns of the model's widest table, of eight bytes: missing columns are filled in.
_ROW_BYTES = 20 * 8


def _columns(path: str, most_bytes: int) -> dict[str, bool]:
    """Read all of a file; tell for each column whether it holds texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for field in pq.ParquetFile(path).schema_arrow:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        is_text = kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
        if not is_text and not pa.types.is_primitive(kind) and not pa.types.is_null(kind):
            raise ValueError(f"column {field.name} has an unsupported type")
        if field.name in columns:
            raise ValueError(f"column {field.name} is twice there")
        columns[field.name] = is_text
    file = pq.ParquetFile(path, read_dictionary=[name for name, is_text in columns.items() if is_text])
    size = 0
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, use_threads=False)
        size += table.nbytes + len(table) * _ROW_BYTES
        if size > most_bytes:
            raise MemoryError(f"it expands to more than {most_bytes / 1e9:.1f} GB")
    return columns


def answer(packages: str, *files: str) -> dict[str, Any]:
    """Read files, of each of which the limit and the path are given; the folder of packages comes first."""
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # others reserve more than they use
    sys.path.append(packages)
    sys.modules["numpy"] = None  # type: ignore[assignment]  # pyarrow starts faster without it
    columns = {}
    for limit, path in zip(files[::2], files[1::2], strict=True):
        try:
            columns[path] = _columns(path, int(limit))
        except Exception as error:
            error.args = (f"{os.path.basename(path)}: {error}",)  # noqa: PTH119 - without pathlib it starts faster
            raise
    return columns
