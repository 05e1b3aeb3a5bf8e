"""Hostile memory snapshots: an error that names the file, and soon."""

from __future__ import annotations

import contextlib
import pickle
import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from child import command
from make_snapshot import random_program

from nsightkit.analysis.memory import snapshot as memory
from nsightkit.errors import NsightkitError, TraceError
from nsightkit.trace import snapshot

MIB = 1 << 20


def program() -> Any:
    taken = random_program(1, 30).snapshot()
    taken["external_annotations"] = [{"time_us": 5, "name": "a", "stage": "START", "device": 0}]
    return taken


def circle(place: str) -> Any:
    """Make a snapshot that holds itself somewhere."""
    taken = program()
    itself: list[Any] = []
    itself.append(itself)
    settings = taken["allocator_settings"]
    match place:
        case "top":
            taken["self"] = taken
        case "traces":
            taken["device_traces"].append(taken["device_traces"])
        case "segments":
            taken["segments"].append(taken["segments"])
        case "frames":
            taken["device_traces"][0][0]["frames"] = itself
        case "settings":
            settings |= {"x": taken, "roundup_power2_divisions": settings}
        case "metadata":
            taken["device_traces"][0][0]["user_metadata"] = taken
        case "annotations":
            taken["external_annotations"] = itself
        case "blocks":
            taken["segments"][0]["blocks"].append(taken["segments"][0])
    return taken


@pytest.mark.parametrize(
    "place", ["top", "traces", "segments", "frames", "settings", "metadata", "annotations", "blocks"]
)
def test_a_snapshot_that_holds_itself_is_read_or_refused(tmp_path: Path, place: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(circle(place), 4))
    begin = time.process_time()
    with contextlib.suppress(TraceError):
        memory.summary(snapshot.read(path))
    assert time.process_time() - begin < 10


NEST = 1_000_000
SEGMENTS = b"\x80\x04}(\x8c\x08segments]"
DEEP = {
    "lists": b"\x80\x04}\x8c\x08segments" + b"]" * NEST + b"a" * (NEST - 1) + b"s.",
    "settings": SEGMENTS + b"\x8c\x12allocator_settings}\x8c\x01x" + b"]" * NEST + b"a" * (NEST - 1) + b"su.",
    "dicts": SEGMENTS + b"\x8c\x01x" + b"}K\x01" * NEST + b"}" + b"s" * NEST + b"u.",
    "memo": SEGMENTS + b"\x8c\x01x]r" + struct.pack("<I", 1 << 29) + b"u.",
}


def pairs_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Pairs of integers with the same hash: CPython mixes a tuple's items in a way that can be undone."""
    first, second, third, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1
    before = (12345 - (2 ^ third ^ 3527539)) * pow(first, -1, 1 << 64) & mask
    wanted = (before << 33 | before >> 31) & mask
    rng, made = random.Random(1), []
    while len(made) < count:
        left = rng.getrandbits(60)
        mixed = (third + left * second) & mask
        mixed = ((mixed << 31 | mixed >> 33) & mask) * first & mask
        right = (wanted - mixed) * pow(second, -1, 1 << 64) & mask
        if right < (1 << 61) - 1:
            made.append((left, right))
    return made


def slow_keys() -> bytes:
    pairs = pairs_of_one_hash(60_000)
    if len({hash(pair) for pair in pairs}) > 1:
        pytest.skip("this Python hashes tuples in another way")
    keys = b"".join(b"\x8a\x08%b\x8a\x08%b\x86N" % (struct.pack("<q", a), struct.pack("<q", b)) for a, b in pairs)
    return SEGMENTS + b"\x8c\x01x}(" + keys + b"uu."


#: A tuple of the same tuple twice, 60 deep, as a key: 2**60 steps to hash.
TUPLES = SEGMENTS + b"K\x01K\x02\x86" + b"q\x00h\x00\x86" * 60 + b"Nu."


@pytest.mark.parametrize("kind", [*DEEP, "keys", "tuples"])
def test_what_takes_long_or_much_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(DEEP[kind] if kind in DEEP else TUPLES if kind == "tuples" else slow_keys())
    begin = time.monotonic()
    ended = command("memory", path)
    assert ended.code == 2
    assert ended.error.count("\n") == 1, ended.error
    assert ended.cpu_s < 10
    assert ended.peak_bytes < 600 * MIB
    assert time.monotonic() - begin < 30  # with the process that tries it, on a busy machine


VALUES = [1 << 70, 1 << 63, 1 << 62, 1 << 40, -5, 1.5, float("nan"), float("inf"), None, True, "4", [1], {}, "x" * 100]


@pytest.mark.parametrize("value", VALUES)
def test_snapshots_of_any_value_are_read_or_refused(value: Any) -> None:
    keys = {"device_traces": program()["device_traces"][0][0], "segments": program()["segments"][0]}
    keys |= {"blocks": keys["segments"]["blocks"][0], "external_annotations": program()["external_annotations"][0]}
    for table, row in keys.items():
        for key in row:
            taken = program()
            rows = taken["segments"][0]["blocks"] if table == "blocks" else taken[table]
            rows = rows[0] if table == "device_traces" else rows
            rows[0][key] = value
            with contextlib.suppress(NsightkitError):
                memory.summary(snapshot.from_object(taken))


def test_times_of_events_that_no_clock_has_are_refused() -> None:
    taken = program()
    taken["device_traces"][0][-1]["time_us"] = 1 << 62
    with pytest.raises(TraceError, match="time_us"):
        snapshot.from_object(taken)
