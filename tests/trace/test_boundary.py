"""What becomes a Trace is checked once, and what is wrong with it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nsightkit
from nsightkit.errors import TraceError
from nsightkit.trace.model import Gpu, Trace, TraceMeta

_ROWS = 4


def _frames() -> dict[str, pd.DataFrame]:
    """A kernel, a call and a range for each of four launches, and one range around the others."""
    start = np.arange(_ROWS) * 1_000
    on_gpu = {"start_ns": start + 100, "end_ns": start + 900, "device": np.int32(0), "stream": 7, "process": 1}
    on_cpu = {"start_ns": start, "end_ns": start + 90, "process": 1, "thread": 1 << 24 | 1}
    named = {"name": pd.Categorical(["a", "b", "a", "b"])}
    links = {"correlation": np.arange(1, _ROWS + 1)}
    inside = {"end_ns": [4_000, 1_100, 2_100, 3_100], "level": [0, 1, 1, 1], "parent": [-1, 0, 0, 0]}
    return {
        "kernels": pd.DataFrame({**on_gpu, **links, **named}),
        "memops": pd.DataFrame({**on_gpu, **links, "bytes": 10, "kind": pd.Categorical(["HtoD"] * _ROWS)}),
        "calls": pd.DataFrame({**on_cpu, **links, "name": pd.Categorical(["cudaLaunchKernel"] * _ROWS)}),
        "ranges": pd.DataFrame({**on_cpu, **named, **inside}),
    }


def _store(folder: Path, frames: dict[str, pd.DataFrame]) -> Path:
    """The tables as a folder that claims to be one of ours."""
    folder.mkdir()
    for table, frame in frames.items():
        pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), folder / f"{table}.parquet")
    index = {"format": 2, "kind": "nsightkit trace", "first_ns": 0, "meta": {"tool": "made by hand"}}
    (folder / "trace.json").write_text(json.dumps(index))
    return folder


def _texts_of(codes: list[int], texts: Any) -> pd.Categorical:
    return pd.Categorical.from_codes(codes, pd.Index(texts))


#: Table, column, its values, and the error.
_WRONG: dict[str, tuple[str, str, Any, str]] = {
    "floats": ("kernels", "start_ns", np.full(_ROWS, 0.5), "float64 where int64"),
    "missing times": ("kernels", "end_ns", [1_000.0, np.nan, 3_000.0, 4_000.0], "float64 where int64"),
    "texts for numbers": ("kernels", "start_ns", ["1", "2", "3", "4"], "where int64"),
    "unsigned": ("calls", "start_ns", np.full(_ROWS, 2**63 + 1, np.uint64), "uint64 where int64"),
    "far away": ("kernels", "end_ns", np.full(_ROWS, 2**62), "outside the range of times"),
    "long before": ("calls", "end_ns", np.full(_ROWS, -(2**63)), "outside the range of times"),
    "years later": ("kernels", "end_ns", np.full(_ROWS, 2**55), "over 100 days from the trace's first event"),
    "backwards": ("kernels", "end_ns", [900, 1_000, 2_900, 3_900], "before start_ns in 1 rows, first in row 1"),
    "wide device": ("kernels", "device", np.full(_ROWS, 2**31), "int64 where int32"),
    "device below none": ("kernels", "device", np.full(_ROWS, -2, np.int32), "less than -1"),
    "negative bytes": ("memops", "bytes", np.full(_ROWS, -1), "less than 0"),
    "too many bytes": ("memops", "bytes", np.full(_ROWS, 2**61), "adds up"),
    "parent beyond": ("ranges", "parent", [-1, 0, 0, _ROWS], f"holds {_ROWS}, in a table of {_ROWS} rows"),
    "parent below none": ("ranges", "parent", [-1, 0, 0, -2], "less than -1"),
    "its own parent": ("ranges", "parent", [-1, 1, 0, 0], "circle"),
    "parents in a circle": ("ranges", "parent", [3, 0, 1, 2], "circle"),
    "level below none": ("ranges", "level", [0, -1, 1, 1], "less than 0"),
    "level beyond": ("ranges", "level", [0, 1, 1, 2**31 - 1], f"in a table of {_ROWS} rows"),
    "numbers for texts": ("kernels", "name", [1, 2, 3, 4], "where category"),
    "names of numbers": ("kernels", "name", _texts_of([0, 1, 0, 1], [1, 2]), "kernels.name that holds"),
    "no name": ("kernels", "name", _texts_of([0, -1, 0, 0], ["a"]), "missing values"),
    "numbers for flags": ("ranges", "open", [0, 1, 2, 3], "int64 where bool"),
}


@pytest.mark.parametrize("how", ["frames", "store"])
@pytest.mark.parametrize("wrong", _WRONG)
def test_what_the_model_does_not_allow_is_named(wrong: str, how: str, tmp_path: Path):
    table, column, values, said = _WRONG[wrong]
    frames = _frames()
    frames[table] = frames[table].assign(**{column: values})
    path = str(tmp_path / "t")
    trace = Trace.from_frames(frames, path=path) if how == "frames" else nsightkit.load(_store(Path(path), frames))
    with pytest.raises(TraceError) as raised:
        trace.table(table)
    assert said in str(raised.value)
    assert f"{table}.{column}" in str(raised.value)
    assert str(raised.value).startswith(path)


def test_bytes_that_are_no_text_in_a_store(tmp_path: Path):
    folder = _store(tmp_path / "t", _frames())
    texts = pa.array([b"a", b"\xff\xfe", b"a", b"b"]).cast(pa.string(), safe=False)
    table = pq.read_table(folder / "kernels.parquet")
    table = table.set_column(table.column_names.index("name"), "name", texts.dictionary_encode())
    pq.write_table(table, folder / "kernels.parquet")
    with pytest.raises(TraceError, match="kernels"):
        nsightkit.load(folder).table("kernels", ["name"])


def test_starts_and_ends_are_checked_together():
    frames = _frames()
    frames["kernels"]["end_ns"] -= 850
    trace = Trace.from_frames(frames)
    with pytest.raises(TraceError, match=r"kernels\.end_ns that is before start_ns in 4 rows"):
        trace.table("kernels", ["end_ns"])


def test_times_are_never_made_up():
    trace = Trace.from_frames({"kernels": _frames()["kernels"].drop(columns="end_ns")})
    with pytest.raises(TraceError, match=r"lacks the column kernels\.end_ns"):
        trace.table("kernels")


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        (TraceMeta(tool="\ud800"), "surrogates"),
        (TraceMeta(gpus=[Gpu(device="first")]), "Expected `int`"),  # type: ignore[arg-type]
        (TraceMeta(gpus=[Gpu(0, name=b"raw")]), "gpus"),  # type: ignore[arg-type]
        (TraceMeta(thread_names={1: None}), "thread_names"),  # type: ignore[dict-item]
        (TraceMeta(notes="one"), "notes"),  # type: ignore[arg-type]
        (TraceMeta(missing=["kernel"]), "no table 'kernel'"),
        (TraceMeta(window_ns=(5, 4)), "runs from 5 to 4"),
        (TraceMeta(window_ns=(0, 2**62)), "runs from 0"),
    ],
)
def test_a_capture_that_is_described_wrongly(meta: TraceMeta, said: str):
    with pytest.raises(TraceError, match="describes its capture wrongly") as raised:
        Trace.from_frames({}, meta)
    assert said in str(raised.value)


@pytest.mark.parametrize("first", [2**62, -(2**62), 10**30])
def test_a_clock_that_begins_nowhere(first: int, tmp_path: Path):
    folder = _store(tmp_path / "t", _frames())
    index = json.loads((folder / "trace.json").read_text())
    (folder / "trace.json").write_text(json.dumps(index | {"first_ns": first}))
    with pytest.raises(TraceError, match="impossible time"):
        nsightkit.load(folder).table("kernels")
