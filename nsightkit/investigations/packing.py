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

#: The file that holds no recordings, and what is in it: the folder of what has failed, and the machine's preflight.
LOGS = "logs.zip"
_LOGGED = (".failed", SAVED)
#: A part's folder, and a file in it. No part of a name begins with a dot.
_MEMBER = re.compile(
    r"([a-z0-9][\w-]*/[a-z0-9][a-z0-9-]*/[a-z0-9][\w-]*)/(?:(?:trace|nsys)/)?[a-z_]+\.(?:json(?:\.gz)?|parquet|csv|pickle)",
    re.ASCII,
)
#: What a log may have; profiles and snapshots of a part that failed are larger.
_LARGEST_LOG = 1_000_000

#: What is in files, by name; and that of several parts, by part.
_Files = Mapping[str, bytes]
_Parts = dict[str, dict[str, bytes]]


def pack(
    where: Path,
    folder: Path,
    part_mb: float = 15.0,
    most: int = 8,
    echo: Callable[[str], None] | None = None,
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
    echo : callable, optional
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
    say = echo or (lambda _: None)
    limit = round(part_mb * 1e6)
    if limit < 1 or most < 2:
        raise UsageError(f"{most} files of {part_mb:g} MB can hold nothing; allow at least 2 files of 1 MB")
    try:
        return _pack(where, folder, limit, most - 1, say)
    except OSError as error:
        place = error.filename or folder
        raise NsightkitError(f"{place}: the recordings cannot be packed ({error.strerror or error})") from error


def _pack(where: Path, folder: Path, limit: int, most: int, say: Callable[[str], None]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for draft in folder.glob(".nsightkit-*"):  # of a run that was killed
        shutil.rmtree(draft)
    places, files = [], []
    for place in (folder / f"recordings-{number}.zip" for number in range(1, most + 1)):
        try:
            files.append(_read(place) if place.exists() else {})
            places.append(place)
        except UsageError as error:  # somebody's file of the same name
            say(f"{error}; it is left as it is")
    waiting = _recorded(where, say)
    moved = set()
    for file in files:
        for part in [part for part in file if part in waiting]:
            if _size({**file, part: waiting[part]}) <= limit:
                file[part] = waiting.pop(part)
            else:
                del file[part]
                moved.add(part)
    for part, contents in waiting.items():
        used = max((number for number, file in enumerate(files, 1) if file), default=0)
        fits = (file for file in (*reversed(files[:used]), *files[used:]) if _size({**file, part: contents}) <= limit)
        room = next(fits, None)
        if room is not None:
            room[part] = contents
            continue
        size = _size({part: contents})
        why = f"it takes {size / 1e6:.1f} MB of {limit / 1e6:g} MB a file; allow larger ones with --part-mb"
        say(f"{part} is not packed: {why if size > limit else f'all {most} files are full'}")
    logs = {} if all(files) else _logs(where, limit)
    if all(files):
        (folder / LOGS).unlink(missing_ok=True)  # a recording is worth more
    # What has moved is written where it goes before it leaves the place where it was.
    for place, file in sorted(zip(places, files, strict=True), key=lambda pair: moved.isdisjoint(pair[1])):
        _write({name: data for part in file.values() for name, data in part.items()}, place)
    if logs:
        _write(logs, folder / LOGS)
    return [place for place in (*places, folder / LOGS) if place.exists()]


def _recorded(where: Path, say: Callable[[str], None]) -> _Parts:
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
    with contextlib.suppress(FileNotFoundError):  # what fails meanwhile is moved
        named = [path for name in _LOGGED for path in (where / name, *(where / name).rglob("*")) if path.is_file()]
        for size, path in sorted((path.stat().st_size, path) for path in named):
            name = path.relative_to(where).as_posix()
            if size <= _LARGEST_LOG and _size({"": {**found, name: b" " * size}}) <= limit:
                found[name] = path.read_bytes()
    return found


def _size(parts: Mapping[str, _Files]) -> int:
    """Give the bytes of an archive: two headers for each file, each with its name, and the end of the directory."""
    sizes = [76 + 2 * len(name.encode()) + len(data) for files in parts.values() for name, data in files.items()]
    return sum(sizes) + 22


def _write(files: _Files, place: Path) -> None:
    """Write an archive, the same bytes for the same files, unless it is there."""
    if not files:
        return place.unlink(missing_ok=True)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # with the date that zip begins with
    if not place.exists() or place.read_bytes() != stream.getvalue():
        with replacing(place) as draft:
            draft.write(stream.getvalue())
            draft.flush()
            os.fsync(draft.fileno())
    return None


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


def _place(path: str, contents: _Files, root: Path, *, dry_run: bool) -> dict[str, Any]:
    investigation, gpu, name = path.split("/")
    row: dict[str, Any] = {"investigation": investigation, "part": name, "gpu": gpu}
    try:
        part = find(investigation, name)
    except UsageError:
        return row | {"status": "refused", "detail": "there is no such part"}
    with tempfile.TemporaryDirectory(prefix=".unpacked.", dir=root) as scratch:
        for member, data in contents.items():
            file = Path(scratch, "new", member)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        (new,) = recordings.find(part, Path(scratch, "new"))
        try_out = dry_run and new.provenance.get("kind") == "dry-run"
        if new.state == "refused" and not try_out:
            return row | {"status": "refused", "detail": new.reason}
        if not try_out and slug(str(new.provenance["gpu"].get("name"))) != gpu:
            return row | {"status": "refused", "detail": "its folder is named after another GPU"}
        place = root / path
        there = next((one for one in recordings.find(part, root) if one.path == place), None)
        if there is not None and _rank(there) >= _rank(new):
            return row | {"status": "kept", "detail": "the one that is there is as good"}
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            place.replace(Path(scratch, "old"))
        new.path.replace(place)
        return row | {"status": "placed", "detail": new.reason or str(place)}


def _rank(recording: recordings.Recording) -> tuple[int, str]:
    return {"refused": 0, "stale": 1}.get(recording.state, 2), str(recording.provenance.get("utc", ""))
