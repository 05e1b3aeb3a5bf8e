"""Read Parquet files safely: as anybody may have written them, a process with limits reads each of them first."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nsightkit.errors import TraceError, reading, require_regular
from nsightkit.trace import parquet_child
from nsightkit.trace.limited import ask_limited

#: A file may expand to `_SMALL_BYTES` plus `_MOST_EXPANSION` times its size. Real traces expand to 50 times at most.
_SMALL_BYTES = 64_000_000
_MOST_EXPANSION = 128
#: Memory that the process itself takes.
_PROCESS_BYTES = 512_000_000
#: Time the process may take: so many seconds, and a second for so many bytes of the files.
_SECONDS = 5
_BYTES_PER_SECOND = 5_000_000
_PROBLEM = "holds what is not a readable Parquet table"
_REMEDY = "export or convert the original trace again"


def columns_of(files: Sequence[Path]) -> dict[Path, dict[str, bool]]:
    """List the columns of Parquet files whose contents are in proportion to their size.

    Parameters
    ----------
    files : sequence of Path

    Returns
    -------
    dict of Path to dict of str to bool
        For each file, whether each column holds texts, by the column's name.

    Raises
    ------
    TraceError
        One is not a regular file, is damaged, expands to too much, or holds anything but numbers, times and texts.
    """
    states = []
    for file in files:
        require_regular(file)
        state = file.stat()
        states.append((str(file.absolute()), state.st_size, state.st_mtime_ns, state.st_ino))
    columns = _checked_columns(*states) if states else []
    return dict(zip(files, columns, strict=True))


@functools.lru_cache(256)
def _checked_columns(*states: tuple[str, int, int, int]) -> list[dict[str, bool]]:
    """Return for each file its columns, and whether each holds texts.

    A child process with limits on memory and time reads the files, as a small file can expand to gigabytes or crash
    pyarrow. Each of `states` is a file's path, size, time of change and inode, by which answers are cached.
    """
    # What the child's `read_for_parent` takes. It starts without site-packages, so it is given pyarrow's folder.
    arguments = [str(Path(pa.__file__).parents[1])]
    total_bytes = 0
    for path, size, *_ in states:
        arguments += [str(_SMALL_BYTES + _MOST_EXPANSION * size), path]
        total_bytes += size
    folder = Path(states[0][0]).parent
    with reading(folder, _PROBLEM, _REMEDY):
        answer = ask_limited(
            parquet_child.__file__,
            arguments,
            memory_bytes=_PROCESS_BYTES + _SMALL_BYTES + _MOST_EXPANSION * total_bytes,
            seconds=_SECONDS + total_bytes // _BYTES_PER_SECOND,
            output_bytes=16_000_000,
        )
    if "problem" in answer:
        raise TraceError(folder, f"{_PROBLEM} ({answer['problem']})", _REMEDY)
    return [answer[path] for path, *_ in states]


def read_table(path: Path, columns: Mapping[str, bool]) -> pa.Table:
    """Read columns of a Parquet file that :func:`columns_of` has seen.

    Parameters
    ----------
    path : Path
    columns : mapping of str to bool
        Some of its columns, and whether each holds texts.

    Returns
    -------
    Table
        Every text column is a dictionary. Its schema has no metadata.

    Raises
    ------
    ValueError
        Texts are damaged. pyarrow's own errors pass through.
    """
    texts = [name for name, is_text in columns.items() if is_text]
    with pa.OSFile(str(path)) as opened:
        table = pq.ParquetFile(opened, read_dictionary=texts).read(list(columns), use_threads=False)
    for name in texts:
        _require_codes_in_dictionary(table[name])
    return table.select(list(columns)).replace_schema_metadata()


def _require_codes_in_dictionary(column: pa.ChunkedArray) -> None:
    """Raise ValueError for codes outside their dictionary: pyarrow does not check them and would read past its end."""
    for chunk in column.chunks:
        bounds = pc.min_max(chunk.indices).as_py()
        if bounds["max"] is not None and not 0 <= bounds["min"] <= bounds["max"] < len(chunk.dictionary):
            raise ValueError("a text column has a code outside its dictionary")
