"""Recordings as a few files, to carry them from the machine that made them to the one that keeps them.

The files are plain zip archives: what is in them is compressed already, and each byte is covered by a checksum. Their
names in an archive are those below the folder of recordings: ``<investigation>/<gpu>/<part>/<file>``. The logs of
failed parts and the preflight's results travel in an archive of their own; they are not recordings.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nsightkit.capture.provenance import slug
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations import recordings
from nsightkit.investigations.parts import find
from nsightkit.investigations.preflight import SAVED
from nsightkit.trace.files import replacing

__all__ = ["LOGS", "pack", "unpack"]

#: The file that holds no recordings: the folders of parts that failed, and the machine's preflight.
LOGS = "logs.zip"
#: A part's folder, and a file in it. No part of a name begins with a dot.
_MEMBER = re.compile(
    r"([a-z0-9][\w-]*/[a-z0-9][a-z0-9-]*/[a-z0-9][\w-]*)/(?:(?:trace|nsys)/)?[a-z_]+\.(?:json(?:\.gz)?|parquet|csv|pickle)",
    re.ASCII,
)
#: What a log may have; profiles and snapshots of a part that failed are larger.
_LARGEST_LOG = 1_000_000

#: By part, what is in its files, by name.
_Parts = dict[str, dict[str, bytes]]


def pack(
    where: Path,
    folder: Path,
    part_mb: float = 15.0,
    most: int = 8,
    echo: Callable[[str], object] = lambda _: None,
) -> list[Path]:
    """Pack all recordings that are there into files of limited size, and say what does not fit.

    Call it again whenever there is more: a part stays in its file, what is new goes into the last file that has room,
    and only files that change are written, each aside and then renamed. The folder never holds more than `most` files,
    nor one that is not whole under its name, at whatever moment the program is killed. What was packed and is gone from
    `where` stays packed.

    Parameters
    ----------
    where : Path
        Root of the recordings.
    folder : Path
        Gets ``recordings-1.zip``, ``recordings-2.zip``, … and, if there is room for it, :data:`LOGS`; no folders.
    part_mb : float
        The most that a file may have, in 10**6 bytes.
    most : int
        The most files in `folder`, one of which may be in the making.
    echo : callable
        Takes a line about each part that is left out.

    Returns
    -------
    list of Path
        All files.

    Raises
    ------
    UsageError
        No file could hold anything.
    NsightkitError
        A recording cannot be read, or a file cannot be written.
    """
    limit = round(part_mb * 1e6)
    if limit < 1 or most < 2:
        raise UsageError(f"{most} files of {part_mb:g} MB can hold nothing; allow at least 2 files of 1 MB")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _pack(where, folder, limit, most - 1, echo)
    except OSError as error:
        place = error.filename or folder
        raise NsightkitError(f"{place}: the recordings cannot be packed ({error.strerror or error})") from error


def _pack(where: Path, folder: Path, limit: int, most: int, say: Callable[[str], object]) -> list[Path]:
    for draft in folder.glob(".nsightkit-*"):  # of a run that was killed
        shutil.rmtree(draft)
    files: dict[Path, _Parts] = {}
    for place in (folder / f"recordings-{number}.zip" for number in range(1, most + 1)):
        try:
            files[place] = _read(place) if place.exists() else {}
        except UsageError as error:  # somebody's file of the same name
            say(f"{error}; it is left as it is")
    home = {part: place for place, parts in files.items() for part in parts}
    moved = set()
    recorded = _recorded(where, say)
    for part in [*(part for part in home if part in recorded), *(part for part in recorded if part not in home)]:
        contents = {part: recorded[part]}
        # Where it was, else the last file that is in use and has room, else a new one.
        used = [place for place, parts in files.items() if parts]
        places = [home[part]] if part in home else []
        places += [*reversed(used), *(place for place in files if place not in used)]
        room = next((place for place in places if _size(files[place] | contents) <= limit), None)
        if part in home and room != home[part]:
            del files[home[part]][part]
            moved.add(room)
        size = _size(contents)
        if room is not None:
            files[room] |= contents
        elif size > limit:
            allowed = f"{limit / 1e6:g} MB a file; allow larger ones with --part-mb"
            say(f"{part} is not packed: it takes {size / 1e6:.1f} MB of {allowed}")
        else:
            say(f"{part} is not packed: all {most} files are full")
    full = all(files.values())
    if full:  # a recording is worth more than logs
        (folder / LOGS).unlink(missing_ok=True)
    # What has moved is written where it goes before it leaves the place where it was.
    for place in sorted(files, key=lambda place: place not in moved):
        _write({name: data for contents in files[place].values() for name, data in contents.items()}, place)
    if not full:
        _write(_logs(where, limit), folder / LOGS)
    return [place for place in (*files, folder / LOGS) if place.exists()]


def _recorded(where: Path, say: Callable[[str], object]) -> _Parts:
    """Read what is recorded; a folder that begins with a dot is not finished, or has failed."""
    found: _Parts = {}
    for record in sorted(where.glob("[!.]*/[!.]*/[!.]*/provenance.json")):
        for path in sorted(path for path in record.parent.rglob("*") if path.is_file()):
            name = path.relative_to(where).as_posix()
            if _MEMBER.fullmatch(name):
                found.setdefault(record.parent.relative_to(where).as_posix(), {})[name] = path.read_bytes()
            else:
                say(f"{name} is not packed: no recording has such a file")
    return found


def _logs(where: Path, limit: int) -> dict[str, bytes]:
    """Read logs and the preflight's results, the smallest first, as long as they fit."""
    found: dict[str, bytes] = {}
    with contextlib.suppress(FileNotFoundError):  # one that failed may be tried again meanwhile
        failed = where.glob(f"{recordings.RAW}/*/*/{recordings.FAILURE}")
        named = [*(path for log in failed for path in log.parent.rglob("*")), where / SAVED]
        for size, path in sorted((path.stat().st_size, path) for path in named if path.is_file()):
            name = path.relative_to(where).as_posix()
            if size <= _LARGEST_LOG and _size({"": {**found, name: b" " * size}}) <= limit:
                found[name] = path.read_bytes()
    return found


def _size(parts: Mapping[str, Mapping[str, bytes]]) -> int:
    """Give the bytes of an archive: two headers for each file, each with its name, and the end of the directory."""
    sizes = [76 + 2 * len(name.encode()) + len(data) for files in parts.values() for name, data in files.items()]
    return sum(sizes) + 22


def _write(files: Mapping[str, bytes], place: Path) -> None:
    """Write an archive, the same bytes for the same files, unless it is there; one of nothing is removed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # with the date that zip begins with
    if not files:
        place.unlink(missing_ok=True)
    elif not place.exists() or place.read_bytes() != stream.getvalue():
        with replacing(place) as draft:
            draft.write(stream.getvalue())
            draft.flush()
            os.fsync(draft.fileno())


def _read(place: Path) -> _Parts:
    """Read a whole archive of recordings, or say what is wrong with it."""
    found: _Parts = {}
    try:
        with zipfile.ZipFile(place) as archive:
            members = archive.infolist()
            # What is stored as it is takes its size: a few bytes cannot become gigabytes.
            if sum(member.file_size for member in members) > place.stat().st_size:
                raise ValueError("its files are larger than itself")
            for member in members:
                name = member.filename
                matched = _MEMBER.fullmatch(name)
                if matched is None or member.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{name[:200]!r} does not belong to a recording")
                part = found.setdefault(matched[1], {})
                if name in part:
                    raise ValueError(f"{name!r} is in it twice")
                part[name] = archive.read(member)  # with its checksum
    # A damaged archive makes zipfile raise whatever it runs into.
    except Exception as error:
        why = " ".join(f"{error}".split()) or type(error).__name__
        raise UsageError(
            f"{place}: is not a whole file that 'record --pack' wrote ({why}); pack or copy it again"
        ) from error
    return found


def unpack(files: Sequence[Path], where: Path | None = None, *, dry_run: bool = False) -> list[dict[str, Any]]:
    """Put packed recordings in their places, each whole or not at all.

    Nothing is placed unless all files are whole. A recording that is there already stays if it is as good: the newer
    one is, and one of today's code is better than one of other code.

    Parameters
    ----------
    files : sequence of Path
        What :func:`pack` wrote; logs are left alone.
    where : Path, optional
        Root of the recordings; the checkout's ``docs/recordings`` when omitted.
    dry_run : bool
        Also place what the recorder wrote in a dry run, which must go to another folder.

    Returns
    -------
    list of dict
        ``investigation``, ``part``, ``gpu``, ``status`` (``placed``, ``kept``: the one that was there; ``refused``,
        ``logs``: not a recording), ``detail``.

    Raises
    ------
    UsageError
        A file is not one of ours or damaged, or a recording cannot be written.
    """
    root = where or recordings.folder()
    if not files:
        raise UsageError("--unpack needs the files that 'record --pack' wrote, such as packed/*.zip")
    if dry_run and root.resolve() == recordings.folder().resolve():
        raise UsageError("a dry run writes no recordings; give it another folder with --out")
    everything = [(part, contents) for file in files if file.name != LOGS for part, contents in _read(file).items()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        rows = [_place(part, contents, root, dry_run=dry_run) for part, contents in everything]
    except OSError as error:
        raise UsageError(f"{error.filename or root}: cannot be written ({error.strerror or error})") from error
    row: dict[str, Any] = {"investigation": "", "part": "", "gpu": "", "status": "logs"}
    hint = "{0} holds logs; 'python -m zipfile -e {0} FOLDER' unpacks them"
    return rows + [row | {"detail": hint.format(file)} for file in files if file.name == LOGS]


def _place(path: str, contents: Mapping[str, bytes], root: Path, *, dry_run: bool) -> dict[str, Any]:
    investigation, gpu, name = path.split("/")
    with tempfile.TemporaryDirectory(prefix=".unpacked.", dir=root) as scratch:
        for member, data in contents.items():
            file = Path(scratch, "new", member)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        status, detail = _put(path, Path(scratch), root, dry_run=dry_run)
    return {"investigation": investigation, "part": name, "gpu": gpu, "status": status, "detail": detail}


def _put(path: str, scratch: Path, root: Path, *, dry_run: bool) -> tuple[str, str]:
    """Move one recording from ``new`` in the folder `scratch` to its place, if it belongs there."""
    investigation, gpu, name = path.split("/")
    try:
        part = find(investigation, name)
    except UsageError:
        return "refused", "there is no such part"
    (new,) = recordings.find(part, scratch / "new")
    if not (dry_run and new.provenance.get("kind") == "dry-run"):
        if new.state == "refused":
            return "refused", new.reason
        if slug(str(new.provenance["gpu"].get("name"))) != gpu:
            return "refused", "its folder is named after another GPU"
    place = root / path
    there = [one for one in recordings.find(part, root) if one.path == place]
    if any(_rank(one) >= _rank(new) for one in there):
        return "kept", "the one that is there is as good"
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        place.replace(scratch / "old")
    new.path.replace(place)
    return "placed", new.reason or str(place)


def _rank(recording: recordings.Recording) -> tuple[int, str]:
    return {"refused": 0, "stale": 1}.get(recording.state, 2), str(recording.provenance.get("utc", ""))
