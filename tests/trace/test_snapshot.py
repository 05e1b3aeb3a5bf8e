"""Memory snapshots are read as PyTorch wrote them; hostile files are refused and run nothing."""

from __future__ import annotations

import copyreg
import gzip
import io
import os
import pickle
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from make_snapshot import MIB, frame, random_program

import nsightkit
from nsightkit import cli
from nsightkit.analysis.memory import snapshot as analysis
from nsightkit.errors import TraceError, UsageError
from nsightkit.trace import snapshot as reader


class Reduced:
    """What unpickling calls."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


class PersistentPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return "secret" if obj == "me" else None


def persistent() -> bytes:
    out = io.BytesIO()
    PersistentPickler(out, protocol=4).dump({"segments": ["me"]})
    return out.getvalue()


def doubled_lists() -> Any:
    """Lists of the same list twice, 60 deep: short in a file, and endless to spell out."""
    lists: Any = []
    for _ in range(60):
        lists = [lists, lists]
    return lists


def repeated_frames() -> Any:
    frames = [frame("f")] * 30_000
    events = [{"action": "alloc", "addr": 1, "size": 1, "frames": f} for f in [frames, [], list(frames)] * 4000]
    return {"segments": [], "device_traces": [events]}


MARKER = Path(tempfile.gettempdir()) / f"nsightkit-hostile-{os.getpid()}"
TOUCH = f"touch {MARKER}"
CODE = f"open({str(MARKER)!r}, 'w').close()"
EVENT = {"action": "alloc", "addr": 1, "size": 1, "stream": 0, "frames": []}
LISTS = doubled_lists()
FILES = {
    "system, text": (pickle.dumps(Reduced(os.system, TOUCH), 0), r"asks for \w+\.system"),
    "system, 2": (pickle.dumps(Reduced(os.system, TOUCH), 2), r"asks for \w+\.system"),
    "system, 5": (pickle.dumps(Reduced(os.system, TOUCH), 5), r"asks for \w+\.system"),
    "eval": (pickle.dumps(Reduced(eval, CODE), 4), r"builtins\.eval"),
    "nested": (pickle.dumps([{"address": 1, "frames": [frame("f") | {"line": Reduced(eval, CODE)}]}]), r"\.eval"),
    "getattr": (pickle.dumps(Reduced(getattr, [], "append"), 4), r"builtins\.getattr"),
    "copyreg": (pickle.dumps(Reduced(copyreg._reconstructor, dict, dict, None), 4), r"copyreg\._reconstructor"),
    "persistent id": (persistent(), "persistent id"),
    "INST": (f"(S'{TOUCH}'\nios\nsystem\n.".encode(), r"os\.system"),
    "names from the memo": (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94]h\x00h\x01\x93.", r"os\.system"),
    "control characters": (b"\x80\x04\x8c\x03o\x1bs\x8c\x03\ra\n\x93.", r"o\\x1bs\. a"),
    "extension": (b"\x80\x02\x82\x05.", "extension code 5"),
    "BUILD": (b"\x80\x02}}b.", "not a readable pickle"),
    "REDUCE": (b"\x80\x02})R.", "not a readable pickle"),
    "NEWOBJ": (b"\x80\x02})\x81.", "not a readable pickle"),
    "memo bomb": (b"\x80\x02]r\xff\xff\xff\x7f.", "MemoryError"),
    "huge integer": (b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b".", "truncated"),
    "text of 2**62": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.", "truncated"),
    "bytes of 2**62": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.", "MemoryError"),
    "stack underflow": (b"\x80\x02e.", "not a readable pickle"),
    "empty": (b"", "is empty"),
    "gzip": (gzip.compress(b"x"), "not a readable pickle"),
    "zip": (b"PK\x03\x04" + bytes(40), "not a readable pickle"),
    "sqlite": (b"SQLite format 3\0" + bytes(40), "not a readable pickle"),
    "json": (b'{"segments": []}', "not a readable pickle"),
    "noise": (random.Random(0).randbytes(5000), "not a readable pickle"),
    "a number": (pickle.dumps(3), "no memory snapshot"),
    "another dict": (pickle.dumps({"weights": [1]}), "no memory snapshot"),
    "other segments": (pickle.dumps({"segments": [1, 2]}), "not a memory snapshot"),
    "a large number": (pickle.dumps([{"address": 1 << 200, "total_size": 1}]), "not a memory snapshot"),
    "a negative size": (pickle.dumps([{"address": 0, "total_size": -5, "blocks": []}]), "cannot be"),
    "repeated lists": (pickle.dumps({"segments": [], "device_traces": [[EVENT] * 1000] * 1000}), "repeats its own"),
    "repeated frames": (pickle.dumps(repeated_frames()), "repeats its own parts"),
    "lists for numbers": (pickle.dumps([{"address": LISTS, "total_size": LISTS}]), "not a memory snapshot"),
    "lists for text": (
        pickle.dumps([{"address": 1, "total_size": 2, "blocks": [{"size": 1, "state": LISTS}]}]),
        "not a memory snapshot",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_files_are_refused_and_run_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, words = FILES[name]
    path = tmp_path / "snap.pickle"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=words) as caught:
        reader.read(path)
    assert str(path) in str(caught.value)
    assert cli.run(["memory", str(path), "-f", "json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert not MARKER.exists()


def test_damage_never_gets_past_the_reader(tmp_path: Path) -> None:
    chance = random.Random(5)
    data = pickle.dumps(random_program(3, 15).snapshot(), 4)
    path = tmp_path / "snap.pickle"
    refused = 0
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            analysis.summary(reader.read(path))
        except (TraceError, UsageError):
            refused += 1
    assert refused > 10


def assert_same(first: reader.Snapshot, second: reader.Snapshot) -> None:
    for table in ("events", "segments", "blocks", "frames", "annotations"):
        pd.testing.assert_frame_equal(getattr(first, table), getattr(second, table))
    assert first.stack_frames.tolist() == second.stack_frames.tolist()
    assert first.settings == second.settings


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_protocol_and_a_live_snapshot_give_the_same(protocol: int, tmp_path: Path) -> None:
    taken = random_program(4, 60).snapshot()
    path = tmp_path / "taken"
    path.write_bytes(pickle.dumps(taken, protocol))
    assert_same(reader.read(path), reader.from_object(taken))
    with pytest.raises(TraceError, match=r"is a pickle: a memory snapshot.*nsightkit memory taken"):
        nsightkit.load(path)


def test_old_shapes() -> None:
    """PyTorch 2.0: blocks with a history and without addresses, events without times; before it a list of segments."""
    history = {"addr": 64, "real_size": 700, "frames": [frame("f")]}
    blocks = [
        {"size": 512, "state": "inactive"},
        {"size": 1024, "state": "active_allocated", "history": [history]},
        {"size": 2 * MIB - 1536, "state": "inactive"},
    ]
    segment = {"address": MIB, "total_size": 2 * MIB, "allocated_size": 1024, "active_size": 1024, "blocks": blocks}
    events = [
        {"action": "alloc", "addr": MIB, "size": 100, "stream": 0, "frames": [frame("g")]},
        {"action": "free", "addr": MIB, "size": 100, "stream": 0},
    ]
    snapshot = reader.from_object({"segments": [segment], "device_traces": [events]})
    assert not snapshot.timed
    assert snapshot.blocks["address"].tolist() == [MIB, MIB + 512, MIB + 1536]
    amounts = analysis.timeline(snapshot)[["allocated_bytes", "active_bytes", "requested_bytes"]]
    assert amounts.to_numpy().tolist() == [[1024, 1024, 700], [1536, 1536, 800], [1024, 1024, 700]]
    answer = analysis.summary(snapshot)
    assert answer["peak_bytes"] == 1536
    without_events = analysis.summary(reader.from_object([segment]))
    assert without_events["peak_bytes"] is None
    assert without_events["moment"] == "end"
    assert [row["site"] for row in without_events["top_sites"]] == ["train.py:1 f"]
