"""Read Nsight Compute reports: ``.ncu-rep`` files, and the raw page that ``ncu --csv --page=raw`` prints.

Whatever the form, a :class:`Report` has a row for each profiled kernel launch and values in base units. A report
also holds the program's command line, host name and paths; these are never read, so :func:`write` cannot write them.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from nsightkit.errors import AnyPath, TraceError, reading
from nsightkit.safe import Json
from nsightkit.trace import ncu_child, ncu_metrics
from nsightkit.trace.files import replacing, require_regular
from nsightkit.trace.limited import ask_limited
from nsightkit.trace.model import capability

__all__ = ["IDENTITY", "Report", "Value", "from_metrics", "read", "write"]

#: A metric's value: a number in base units, or text.
Value = int | float | str
_Texts = dict[str, str]
_Values = dict[str, Value]

_MAGIC = b"NVR\0"
#: Units that fit each column have six decimals, where base units have two.
_RAW_PAGE = "ncu --import=REPORT.ncu-rep --page=raw --csv --print-units=auto"
_EXPORT = f"export it with: {_RAW_PAGE}"
_AGAIN = "copy it again, profile again, or pip install --upgrade ncu-report"
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
    metrics: list[_Values]
    units: _Texts


def read(path: AnyPath) -> Report:
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
        if first_bytes == _MAGIC:
            return _read_report(path)
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        return _read_csv(path, text)


def from_metrics(path: str, identities: Sequence[Json], metrics: list[_Values], units: _Texts) -> Report:
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
        row: Json = {**dict.fromkeys(IDENTITY), "id": number, "ranges": (), **identity}
        for name, known in _known(values).items():
            row[name] = row[name] or known
        for metric in ncu_metrics.METRICS:
            reported = next(filter(values.__contains__, metric.nvidia), "")
            value = values.get(reported)
            row[metric.name] = None if isinstance(value, str) else value
        rows.append(row)
    names = [metric.name for metric in ncu_metrics.METRICS]
    launches = pd.DataFrame(rows, columns=[*IDENTITY, *names])
    return Report(path, launches.astype(dict.fromkeys(names, "float64")), metrics, units)


def _known(values: Json) -> dict[str, str | None]:
    """What metrics say of the identity of a launch."""
    prefix = "device__attribute_compute_capability_"
    known = {
        "gpu": values.get("device__attribute_display_name"),
        "compute_capability": capability(values.get(prefix + "major"), values.get(prefix + "minor")),
        "device": _whole(values.get("launch__device_id")),
        "stream": _whole(values.get("launch__stream_id")),
    }
    for what in ("grid", "block"):
        sizes = [_whole(values.get(f"launch__{what}_dim_{axis}")) for axis in "xyz"]
        known[what] = None if None in sizes else f"({', '.join(map(str, sizes))})"
    return known


def _whole(value: Value | None) -> str | None:
    """Write a number of a device, a stream or a dimension."""
    if isinstance(value, (int, float)):
        return str(int(value))
    return None


#: Columns of a page that identify a launch.
_NAMED = {
    "Kernel Name": "kernel",
    "Stream": "stream",
    "Block Size": "block",
    "Grid Size": "grid",
    "Device": "device",
    "CC": "compute_capability",
}


_LINE_BREAKS = re.compile(r"[\r\n]+")
#: ncu's name for the domain of ranges that have none.
_NO_DOMAIN = "<default domain>"
# Each range of a launch is quoted, with colons between: domain, name, payload (two), colour (two), kind of message,
# and the message, which is the name again, so that a name with colons in it can be told.
_FIELDS_OF_RANGE = "Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
_RANGE = re.compile(r'"([^":]*):([^"]*?)(?::[^":]*){5}:\2"')


def write(report: Report, path: AnyPath) -> Path:
    """Write a report as ncu's raw page, in base units; :func:`read` gives back the same values.

    The page has no column of processes, hosts and contexts, and no line breaks in names.

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
            out.writerow(map(_cell, cells))
    return path


def _cell(value: Any) -> str:
    if pd.isna(value):
        return ""
    return _LINE_BREAKS.sub(" ", str(value))


def _range_cell(name: str) -> str:
    domain, at, rest = name.replace('"', "'").partition("@")  # a double quote ends a range's name here
    if not at:
        domain, rest = _NO_DOMAIN, domain
    return f'"{domain}:{rest}:none:none:none:none:none:{rest}"'


# ---------------------------------------------------------------- .ncu-rep

#: CPU seconds that NVIDIA's package may take for any report; each MB adds a second.
SECONDS = 60


def _read_report(path: Path) -> Report:
    spec = importlib.util.find_spec("ncu_report")
    if spec is None or spec.origin is None:
        problem = "is an Nsight Compute report, which NVIDIA's ncu-report package reads"
        raise TraceError(path, problem, f"pip install 'nsightkit[ncu]', or {_EXPORT}")
    module = Path(spec.origin).absolute()
    launches = []
    for launch in _printed(path, module.parent.parent if spec.submodule_search_locations else module.parent):
        identity = {"kernel": launch["kernel"], "ranges": _qualified(launch["ranges"])}
        launches.append((identity, launch["metrics"]))
    if not launches:
        # NVIDIA's reader silently finds nothing in some damaged reports, too.
        raise TraceError(path, "holds no profiled kernel, or is damaged", f"check ncu's filters; {_AGAIN}")
    return _report(path, launches)


def _printed(path: Path, folder: Path) -> list[Json]:
    """Have NVIDIA's package read a report in a separate process, as it aborts on some damaged ones."""
    size = path.stat().st_size
    with reading(path, "makes NVIDIA's reader fail: it is damaged, or of a newer ncu", _AGAIN):
        contents = ask_limited(
            ncu_child.__file__,
            [str(folder), str(path.absolute())],
            memory_bytes=(2 << 30) + 16 * size,
            seconds=SECONDS + size // 1_000_000,
            output_bytes=min(max(64 << 20, 16 * size), 1 << 30),
        )
    if "problem" in contents:
        raise TraceError(path, f"is not a report that ncu-report can read ({contents['problem']})", _AGAIN)
    return list(contents["launches"])


def _report(path: Path, launches: Iterable[tuple[Json, Iterable[tuple[str, Value, str]]]]) -> Report:
    """Make a report of the identity of each launch, and of the name, value and unit of its metrics."""
    units: _Texts = {}
    identities = []
    metrics = []
    for identity, measured in launches:
        values: _Values = {}
        for name, value, unit in measured:
            base, factor = ncu_metrics.base_unit(unit)
            units.setdefault(name, base)
            values[name] = value
            if factor != 1.0 and not isinstance(value, str):
                values[name] = value * factor
        identities.append(identity)
        metrics.append(values)
    return from_metrics(str(path), identities, metrics, units)


def _qualified(ranges: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Name ranges, with their domains outside the default one."""
    names = []
    for domain, name in ranges:
        names.append(name if domain in ("", _NO_DOMAIN) else f"{domain}@{name}")
    return tuple(names)


# ---------------------------------------------------------------- CSV

#: How the header, the units and the launches of a page begin; other lines are the program's or ncu's.
_RECORD = re.compile(r'"(?:ID|\d{0,18})","')
_NUMBER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(\.\d+)?([eE][+-]?\d+)?")
#: A number whose decimals follow a comma, as some locales have it.
_COMMA = re.compile(r"[+-]?\d{1,3}(?:\D?\d{3})*,\d+|[+-]?\d+,\d+")
_MISSING = ("", "n/a", "nan", "-nan", "inf", "-inf", "no data")


def _read_csv(path: Path, text: str) -> Report:
    with reading(path, "is damaged, or is cut short inside a quoted field", _AGAIN):
        records = list(csv.reader(filter(_RECORD.match, text.split("\n")), strict=True))
    header: list[str] = []
    units: _Texts = {}
    launches = []
    for record in records:
        if record[0] == "ID":
            header = record
            units = {}
            continue
        if len(record) != len(header):
            problem = f"is damaged: a line has {len(record)} fields, the header {len(header)}"
            raise TraceError(path, problem, f"{_AGAIN}, or {_EXPORT}")
        row = dict(zip(header, record, strict=True))
        if not row["ID"]:
            units = row
            continue
        if not units:
            problem = "is not ncu's raw page: it has no row of units, and its numbers could mean anything"
            raise TraceError(path, problem, f"print the raw page: {_RAW_PAGE}")
        for cell in record:
            if _COMMA.fullmatch(cell) and not _NUMBER.fullmatch(cell):
                problem = f"has numbers with a decimal comma ({cell})"
                raise TraceError(path, problem, f"export it in another locale: LC_ALL=C {_RAW_PAGE}")
        launches.append((_identity(row), _measured(row, units)))
    if not launches:
        problem = 'holds no launch on a raw page of Nsight Compute (whose first line starts with "ID")'
        raise TraceError(path, problem, f"check ncu's filters; give an .ncu-rep, or {_EXPORT}")
    return _report(path, launches)


def _measured(row: _Texts, units: _Texts) -> list[tuple[str, Value, str]]:
    """Name, value and unit of each metric in a row."""
    measured = []
    for name, cell in row.items():
        is_metric = " " not in name and not name.startswith("Id:") and name not in ("ID", "Context", *_NAMED)
        text = cell.strip()
        if is_metric and text.lower() not in _MISSING:
            measured.append((name, _value(text), units[name]))
    return measured


def _value(text: str) -> Value:
    number = _NUMBER.fullmatch(text)
    if number is None:
        return text
    plain = text.replace(",", "")
    if number[1] or number[2]:
        return float(plain)
    return int(plain)


def _identity(row: _Texts) -> Json:
    identity: Json = {"id": int(row["ID"])}
    for column, name in _NAMED.items():
        identity[name] = row.get(column) or None
    identity["kernel"] = identity["kernel"] or ""
    for column, cell in row.items():
        if column.endswith(_FIELDS_OF_RANGE):
            identity["ranges"] = _qualified(_RANGE.findall(cell))
    return identity
