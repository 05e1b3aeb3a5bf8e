"""Recordings as a few files: whole at every moment, the same again, and nothing placed that is not a recording."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from nsightkit.cli import run
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations import packing, parts, recordings, what_runs

PARTS = [parts.find("ceilings", name) for name in ("before", "after", "fp32", "tf32", "fp16", "fp8")]


def recorded(where: Path, part: parts.Part, size: int = 1000, **changes: object) -> Path:
    """A recording of a part, with so many random bytes in its trace."""
    place = where / part.investigation / "planted-gpu" / part.name
    facts = {
        "format": what_runs.FORMAT, "kind": "measured", "investigation": part.investigation, "part": part.name,
        "key": recordings.part_key(part), "gpu": {"name": "Planted GPU"}, "utc": "2026-01-02T03:04:05+00:00", **changes,
    }  # fmt: skip
    (place / "trace").mkdir(parents=True, exist_ok=True)
    (place / "provenance.json").write_text(json.dumps(facts))
    (place / "samples.parquet").write_bytes(b"samples")
    (place / "trace" / "kernels.parquet").write_bytes(random.Random(part.name).randbytes(size))
    return place


def tree(where: Path) -> dict[str, bytes]:
    return {path.relative_to(where).as_posix(): path.read_bytes() for path in where.rglob("*") if path.is_file()}


def inside(folder: Path) -> list[list[str]]:
    """The parts in each file."""
    found = []
    for file in sorted(folder.glob("recordings-*.zip")):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
            found.append(list(dict.fromkeys(name.split("/")[2] for name in archive.namelist())))
    return found


@pytest.fixture
def made(tmp_path: Path) -> Path:
    for part in PARTS:
        recorded(tmp_path / "made", part)
    return tmp_path / "made"


# -- packing -----------------------------------------------------------------------------------------------------


def test_what_is_packed_comes_back_bit_for_bit(made: Path, tmp_path: Path) -> None:
    place = recorded(made, parts.find("memory-snapshot", "before"))
    (place / "snapshot.pickle").write_bytes(b"snapshot")
    place = recorded(made, parts.find("limiters", "before"))
    (place / "ncu.csv").write_bytes(b"counters")
    (place / "runs.json.gz").write_bytes(b"what it runs")
    (place / "nsys").mkdir()
    (place / "nsys" / "trace.json").write_bytes(b"{}")
    files = packing.pack(made, tmp_path / "packed")
    rows = packing.unpack(files, tmp_path / "back")
    assert {row["status"] for row in rows} == {"placed"}
    assert tree(tmp_path / "back") == tree(made)
    assert {row["status"] for row in packing.unpack(files, tmp_path / "back")} == {"kept"}


def test_the_same_recordings_give_the_same_files_and_write_none_again(made: Path, tmp_path: Path) -> None:
    files = packing.pack(made, tmp_path / "one")
    before = {file: file.stat().st_ino for file in files}
    assert packing.pack(made, tmp_path / "one") == files
    assert {file: file.stat().st_ino for file in files} == before
    packing.pack(made, tmp_path / "two")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_a_file_holds_no_more_than_it_may_and_only_what_changes_is_written(made: Path, tmp_path: Path) -> None:
    one = packing.pack(made, tmp_path / "all")[0].stat().st_size / len(PARTS) / 1e6
    folder, limit = tmp_path / "packed", 2.5 * one  # two parts a file
    files = packing.pack(made, folder, limit)
    assert inside(folder) == [["after", "before"], ["fp16", "fp32"], ["fp8", "tf32"]]
    assert all(file.stat().st_size <= limit * 1e6 for file in files)
    written = [file.stat().st_ino for file in files]
    recorded(made, parts.find("ceilings", "copy"))
    files = packing.pack(made, folder, limit)
    assert [file.stat().st_ino for file in files[:3]] == written
    assert inside(folder)[3] == ["copy"]
    # A part that is recorded again replaces itself, in its file.
    place = recorded(made, PARTS[0], utc="2026-01-03T03:04:05+00:00")
    files = packing.pack(made, folder, limit)
    assert [file.stat().st_ino for file in files[1:3]] == written[1:]
    with zipfile.ZipFile(files[0]) as archive:
        name = (place / "provenance.json").relative_to(made).as_posix()
        assert archive.read(name) == (place / "provenance.json").read_bytes()


def test_a_part_that_no_longer_fits_moves_and_one_that_is_gone_stays(made: Path, tmp_path: Path) -> None:
    limit = 2.5 * packing.pack(made, tmp_path / "all")[0].stat().st_size / len(PARTS) / 1e6
    folder = tmp_path / "packed"
    packing.pack(made, folder, limit)
    recorded(made, PARTS[0], 2500)
    (made / "ceilings/planted-gpu/tf32/provenance.json").unlink()
    packing.pack(made, folder, limit)
    assert inside(folder) == [["after"], ["fp16", "fp32"], ["fp8", "tf32"], ["before"]]


def test_what_fits_nowhere_is_named(made: Path, tmp_path: Path) -> None:
    recorded(made, PARTS[0], 50_000)
    said: list[str] = []
    packing.pack(made, tmp_path / "large", 0.02, echo=said.append)
    (line,) = said
    assert line.startswith("ceilings/planted-gpu/before is not packed: it takes 0.1 MB of 0.02 MB a file")
    assert all("before" not in parts for parts in inside(tmp_path / "large"))
    said.clear()
    packing.pack(made, tmp_path / "few", 0.003, most=3, echo=said.append)
    assert [line.partition(": ")[2] for line in said if "full" in line] == ["all 2 files are full"] * 3
    assert len(inside(tmp_path / "few")) == 2
    with pytest.raises(UsageError, match="can hold nothing"):
        packing.pack(made, tmp_path / "none", 0.0)


def test_a_file_that_is_not_ours_is_left_alone(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / "recordings-1.zip").write_text("somebody's own")
    said: list[str] = []
    assert [path.name for path in packing.pack(made, folder, echo=said.append)] == ["recordings-2.zip"]
    assert (folder / "recordings-1.zip").read_text() == "somebody's own"
    assert len(said) == 1
    assert said[0].endswith("; it is left as it is")


def test_logs_travel_apart(made: Path, tmp_path: Path) -> None:
    for name, size in (("failure.txt", 300), ("trace.json.gz", 1_000_001), ("large.txt", 9000)):
        path = made / recordings.RAW / "ceilings" / "read" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (made / ".preflight.json").write_text("{}" * 200)
    (made / recordings.RAW / "gate" / "before").mkdir(parents=True)
    (made / recordings.RAW / "gate" / "before" / "result.json").write_text("{}")  # it may still be written
    *_, failed = files = packing.pack(made, tmp_path / "packed", 0.005)
    assert failed.name == packing.LOGS
    assert zipfile.ZipFile(failed).namelist() == [".raw/ceilings/read/failure.txt", ".preflight.json"]
    rows = packing.unpack(files, tmp_path / "back")
    assert [row["detail"] for row in rows if row["status"] == "logs"] == [
        f"{failed} holds logs; 'python -m zipfile -e {failed} FOLDER' unpacks them"
    ]
    assert not list((tmp_path / "back").rglob(".*"))
    # A recording is worth more than logs: there are never more files than allowed.
    packing.pack(made, tmp_path / "few", 0.1, most=3)
    packing.pack(made, tmp_path / "few", 0.004, most=3)
    recorded(made, parts.find("ceilings", "copy"), 90_000)
    assert len(packing.pack(made, tmp_path / "few", 0.1, most=3)) == 2
    assert len(list((tmp_path / "few").iterdir())) == 2


#: Starts, for each line it reads, a process that records again and packs until it is killed.
PACKS_ON_AND_ON = """
import json, os, signal, sys
from pathlib import Path
from nsightkit.investigations import packing
where, folder = map(Path, sys.argv[1:])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    for number in range(10**9):
        for record in sorted(where.glob("*/*/*/samples.parquet"))[number % 3 :: 3]:
            record.write_text(f"samples {line} {number}")
        packing.pack(where, folder, 0.7, most=4)
"""


def test_killed_at_any_moment_what_is_packed_is_whole(made: Path, tmp_path: Path) -> None:
    for part in PARTS:
        recorded(made, part, 300_000)
    folder, chance = tmp_path / "packed", random.Random(16)
    packing.pack(made, folder, 0.7, most=4)
    names = set(tree(made))
    command = [sys.executable, "-c", PACKS_ON_AND_ON, str(made), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as packers:
        assert packers.stdin is not None
        assert packers.stdout is not None
        for number in range(12):
            print(number, file=packers.stdin, flush=True)
            pid = int(packers.stdout.readline())
            time.sleep(chance.uniform(0.02, 0.1))
            os.kill(pid, signal.SIGKILL)
            while Path(f"/proc/{pid}").exists():
                time.sleep(0.001)
            assert len(list(folder.iterdir())) <= 4
            held = []
            for file in folder.glob("*.zip"):
                assert file.stat().st_size <= 700_000
                with zipfile.ZipFile(file) as archive:
                    assert archive.testzip() is None
                    held += archive.namelist()
            assert sorted(held) == sorted(names)
        packers.stdin.close()
    packing.pack(made, folder, 0.7, most=4)
    assert not list(folder.glob(".*"))


def test_the_commands_of_the_contributors_guide_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Path(__file__).parents[2].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = re.findall(r"^python -m nsightkit (record --(?:budget|unpack).*)$", guide, re.MULTILINE)
    assert len(lines) == 2
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(tmp_path / "real"))
    monkeypatch.chdir(tmp_path)
    recorded = ["--dry-run", "--only", "accumulation", "--out", "recorded"]
    assert run([*lines[0].split(), *recorded]) == 0
    assert [path.name for path in tmp_path.glob("packed/*")] == ["recordings-1.zip"]
    unpack = lines[1].replace("packed/*.zip", "packed/recordings-1.zip").split()  # as a shell does
    assert run([*unpack, "--dry-run", "--out", "placed"]) == 0
    placed = tree(tmp_path / "placed")
    assert {name: data for name, data in tree(tmp_path / "recorded").items() if "/." not in f"/{name}"} == placed
    assert {name.rpartition("/")[0] for name in placed if name.endswith("provenance.json")} == {
        "accumulation/no-gpu/before", "accumulation/no-gpu/after"
    }  # fmt: skip
    assert not (tmp_path / "real").exists()
    # Without --dry-run it is no recording.
    assert run([*unpack, "--out", "refused"]) == 2
    assert tree(tmp_path / "refused") == {}


# -- unpacking ---------------------------------------------------------------------------------------------------


def test_of_two_the_better_recording_stays(made: Path, tmp_path: Path) -> None:
    files = packing.pack(made, tmp_path / "packed")
    back = tmp_path / "back"
    newer = recorded(back, PARTS[0], utc="2026-02-01T00:00:00+00:00")
    older = recorded(back, PARTS[1], utc="2025-02-01T00:00:00+00:00")
    other_code = recorded(back, PARTS[2], utc="2026-02-01T00:00:00+00:00", key="0" * 32)
    before = tree(newer)
    rows = {row["part"]: row["status"] for row in packing.unpack(files, back)}
    assert [rows[part.name] for part in PARTS] == ["kept", *["placed"] * 5]
    assert tree(newer) == before
    for place in (older, other_code):
        assert tree(place) == tree(made / place.relative_to(back))
    # A stale one is placed where there is none, and says that it is stale.
    recorded(tmp_path / "stale", PARTS[3], key="0" * 32, accepted=[1, {"key": []}])
    files = packing.pack(tmp_path / "stale", tmp_path / "packed stale")
    (row,) = packing.unpack(files, tmp_path / "empty")
    assert (row["status"], row["detail"]) == ("placed", "the code or the parameters have changed since")
    assert [row["status"] for row in packing.unpack(files, back)] == ["kept"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "smoke"}, "it was not measured on a GPU"),
        ({"gpu": {"name": ["Planted", 200]}}, "its folder is named after another GPU"),
        ({"investigation": "gate"}, "it is of another part"),
        (None, "it is incomplete"),
        ("part", "there is no such part"),
    ],
)
def test_what_is_no_recording_is_refused_and_named(tmp_path: Path, change: object, reason: str) -> None:
    place = recorded(tmp_path / "made", PARTS[0], **(change if isinstance(change, dict) else {}))
    recorded(tmp_path / "made", PARTS[1])
    if change is None:
        (place / "samples.parquet").unlink()
    elif change == "part":
        place.rename(place.with_name("no-such"))
    files = packing.pack(tmp_path / "made", tmp_path / "packed")
    rows = packing.unpack(files, tmp_path / "back")
    assert sorted((row["status"], row["detail"]) for row in rows if row["status"] != "placed") == [("refused", reason)]
    assert [path.name for path in (tmp_path / "back").glob("*/*/*")] == ["after"]


def hostile(kind: str, file: Path, whole: bytes) -> None:
    """Write something that is no archive of recordings, or one with a trap in it."""
    name = "ceilings/planted-gpu/copy/provenance.json"
    traps = {
        "absolute": "/tmp/evil.json", "above": "ceilings/planted-gpu/copy/../../../evil.json", "dots": "../evil.json",
        "backslash": "ceilings\\planted-gpu\\copy\\evil.json", "hidden": "ceilings/planted-gpu/.copy/provenance.json",
        "program": "ceilings/planted-gpu/copy/evil.py", "folder": "ceilings/planted-gpu/copy/", "deep": f"a/{name}",
        "nothing": "", "nul": "ceilings/planted-gpu/copy\x00/provenance.json", "newline": f"{name}\n",
    }  # fmt: skip
    if kind == "truncated":
        file.write_bytes(whole[:-100])
    elif kind == "flipped":
        middle = whole.index(b"samples", whole.index(b"samples.parquet") + 10)
        file.write_bytes(whole[:middle] + b"S" + whole[middle + 1 :])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "tar":
        with tarfile.open(file, "w") as archive:
            archive.add(__file__, name)
    elif kind == "absent":
        return
    else:
        with zipfile.ZipFile(file, "w") as archive:
            info = zipfile.ZipInfo(traps.get(kind, name))
            if kind == "bomb":
                archive.writestr(info, b"\0" * 10**7, zipfile.ZIP_DEFLATED)
            else:
                archive.writestr(info, "{}")
            if kind == "link":
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
                archive.writestr(zipfile.ZipInfo("ceilings/planted-gpu/copy/samples.parquet"), "/etc/passwd")
            if kind == "twice":
                with pytest.warns(UserWarning, match="Duplicate name"):
                    archive.writestr(info, "{}")


@pytest.mark.parametrize(
    "kind",
    [
        "truncated", "flipped", "empty", "tar", "absent", "bomb", "twice", "absolute", "above", "dots", "backslash",
        "hidden", "program", "folder", "deep", "nothing", "nul", "newline",
    ],
)  # fmt: skip
def test_nothing_is_placed_of_an_archive_that_is_not_ours(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (good,) = packing.pack(made, tmp_path / "packed")
    bad = tmp_path / "bad.zip"
    hostile(kind, bad, good.read_bytes())
    back = tmp_path / "back"
    assert run(["record", "--unpack", str(good), str(bad), "--out", str(back)]) == 2
    said = capsys.readouterr().err
    assert f"{bad}: is not a whole file that 'record --pack' wrote (" in said
    assert said.count("\n") == 1
    assert not back.exists()


def test_a_link_in_an_archive_becomes_a_file_like_any_other(tmp_path: Path) -> None:
    hostile("link", tmp_path / "link.zip", b"")
    (row,) = packing.unpack([tmp_path / "link.zip"], tmp_path / "back")
    assert row["status"] == "refused"
    assert tree(tmp_path / "back") == {}


def test_where_nothing_can_be_written_it_is_said_in_one_line(made: Path, tmp_path: Path) -> None:
    files = packing.pack(made, tmp_path / "packed")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file.*cannot be written"):
        packing.unpack(files, tmp_path / "file")
    with pytest.raises(NsightkitError, match=r"file.*cannot be packed"):
        packing.pack(made, tmp_path / "file" / "packed")
    start = ["record", "--dry-run", "--out", str(tmp_path / "recorded"), "--pack"]
    assert run([*start, str(tmp_path / "file")]) == 2
    assert run([*start, str(tmp_path / "packed"), "--part-mb", "0"]) == 2
    assert not list((tmp_path / "recorded").iterdir())
    with pytest.raises(UsageError, match="needs the files"):
        packing.unpack([], tmp_path / "back")
