"""Hostile memory snapshots: an error that names the file, and soon."""

from __future__ import annotations

import contextlib
import pickle
import random
import re
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from child import command
from make_snapshot import random_program

from nsightkit import cli
from nsightkit.analysis.memory import snapshot as memory
from nsightkit.errors import NsightkitError, TraceError
from nsightkit.trace import snapshot

MIB = 1 << 20


def refused(path: Path, question: Callable[[], Any]) -> str:
    """Ask a question of a file, which may end in an error; give that error."""
    try:
        question()
    except NsightkitError as error:
        return str(error)
    return str(path)


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail where something takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"over {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def cpu_s(function: Callable[[], Any]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def program() -> Any:
    return random_program(1, 30).snapshot()


def circles() -> dict[str, Any]:
    """Snapshots that hold themselves somewhere."""
    made = {}
    for place in ("top", "traces", "segments", "frames", "settings", "metadata", "annotations", "blocks"):
        found = program()
        itself: list[Any] = []
        itself.append(itself)
        match place:
            case "top":
                found["self"] = found
            case "traces":
                found["device_traces"].append(found["device_traces"])
            case "segments":
                found["segments"].append(found["segments"])
            case "frames":
                found["device_traces"][0][0]["frames"] = itself
            case "settings":
                found["allocator_settings"] |= {"x": found, "roundup_power2_divisions": found["allocator_settings"]}
            case "metadata":
                found["device_traces"][0][0]["user_metadata"] = found
            case "annotations":
                found["external_annotations"] = itself
            case "blocks":
                found["segments"][0]["blocks"].append(found["segments"][0])
        made[place] = found
    return made


@pytest.mark.parametrize("place", circles())
def test_a_snapshot_that_holds_itself_is_read_or_refused(tmp_path: Path, place: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(circles()[place], 4))
    with within(10):
        with contextlib.suppress(TraceError):
            memory.summary(snapshot.read(path))
        with pytest.raises(TraceError, match=re.escape(str(path))):
            snapshot.plain(path)
        assert cli.run(["scrub", str(path), str(tmp_path / "out.pickle")]) == 2


NEST = 1_000_000
_SEGMENTS = b"\x80\x04}(\x8c\x08segments]"
DEEP = {
    "lists": b"\x80\x04}\x8c\x08segments" + b"]" * NEST + b"a" * (NEST - 1) + b"s.",
    "settings": _SEGMENTS + b"\x8c\x12allocator_settings}\x8c\x01x" + b"]" * NEST + b"a" * (NEST - 1) + b"su.",
    "dicts": _SEGMENTS + b"\x8c\x01x" + b"}K\x01" * NEST + b"}" + b"s" * NEST + b"u.",
}


@pytest.mark.parametrize("kind", DEEP)
def test_a_snapshot_a_million_deep_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(DEEP[kind])
    ended = command("memory", path)
    assert (ended.code, ended.error.count("\n")) == (2, 1), ended.error
    assert ended.cpu_s < 10
    assert ended.peak_bytes < 600 * MIB
    with pytest.raises(TraceError, match=re.escape(str(path))):
        snapshot.plain(path)


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


def test_keys_that_are_slow_to_hash_are_refused(tmp_path: Path) -> None:
    pairs = pairs_of_one_hash(30_000)
    if len({hash(pair) for pair in pairs}) > 1:
        pytest.skip("this Python hashes tuples in another way")
    keys = b"".join(b"\x8a\x08%b\x8a\x08%b\x86N" % (struct.pack("<q", a), struct.pack("<q", b)) for a, b in pairs)
    path = tmp_path / "s.pickle"
    path.write_bytes(_SEGMENTS + b"\x8c\x01x}(" + keys + b"uu.")
    with within(5), pytest.raises(TraceError, match="a pair of anything but integers of 32 bits"):
        snapshot.read(path)


@pytest.mark.parametrize("value", [1 << 70, 1 << 63, -5, 1 << 40, 1.5, float("nan"), float("inf"), True, "4", [1], {}])
def test_settings_of_any_value_are_read(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "s.pickle"
    for setting in ("roundup_power2_divisions", "max_split_size", "divisions", "x"):
        found = program()
        found["allocator_settings"][setting] = value
        if setting == "divisions":
            found["allocator_settings"]["roundup_power2_divisions"] = {str(1 << i): value for i in range(16)}
        path.write_bytes(pickle.dumps(found, 4))
        memory.summary(snapshot.read(path))


@pytest.mark.parametrize(
    "value", [1 << 70, 1 << 62, -1, 1.5, float("nan"), float("inf"), None, "4", [1], {}, "x" * 100]
)
def test_snapshots_of_any_value_are_read_or_refused(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "s.pickle"
    for table in ("device_traces", "segments", "blocks", "external_annotations"):
        found = program()
        found["external_annotations"] = [{"time_us": 5, "name": "a", "stage": "START", "device": 0}]
        rows = {
            "device_traces": found["device_traces"][0],
            "blocks": found["segments"][0]["blocks"],
        }.get(table) or found[table]
        for key in list(rows[0]):
            kept = rows[0][key]
            rows[0][key] = value
            path.write_bytes(pickle.dumps(found, 4))
            rows[0][key] = kept
            assert "\n" not in refused(path, lambda: memory.summary(snapshot.read(path)))


def test_times_of_events_that_no_clock_has_are_refused(tmp_path: Path) -> None:
    found = program()
    found["device_traces"][0][-1]["time_us"] = 1 << 62
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(found, 4))
    with pytest.raises(TraceError, match="time_us"):
        snapshot.read(path)
