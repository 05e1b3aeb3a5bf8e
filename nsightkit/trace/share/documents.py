"""Copies of JSON traces without secrets: every other byte stays as it is.

A trace of a gigabyte is read in slices of a few megabytes. Only texts are taken out of them, cleaned and put back:
numbers, spaces and the order of keys are never touched. Most slices have no secret, and are copied.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from nsightkit.errors import TraceError
from nsightkit.trace.share.ledger import Ledger
from nsightkit.trace.share.secrets import Scrubber

__all__ = ["copy_json", "learn_json"]

_GZIP_MAGIC = b"\x1f\x8b"
_SLICE_BYTES = 4 << 20
#: A slice is cut between values; a text or an environment longer than this is none.
_LONGEST_BYTES = 512 << 20
#: Deflate packs at most a thousand to one; a trace of a profiler packs ten to fifty to one.
_RATIO, _SMALL_BYTES = 400, 1 << 30
_REMEDY = "capture or copy it again"

_EVENTS = b'"traceEvents"'
_NO_TRACE = "give a trace that torch.profiler exported (export_chrome_trace)"

_STRING = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)
_WORD = re.compile(rb"[A-Za-z_]+")
_WORDS = frozenset([b"true", b"false", b"null", b"NaN", b"nan", b"Infinity", b"inf", b"infinity", b"e", b"E", b"Inf"])
_STRUCTURE = b" \t\r\n{}[]:,0123456789.+-eE"
_SCALAR = re.compile(rb"\s*:\s*(-?[0-9][0-9.eE+\-]*)")
_OPENING = re.compile(rb"\s*:\s*[\[{]")
_LONGEST_KEY = 200
_REMEMBERED = 500_000
#: Keys that say something about where a trace was made, and environment variables.
_TELLING = re.compile(
    rb'"((?i:host_?name|host|node_?name|computer_?name|user_?name|user|login|logname|login_name|owner|author|cwd|pwd|home'
    rb'|work(?:ing_)?dir(?:ectory)?|tracename)|[A-Z][A-Z0-9_]*)"\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"'
)
#: In small letters; one of these is in every text that `_TELLING` finds something of use in.
_TELLING_HINTS = (
    b'"host', b'"node', b'"computer', b'"user', b'"log', b'"owner"', b'"author"', b'"cwd"', b'"pwd"', b'"home"',
    b'"workdir', b'"work_dir', b'"working', b'"tracename"', b'host"', b'hostname"', b'node_name"', b'nodename"',
    b"username", b"_user", b"user_", b"logname", b"token", b"secret", b"passw", b"_key", b"apikey", b"credential",
    b"private", b'_pat"', b'_psk"', b'_dsn"', b"jwt", b"cookie", b'oldpwd"', b'virtual_env"', b'_prefix"', b'tmpdir"',
)  # fmt: skip
_OVERLAP_BYTES = 1 << 16
#: What `tensorboard_trace_handler` calls its files: the host, the process, the time.
_WORKER = re.compile(r"(?:.*[/\\])?(.+)_\d+\.\d{10,}(?:\.pt)?\.trace\.json(?:\.gz)?")


def _read(path: Path) -> Iterator[bytes]:
    """Slices of the file's text."""
    packed_bytes = path.stat().st_size
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        stream: BinaryIO = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
        seen = 0
        try:
            while block := stream.read(_SLICE_BYTES):
                seen += len(block)
                if packed and seen > _SMALL_BYTES and seen > _RATIO * packed_bytes:
                    raise TraceError(
                        path, f"unpacks to more than {_RATIO} times its size", "unpack and look at it first"
                    )
                yield block
        except EOFError as error:
            raise TraceError(path, "is a truncated gzip file", _REMEDY) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(path, f"is a damaged gzip file ({error})", _REMEDY) from error


def _text(raw: bytes) -> str:
    """What a JSON string says, without its quotes."""
    if b"\\" in raw:
        try:
            found: str = json.loads(b'"' + raw + b'"', strict=False)
        except ValueError:
            return raw.decode("utf-8", "surrogateescape")  # an escape that JSON has not
        else:
            return found
    return raw.decode("utf-8", "surrogateescape")


def _raw(text: str, like: bytes) -> bytes:
    """A JSON string, without its quotes."""
    with_escapes = json.dumps(text, ensure_ascii=False)[1:-1]
    try:
        encoded = with_escapes.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        return json.dumps(text)[1:-1].encode()
    return json.dumps(text)[1:-1].encode() if like.isascii() else encoded


def learn_json(path: Path, scrubber: Scrubber) -> None:
    """Learn from a trace where and by whom it was made.

    Parameters
    ----------
    path : Path
    scrubber : Scrubber

    Raises
    ------
    TraceError
        A damaged gzip file.
    """
    rest = b""
    for block in _read(path):
        some = rest + block
        small = some.lower()
        if any(hint in small for hint in _TELLING_HINTS):
            for match in _TELLING.finditer(some):
                _learn(scrubber, match[1].decode(), _text(match[2]))
        if any(hint in some for hint in (b"/home", b"Users", b"homes/")):
            scrubber.learn_from(some.replace(b"\\/", b"/").decode("utf-8", "replace"))
        if b"\\u0000" in some:
            for match in _STRING.finditer(some):
                if b"\\u0000" in match[0]:
                    scrubber.learn_environment(_text(match[0][1:-1]).split("\x00"))
        rest = some[-_OVERLAP_BYTES:]


def _learn(scrubber: Scrubber, key: str, value: str) -> None:
    lower = key.lower().replace("_", "")
    if lower == "tracename":
        found = _WORKER.fullmatch(value)
        if found:
            scrubber.learn("host", found[1])
    elif key.isupper():
        scrubber.learn_environment({key: value})
    elif lower in ("hostname", "host", "nodename", "computername"):
        scrubber.learn("host", value)
    elif lower in ("username", "user", "login", "logname", "loginname", "owner", "author"):
        scrubber.learn("user", value)
    else:
        scrubber.learn("path", value)
    scrubber.learn_from(value)


def copy_json(path: Path, write: Callable[[bytes], object], ledger: Ledger) -> bool:
    """Copy a Chrome trace without its secrets.

    Parameters
    ----------
    path : Path
        Only read; gzipped or not.
    write : callable
        Takes the copy's text, slice by slice.
    ledger : Ledger

    Returns
    -------
    bool
        Whether it was sound JSON. Profilers have been seen to write other text, which is cleaned as well: a reader has
        to say whether it can be mended.

    Raises
    ------
    TraceError
        Truncated, no trace, or unpacked without end.
    """
    learn_json(path, ledger.scrubber)
    return _Json(path, ledger).copy(write)


class _Json:
    """One document on its way into another."""

    def __init__(self, path: Path, ledger: Ledger) -> None:
        self._path, self._ledger = path, ledger
        self._harmless: set[bytes] = set()
        self._depth = 0
        self._opened = b""
        self._has_events = False
        self._sound = True
        self._key, self._flag = "", ""  # the last key, and the last word if it is an option

    def copy(self, write: Callable[[bytes], object]) -> bool:
        """Clean slice by slice."""
        rest = b""
        for block in _read(self._path):
            if len(rest) > _LONGEST_BYTES:
                raise TraceError(self._path, "has a text without end", _REMEDY)
            some = rest + block
            pieces, rest = _cut(_STRING.split(some))
            done, kept = self._clean(some[: len(some) - len(rest)], pieces, final=False)
            write(done)
            rest = kept + rest
        write(self._clean(rest, _STRING.split(rest), final=True)[0])
        open_list = self._opened == b"[" and self._depth == 1  # may lack its end
        if self._depth > 0 and self._sound and not open_list:
            raise TraceError(self._path, "is truncated", _REMEDY)
        if self._opened != b"[" and not self._has_events:
            raise TraceError(self._path, "is JSON, but no Chrome trace (it has no traceEvents)", _NO_TRACE)
        return self._sound and self._depth >= 0

    def _clean(self, some: bytes, pieces: list[bytes], *, final: bool) -> tuple[bytes, bytes]:
        """Clean a slice, given whole and as strings with what stands between. What has to wait comes back, too."""
        between = b" ".join(pieces[::2])
        sound = self._is_sound(between, pieces)
        strings = set(pieces[1::2]) - self._harmless
        found = {raw for raw in strings if not self._is_harmless(raw)}
        if len(self._harmless) > _REMEMBERED:
            self._harmless.clear()
        self._harmless |= strings - found
        self._has_events |= _EVENTS in strings
        if sound and not found and not self._flag:
            self._count(between)
            return some, b""
        out, end = self._taken_apart(pieces, final)
        self._count(b" ".join(pieces[:end:2]))
        return b"".join(out), b"".join(pieces[end:])

    def _is_sound(self, between: bytes, pieces: list[bytes]) -> bool:
        """Whether only brackets, numbers and a few words stand between strings; anything else is cleaned as well."""
        odd = between.translate(None, _STRUCTURE)
        if not odd or (b'"' not in odd and _WORDS.issuperset(_WORD.findall(between))):
            return True
        self._sound = False
        for at in range(0, len(pieces), 2):
            if b'"' in pieces[at] or not _WORDS.issuperset(_WORD.findall(pieces[at])):
                text = pieces[at].decode("utf-8", "surrogateescape")
                pieces[at] = self._ledger.text(text, "between").encode("utf-8", "surrogateescape")
        return False

    def _count(self, between: bytes) -> None:
        if not self._opened:
            self._opened = between.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        self._depth += between.count(b"{") + between.count(b"[") - between.count(b"}") - between.count(b"]")

    def _is_harmless(self, raw: bytes) -> bool:
        """Whether a string means nothing, neither by itself nor for what stands behind it."""
        text, scrubber = _text(raw[1:-1]), self._ledger.scrubber
        if len(text) <= _LONGEST_KEY and (scrubber.tells(text) or scrubber.is_option(text)):
            return False
        return not (scrubber.holds(text) or (text[:1] in "{[" and '"' in text))

    def _taken_apart(self, pieces: list[bytes], final: bool) -> tuple[list[bytes], int]:
        """Clean a slice string by string. Gives how many of its pieces are done."""
        out = [pieces[0]]
        telling = False  # a slice never ends between a key and its value
        at = 1
        while at < len(pieces):
            raw, behind = pieces[at], pieces[at + 1]
            is_key, is_value = behind.lstrip()[:1] == b":", pieces[at - 1].rstrip()[-1:] == b":"
            known = raw in self._harmless
            if is_key:
                telling = not known
            if known and not (telling and is_value) and not self._flag:
                self._key = raw[1:-1].decode("utf-8", "replace") if is_key else self._key
                out += [raw, behind]
                at += 2
                continue
            text = _text(raw[1:-1])
            if is_key:
                self._key = text
                if not self._without_value(pieces, at, text):
                    if final:
                        raise TraceError(self._path, "is truncated", _REMEDY)
                    return out, at
                new = self._ledger.text(text, "keys")
            elif is_value:
                new = self._ledger.keyed(self._key, text)
            else:
                new = self._ledger.argument(self._flag, text, self._key or "list")
            self._flag = text if pieces[at + 1].strip() == b"," and text.startswith("-") else ""
            out += [raw if new == text else b'"' + _raw(new, raw) + b'"', pieces[at + 1]]
            at += 2
        return out, len(pieces)

    def _without_value(self, pieces: list[bytes], at: int, key: str) -> bool:
        """Remove what stands behind a key and is no string, if the key says so. False if the slice ends within it."""
        scrubber, behind = self._ledger.scrubber, pieces[at + 1]
        opening = _OPENING.match(behind)
        if opening and scrubber.tells_environment(key):
            end = _closing(pieces, at + 1, opening.end() - 1)
            if end is None:
                return False
            last, place = end
            if last > at + 1 or behind[opening.end() : place].strip():
                self._ledger.note("environment", key)
                # What goes is balanced: the brackets that stay are those that count.
                pieces[at + 1 : last + 1] = [behind[: opening.end()] + pieces[last][place:]]
            return True
        number = _SCALAR.match(behind)
        if number and scrubber.tells_secret(key):
            placeholder = self._ledger.whole("secret", number[1].decode(), key).encode()
            pieces[at + 1] = behind[: number.start(1)] + b'"' + placeholder + b'"' + behind[number.end(1) :]
        return True


def _closing(pieces: list[bytes], first: int, at: int) -> tuple[int, int] | None:
    """Piece and place of the bracket that closes the one at a place of a piece."""
    depth = 0
    for number in range(first, len(pieces), 2):
        for match in re.finditer(rb"[\[{\]}]", pieces[number][at if number == first else 0 :]):
            depth += 1 if match[0] in b"[{" else -1
            if depth == 0:
                return number, match.start() + (at if number == first else 0)
    return None


def _cut(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    """End a slice behind the last comma or bracket that is in no string; give the rest, too."""
    for last in range(len(pieces) - 1, -1, -2):
        between = pieces[last].partition(b'"')[0]  # a string that has no end yet
        end = max(between.rfind(sign) for sign in (b",", b"]", b"}")) + 1
        if end:
            return [*pieces[:last], pieces[last][:end]], b"".join([pieces[last][end:], *pieces[last + 1 :]])
    return [b""], b"".join(pieces)
