"""Memory snapshots are read as PyTorch wrote them; hostile files are refused soon and run nothing."""

from __future__ import annotations

import contextlib
import copyreg
import os
import pickle
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from child import command
from make_snapshot import frame, random_program, tables

import nsightkit
from nsightkit.analysis.memory import snapshot as analysis
from nsightkit.errors import NsightkitError, TraceError
from nsightkit.trace import snapshot as reader

MIB = 1 << 20


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_and_a_live_snapshot_give_the_same(protocol: int, tmp_path: Path):
    taken = program()
    path = tmp_path / "taken"
    path.write_bytes(pickle.dumps(taken, protocol))
    read = reader.read(path)
    live = tables(taken)
    for table in ("events", "segments", "blocks", "frames", "annotations"):
        pd.testing.assert_frame_equal(getattr(read, table), getattr(live, table))
    assert read.stack_frames.tolist() == live.stack_frames.tolist()
    assert read.settings == live.settings
    with pytest.raises(TraceError, match=r"is a pickle: a memory snapshot.*nsightkit memory taken"):
        nsightkit.load(path)


def program() -> Any:
    taken = random_program(4, 20).snapshot()
    taken["device_traces"][0][0]["frames"] = [frame("f"), frame("f"), frame("é")]
    taken["external_annotations"] = [{"time_us": 5, "name": "a", "stage": "START", "device": 0}]
    return taken


# ---------------------------------------------------------------- hostile files


class Reduced:
    """What unpickling calls."""

    def __init__(self, function: Any, *arguments: Any):
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def doubled_lists() -> Any:
    """Lists of the same list twice, 60 deep: short in a file, and endless to spell out."""
    lists: Any = []
    for _ in range(60):
        lists = [lists, lists]
    return lists


NEST = 1_000_000
SEGMENTS = b"\x80\x04}(\x8c\x08segments]"
MARKER = Path(tempfile.gettempdir()) / f"nsightkit-hostile-{os.getpid()}"
TOUCH = f"touch {MARKER}"
CODE = f"open({str(MARKER)!r}, 'w').close()"
EVENT = {"action": "alloc", "addr": 1, "size": 1, "stream": 0, "frames": []}
BLOCK = {"address": 1, "size": 1, "requested_size": 1, "state": "inactive"}
SEGMENT = {"address": 1, "total_size": 1, "blocks": [BLOCK]}
LISTS = doubled_lists()
OTHER = "is not a memory snapshot"
MUCH = "needs far more memory or time"
FILES = {
    "system, 0": (pickle.dumps(Reduced(os.system, TOUCH), 0), r"asks for \w+\.system"),
    "system, 5": (pickle.dumps(Reduced(os.system, TOUCH), 5), r"asks for \w+\.system"),
    "nested": (pickle.dumps([{"address": 1, "frames": [frame("f") | {"line": Reduced(eval, CODE)}]}]), r"\.eval"),
    "copyreg": (pickle.dumps(Reduced(copyreg._reconstructor, dict, dict, None), 4), r"copyreg\._reconstructor"),
    "persistent id": (b"\x80\x02K\x01Q.", "persistent id"),
    "INST": (f"(S'{TOUCH}'\nios\nsystem\n.".encode(), r"os\.system"),
    "names from the memo": (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94]h\x00h\x01\x93.", r"os\.system"),
    "control characters": (b"\x80\x04\x8c\x03o\x1bs\x8c\x03\ra\n\x93.", r"o\\x1bs\. a"),
    "extension": (b"\x80\x02\x82\x05.", "extension code 5"),
    "BUILD": (b"\x80\x02}}b.", OTHER),
    "memo bomb": (b"\x80\x02]r\xff\xff\xff\x7f.", "MemoryError"),
    "huge integer": (b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b".", "MemoryError|truncated"),
    "bytes of 2**62": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.", "MemoryError"),
    "empty": (b"", OTHER),
    "json": (b'{"segments": []}', OTHER),
    "noise": (random.Random(0).randbytes(5000), OTHER),
    "a number": (pickle.dumps(3), OTHER),
    "another dict": (pickle.dumps({"weights": [1]}), OTHER),
    "other segments": (pickle.dumps({"segments": [1, 2]}), OTHER),
    "a large number": (pickle.dumps({"segments": [SEGMENT | {"address": 1 << 200}]}), OTHER),
    "a negative size": (pickle.dumps({"segments": [SEGMENT | {"total_size": -5}]}), "cannot be"),
    "a device too many": (pickle.dumps({"segments": [SEGMENT | {"device": 4000}]}), "4001 devices"),
    "a time of no clock": (
        pickle.dumps({"segments": [], "device_traces": [[EVENT | {"time_us": 1 << 62}]]}),
        "time_us",
    ),
    "repeated events": (pickle.dumps({"segments": [], "device_traces": [[EVENT] * 1000] * 1000}), MUCH),
    "lists for numbers": (pickle.dumps({"segments": [SEGMENT | {"address": LISTS}]}), OTHER),
    "deep lists": (b"\x80\x04}\x8c\x08segments" + b"]" * NEST + b"a" * (NEST - 1) + b"s.", OTHER),
    "deep dicts": (SEGMENTS + b"\x8c\x01x" + b"}K\x01" * NEST + b"}" + b"s" * NEST + b"u.", None),
    "a key of 2**60 steps": (SEGMENTS + b"K\x01K\x02\x86" + b"q\x00h\x00\x86" * 60 + b"Nu.", MUCH),
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_files_are_refused_and_run_nothing(name: str, tmp_path: Path):
    data, words = FILES[name]
    path = tmp_path / "snap.pickle"
    path.write_bytes(data)
    if words is None:
        reader.read(path)
    else:
        with pytest.raises(TraceError, match=words) as caught:
            reader.read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not MARKER.exists()


def test_the_command_needs_little_for_a_bomb(tmp_path: Path):
    path = tmp_path / "s.pickle"
    path.write_bytes(SEGMENTS + b"\x8c\x01x]r" + struct.pack("<I", 1 << 29) + b"u.")
    ended = command("memory", path)
    assert ended.code == 2
    assert ended.error.count("\n") == 1, ended.error
    assert ended.cpu_s < 10
    assert ended.peak_bytes < 600 * MIB


def test_a_snapshot_that_holds_itself_is_read_or_refused():
    taken = program()
    itself: list[Any] = []
    itself.append(itself)
    event = taken["device_traces"][0][0]
    circles = {
        "segments": [*taken["segments"], taken["segments"]],
        "device_traces": [[event | {"frames": itself}]],
        "allocator_settings": {"roundup_power2_divisions": taken},
        "external_annotations": itself,
    }
    for table, circle in circles.items():
        with contextlib.suppress(TraceError):
            analysis.summary(tables(program() | {table: circle}))


VALUES = [1 << 70, 1 << 62, 1 << 40, -5, 1.5, float("nan"), None, True, "4", [1], {}, "x" * 100]


@pytest.mark.parametrize("value", VALUES)
def test_snapshots_of_any_value_are_read_or_refused(value: Any):
    keys = {"device_traces": program()["device_traces"][0][0], "segments": program()["segments"][0]}
    keys |= {"blocks": keys["segments"]["blocks"][0], "external_annotations": program()["external_annotations"][0]}
    for table, row in keys.items():
        for key in row:
            taken = program()
            rows = taken["segments"][0]["blocks"] if table == "blocks" else taken[table]
            rows = rows[0] if table == "device_traces" else rows
            rows[0][key] = value
            with contextlib.suppress(NsightkitError):
                analysis.summary(tables(taken))
