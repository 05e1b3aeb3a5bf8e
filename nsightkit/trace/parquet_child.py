"""Read Parquet files as a test, and give their columns; :mod:`nsightkit.trace.parquet` runs this file as a process.

A few hundred bytes of Parquet can expand to gigabytes, and pyarrow ends the process on some damaged files. If one does,
only this process ends. Nothing else of nsightkit is imported, so that it starts fast.
"""

from __future__ import annotations

import os
import sys
from typing import Any

#: What a row takes in memory besides its own columns: columns that the file lacks are filled in, up to the model's
#: widest table of 20 columns, and each takes up to eight bytes.
_ROW_BYTES = 160


def _tested_columns(path: str, most_bytes: int) -> dict[str, bool]:
    """Read all of a file as a test; return for each column whether it holds texts.

    Raises an exception, whose text says why, if the file is damaged, expands to over `most_bytes`, or has columns of
    other types than texts, numbers and times.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for field in pq.ParquetFile(path).schema_arrow:
        value_type = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        is_text = value_type in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
        if not is_text and not pa.types.is_primitive(value_type) and not pa.types.is_null(value_type):
            raise ValueError(f"column {field.name} has an unsupported type")
        if field.name in columns:
            raise ValueError(f"column {field.name} is twice there")
        columns[field.name] = is_text
    file = pq.ParquetFile(path, read_dictionary=[name for name, is_text in columns.items() if is_text])
    total_bytes = 0
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, use_threads=False)
        total_bytes += table.nbytes + len(table) * _ROW_BYTES
        if total_bytes > most_bytes:
            raise MemoryError(f"it expands to more than {most_bytes / 1e9:.1f} GB")
    return columns


def read_for_parent(packages: str, *limits_and_paths: str) -> dict[str, Any]:
    """Return the columns of Parquet files by path; :func:`nsightkit.trace.limited.ask_limited` calls this.

    `packages` is the folder that holds pyarrow. Then come two arguments for each file: the bytes that it may expand to,
    and its path.
    """
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # others reserve more than they use
    sys.path.append(packages)
    sys.modules["numpy"] = None  # type: ignore[assignment]  # pyarrow starts faster without it
    columns = {}
    for most_bytes, path in zip(limits_and_paths[::2], limits_and_paths[1::2], strict=True):
        try:
            columns[path] = _tested_columns(path, int(most_bytes))
        except Exception as error:
            error.args = (f"{os.path.basename(path)}: {error}",)  # noqa: PTH119 - without pathlib it starts faster
            raise
    return columns
