"""Read Nsight Compute reports: ``.ncu-rep`` files, and the raw page that ``ncu --csv --page=raw`` prints.

Whatever the form, a :class:`Report` has a row for each profiled kernel launch and values in base units. A report
also holds the program's command line, host name and paths; these are never read, so :func:`write` cannot write them.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import itertools
import math
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from nsightkit.errors import TraceError, reading
from nsightkit.trace import ncu_child, ncu_metrics
from nsightkit.trace.files import replacing, require_regular
from nsightkit.trace.limited import name_of_end, run_limited

__all__ = ["IDENTITY", "Report", "Value", "from_metrics", "read", "write"]

#: A metric's value: a number in base units, or text.
Value = int | float | str
#: The identity of a launch, and its metrics.
_Launch = tuple[dict[str, Any], dict[str, Value]]

_MAGIC = b"NVR\0"
#: Units that fit each column have six decimals, where base units have two.
_RAW_PAGE = "ncu --import=REPORT.ncu-rep --page=raw --csv --print-units=auto"
_EXPORT = f"export it with: {_RAW_PAGE}"
_AGAIN = "copy it again, or profile again"
#: Columns of ``launches`` that identify a launch.
IDENTITY = ("id", "kernel", "gpu", "compute_capability", "device", "stream", "grid", "block", "ranges")


@dataclasses.dataclass(frozen=True)
class Report:
    """Measurements of Nsight Compute, launch by launch.

    Parameters
    ----------
    path : str
    launches : DataFrame
        A row per profiled launch, in the order they ran: ``id``, ``kernel`` (demangled), ``gpu``,
        ``compute_capability``, ``device``, ``stream``, ``grid``, ``block``, ``ranges`` (a tuple: names of the NVTX
        push/pop ranges around it, the outermost first, as ``DOMAIN@NAME`` outside the default domain; ncu keeps them
        when it is run with ``--nvtx``), and a float column for each metric of
        :data:`nsightkit.trace.ncu_metrics.METRICS`, NaN where the report lacks it.
    metrics : list of dict
        Of each launch, all its metrics by NVIDIA's names, in base units.
    units : dict of str to str
        Base unit of each metric.
    """

    path: str
    launches: pd.DataFrame
    metrics: list[dict[str, Value]]
    units: dict[str, str]

    def __len__(self) -> int:
        return len(self.metrics)


def read(path: str | os.PathLike[str]) -> Report:
    """Read a report of Nsight Compute.

    Parameters
    ----------
    path : path-like
        A ``.ncu-rep``, or the output of ``ncu --csv --page=raw``, also with the program's own output around it. The
        bytes decide, not the name.

    Returns
    -------
    Report

    Raises
    ------
    TraceError
        The file is absent, damaged or of another kind, or holds no kernel; or the package that reads ``.ncu-rep``
        is not installed.
    """
    path = Path(path)
    require_regular(path)
    with reading(path):
        with path.open("rb") as stream:
            first_bytes = stream.read(len(_MAGIC))
        if not first_bytes:
            raise TraceError(path, "is empty", "profile again: ncu was probably stopped before it wrote")
        if first_bytes == _MAGIC:
            return _read_report(path)
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        return _read_csv(path, text)


def from_metrics(
    path: str, identities: Sequence[dict[str, Any]], metrics: list[dict[str, Value]], units: dict[str, str]
) -> Report:
    """Make a report of values that were read from somewhere.

    Parameters
    ----------
    path : str
    identities : sequence of dict
        Of each launch: ``kernel`` at least, and any other of :data:`IDENTITY`.
    metrics : list of dict
        Of each launch, values by NVIDIA's name, in base units.
    units : dict of str to str

    Returns
    -------
    Report
    """
    rows = []
    for number, (identity, values) in enumerate(zip(identities, metrics, strict=True)):
        row: dict[str, Any] = {**dict.fromkeys(IDENTITY), "id": number, "ranges": (), **identity}
        row["gpu"] = row["gpu"] or values.get("device__attribute_display_name") or None
        row["compute_capability"] = row["compute_capability"] or _compute_capability(values)
        for metric in ncu_metrics.METRICS:
            row[metric.name] = _first_number(values, metric.nvidia)
        rows.append(row)
    names = ncu_metrics.names()
    launches = pd.DataFrame(rows, columns=[*IDENTITY, *names])
    return Report(path, launches.astype(dict.fromkeys(names, "float64")), metrics, units)


def _first_number(values: dict[str, Value], names: Iterable[str]) -> float:
    """Give the value of the first name that a launch has; NaN without one, or for a text."""
    for name in names:
        if name in values:
            value = values[name]
            return math.nan if isinstance(value, str) else value
    return math.nan


def _compute_capability(values: dict[str, Value]) -> str | None:
    major = _whole(values.get("device__attribute_compute_capability_major"))
    minor = _whole(values.get("device__attribute_compute_capability_minor"))
    return f"{major}.{minor}" if major and minor else None


#: Columns of a page that identify a launch.
_NAMED = {
    "Kernel Name": "kernel",
    "Stream": "stream",
    "Block Size": "block",
    "Grid Size": "grid",
    "Device": "device",
    "CC": "compute_capability",
}


def write(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write a report as ncu's raw page, in base units; :func:`read` gives back the same values.

    The page has no column of processes, hosts and contexts.

    Parameters
    ----------
    report : Report
    path : path-like
        Written atomically; replaced when it exists.

    Returns
    -------
    Path
        `path`.
    """
    path = Path(path)
    names = list(report.units)
    units = list(report.units.values())
    with replacing(path) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as stream:
        out = csv.writer(stream, quoting=csv.QUOTE_ALL, lineterminator="\n")
        out.writerow(["ID", *_NAMED, f"thread {_FIELDS_OF_RANGE}", *names])
        out.writerow([""] * (2 + len(_NAMED)) + units)
        for row, values in zip(report.launches.to_dict("records"), report.metrics, strict=True):
            identity = [row[column] for column in _NAMED.values()]
            ranges = "  ".join(map(_range_cell, row["ranges"]))
            cells = [row["id"], *identity, ranges, *map(values.get, names)]
            out.writerow(["" if pd.isna(cell) else str(cell) for cell in cells])
    return path


def _range_cell(name: str) -> str:
    domain, at, rest = name.replace('"', "'").partition("@")  # a double quote ends a range's name here
    if not at:
        domain, rest = _NO_DOMAIN, domain
    return f'"{domain}:{rest}:none:none:none:none:none:{rest}"'


# ---------------------------------------------------------------- .ncu-rep

#: CPU seconds that NVIDIA's package may take for any report; each MB adds a second.
SECONDS = 60


class _Launched(msgspec.Struct):
    """A launch as :mod:`nsightkit.trace.ncu_child` prints it."""

    kernel: str
    ranges: list[tuple[str, str]]  # domain, name
    metrics: list[tuple[str, int | float | str, str]]  # name, value, unit


class _Contents(msgspec.Struct):
    """A report as :mod:`nsightkit.trace.ncu_child` prints it."""

    launches: list[_Launched] = []
    problem: str = ""
    usable: bool = True  # the package


def _read_report(path: Path) -> Report:
    if _is_cut_short(path):
        raise TraceError(path, "is cut short", _AGAIN)
    folder = _folder_of_package()
    contents = _Contents(usable=False) if folder is None else _printed(path, folder)
    if not contents.usable:
        problem = "is an Nsight Compute report, which NVIDIA's ncu-report package reads"
        raise TraceError(path, problem, f"pip install 'nsightkit[ncu]', or {_EXPORT}")
    if not contents.launches:
        # NVIDIA's reader silently finds nothing in some damaged reports, too.
        raise TraceError(path, "holds no profiled kernel, or is damaged", f"check ncu's filters; {_AGAIN}")
    units: dict[str, str] = {}
    return _report(path, [_launch(launch, units) for launch in contents.launches], units)


def _folder_of_package() -> Path | None:
    """Find the folder of NVIDIA's package, which only this process's import path may name."""
    spec = importlib.util.find_spec("ncu_report")
    if spec is None or spec.origin is None:
        return None
    module = Path(spec.origin).absolute()
    return module.parent.parent if spec.submodule_search_locations else module.parent


def _printed(path: Path, folder: Path) -> _Contents:
    """Have NVIDIA's package read a report in a separate process, as it aborts on some damaged ones."""
    size = path.stat().st_size
    try:
        output = run_limited(
            ncu_child.__file__,
            [str(folder), str(path.absolute())],
            memory_bytes=(2 << 30) + 16 * size,
            seconds=SECONDS + size // 1_000_000,
            output_bytes=min(max(64 << 20, 16 * size), 1 << 30),
        )
        contents = msgspec.json.decode(output, type=_Contents)
    except subprocess.TimeoutExpired as error:
        problem = f"was not read by NVIDIA's package within {error.timeout:.0f} s"
        raise TraceError(path, problem, _AGAIN) from error
    except subprocess.CalledProcessError as error:
        end = name_of_end(error.returncode)
        problem = f"makes NVIDIA's reader crash ({end}): it is damaged, or of a newer ncu"
        raise TraceError(path, problem, f"{_AGAIN}, or pip install --upgrade ncu-report") from error
    except msgspec.DecodeError as error:
        contents = _Contents(problem=str(error))
    if contents.problem:
        problem = " ".join(contents.problem.split())[:160]
        raise TraceError(path, f"is not a report that ncu-report can read ({problem})", _AGAIN)
    return contents


def _report(path: Path, launches: Sequence[_Launch], units: dict[str, str]) -> Report:
    identities, metrics = zip(*launches, strict=True)
    return from_metrics(str(path), identities, list(metrics), units)


def _launch(launch: _Launched, units: dict[str, str]) -> _Launch:
    values: dict[str, Value] = {}
    for name, value, unit in launch.metrics:
        _put(values, units, name, value, unit)
    identity = {
        "kernel": launch.kernel,
        "grid": _dimensions(values, "grid"),
        "block": _dimensions(values, "block"),
        "device": _whole(values.get("launch__device_id")),
        "stream": _whole(values.get("launch__stream_id")),
        "ranges": tuple(itertools.starmap(_in_domain, launch.ranges)),
    }
    return identity, values


def _whole(value: Value | None) -> str | None:
    """Write a number of a device, a stream or a dimension."""
    return str(int(value)) if isinstance(value, (int, float)) else None


def _dimensions(values: dict[str, Value], what: str) -> str | None:
    sizes = [_whole(values.get(f"launch__{what}_dim_{axis}")) for axis in "xyz"]
    if None in sizes:
        return None
    return f"({', '.join(map(str, sizes))})"


def _put(values: dict[str, Value], units: dict[str, str], name: str, value: Value, unit: str) -> None:
    """Store a value, converted to its base unit."""
    base, factor = ncu_metrics.base_unit(unit)
    if factor != 1.0 and not isinstance(value, str):
        value *= factor
    values[name] = value
    units.setdefault(name, base)


def _in_domain(domain: str, name: str) -> str:
    return name if domain in ("", _NO_DOMAIN) else f"{domain}@{name}"


def _is_cut_short(path: Path) -> bool:
    """Check whether a report ends inside a block: NVIDIA's reader then silently gives fewer kernels.

    Nsight Compute's ``extras/FileFormat`` describes the frames: magic, size and header of the file, then
    blocks of a header's size, the header, and a payload whose size is field 5 of the header.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(len(_MAGIC))
        position = len(_MAGIC) + 4 + int.from_bytes(stream.read(4), "little")
        while position < size:
            stream.seek(position)
            length = int.from_bytes(stream.read(4), "little")
            if length > size - position - 4:
                return True
            payload = _payload_size(stream.read(length))
            if payload is None:
                return False  # another layout, for NVIDIA's reader to judge
            position += 4 + length + payload
    return position > size


#: A field of a block's header: its tag, then a number, or a length and bytes. Numbers have seven bits per byte.
_HEADER_FIELD = re.compile(rb"(?s)([\x80-\xff]{0,9}[\x00-\x7f])([\x80-\xff]{0,9}[\x00-\x7f])")
#: Field 5 of a protocol buffer's message, a whole number; and the wire type of bytes after their length.
_PAYLOAD_TAG = 5 << 3
_BYTES = 2


def _payload_size(header: bytes) -> int | None:
    """Read the size of the payload from a block's header; None for a header of another layout."""
    position = 0
    while position < len(header):
        field = _HEADER_FIELD.match(header, position)
        if field is None:
            return None
        tag, value = map(_number_of_bytes, field.groups())
        if tag == _PAYLOAD_TAG:
            return value
        if tag & 7 not in (0, _BYTES):
            return None
        position = field.end() + (value if tag & 7 == _BYTES else 0)
    return 0 if header else None


def _number_of_bytes(varint: bytes) -> int:
    number = 0
    for place, byte in enumerate(varint):
        number |= (byte & 0x7F) << (7 * place)
    return number


# ---------------------------------------------------------------- CSV

#: The first line of a page.
_HEADER = re.compile(r'"ID",(?="(?:Process ID|Process Name|Kernel Name|Context)\b)')
#: A launch starts with its number, and the row of units with empty cells.
_RECORD = re.compile(r'"\d{1,18}",|(?:"",){4}')
#: A page: its header, and its records.
_Page = tuple[list[str], list[list[str]]]


def _read_csv(path: Path, text: str) -> Report:
    units: dict[str, str] = {}
    launches: list[_Launch] = []
    pages = _pages(path, text)
    for header, records in pages:
        if "Metric Name" in header:
            problem = "is ncu's details page, which lacks most metrics"
            raise TraceError(path, problem, f"print the raw page: {_RAW_PAGE}")
        launches += _launches(path, header, records, units)
    if not pages:
        problem = 'is not a raw page of Nsight Compute (no line begins with "ID"); ncu may have profiled no kernel'
        raise TraceError(path, problem, f"give an .ncu-rep, or {_EXPORT}")
    if not launches:
        raise TraceError(path, "holds no profiled kernel", "check ncu's filters and profile again")
    return _report(path, launches, units)


def _pages(path: Path, text: str) -> list[_Page]:
    """Find the pages in a text, without the output of the program and of ncu between them."""
    lines = iter(io.StringIO(text))
    pages: list[_Page] = []
    for line in lines:
        if _HEADER.match(line):
            pages.append((_record(path, [line]), []))
        elif pages and _RECORD.match(line):
            # a name or a rule's text may hold line ends: the reader takes as many lines as the record has
            _, records = pages[-1]
            records.append(_record(path, itertools.chain([line], lines)))
    return pages


def _record(path: Path, lines: Iterable[str]) -> list[str]:
    with reading(path, "is damaged, or is cut short inside a quoted field", _AGAIN):
        return next(csv.reader(lines, strict=True))


def _launches(path: Path, header: list[str], records: list[list[str]], units: dict[str, str]) -> list[_Launch]:
    """Read a page: a column per metric, and a row of units before the launches."""
    columns = len(set(header))
    rows = []
    for record in records:
        if len(record) != columns:
            problem = f"is damaged: a line has {len(record)} fields, the header {columns}"
            raise TraceError(path, problem, f"{_AGAIN}, or {_EXPORT}")
        rows.append(dict(zip(header, record, strict=True)))
    if not rows:
        return []
    page_units, *launched = rows
    if page_units["ID"]:
        raise TraceError(path, "has no row of units, so its numbers could mean anything", _EXPORT)
    launches = []
    for row in launched:
        values: dict[str, Value] = {}
        for name, cell in row.items():
            value = _value(path, cell) if _is_metric(name) else None
            if value is not None:
                _put(values, units, name, value, page_units[name])
        launches.append((_identity(row), values))
    return launches


def _is_metric(column: str) -> bool:
    return " " not in column and not column.startswith("Id:") and column not in ("ID", "Context", *_NAMED)


def _identity(row: dict[str, str]) -> dict[str, Any]:
    identity: dict[str, Any] = {"id": int(row["ID"])}
    for column, name in _NAMED.items():
        identity[name] = row.get(column) or None
    identity["kernel"] = identity["kernel"] or ""
    for column, cell in row.items():
        if column.endswith(_FIELDS_OF_RANGE):
            identity["ranges"] = tuple(_ranges(cell))
    return identity


#: ncu's name for the domain of ranges that have none.
_NO_DOMAIN = "<default domain>"
# Each range of a launch is quoted, with colons between: domain, name, payload (two), colour (two), kind of message,
# and the message, which is the name again, so that a name with colons in it can be told.
_FIELDS_OF_RANGE = "Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
_RANGE = re.compile(r'"([^":]*):([^"]*)"')
_BETWEEN = 5  # fields from one name to the other


def _ranges(cell: str) -> Iterator[str]:
    """Give the names of the ranges in a cell, with their domains."""
    for domain, rest in _RANGE.findall(cell):
        parts = rest.split(":")
        width = (len(parts) - _BETWEEN) // 2  # of a name with colons in it
        if width > 0 and parts[:width] == parts[width + _BETWEEN :]:
            yield _in_domain(domain, ":".join(parts[:width]))


_INSTANCES = re.compile(r"(\S+) \(.*\)", re.DOTALL)  # --print-metric-instances: "64.86 (1; 2; 3)"
_NUMBER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?(?:[eE][+-]?\d+)?")
#: A number as some locales write it; a comma or a point may then be the decimal sign.
_OTHER_NUMBER = re.compile(r"[+-]?\d[\d.,' \u00a0\u202f\u2019]*")
_MISSING = ("", "n/a", "nan", "-nan", "inf", "-inf", "no data")


def _value(path: Path, cell: str) -> Value | None:
    instances = _INSTANCES.fullmatch(cell)
    text = instances[1] if instances else cell.strip()
    if text.lower() in _MISSING:
        return None
    if _NUMBER.fullmatch(text):
        plain = text.replace(",", "")
        return int(plain) if plain.lstrip("+-").isdigit() else float(plain)
    if _OTHER_NUMBER.fullmatch(text):
        problem = f"holds a number as another locale writes it ({text}), which could mean two things"
        raise TraceError(path, problem, f"{_EXPORT}, with LC_ALL=C")
    return cell.strip()
