"""Read Nsight Compute reports: ``.ncu-rep`` files, and the raw page that ``ncu --csv --page=raw`` prints.

Of either form, a :class:`Report` has a row for each profiled kernel launch, and values in base units. A report
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

from nsightkit.errors import AnyPath, TraceError, reading, require_regular
from nsightkit.text import Json
from nsightkit.trace import UTF16_MARKS, ncu_child, ncu_metrics
from nsightkit.trace.files import replacing
from nsightkit.trace.limited import ask_limited
from nsightkit.trace.model import capability

#: A metric's value: a number in base units, or text.
Value = int | float | str
_Texts = dict[str, str]
_Values = dict[str, Value]

_MAGIC = b"NVR\0"
#: With units that fit each column (auto), ncu prints six decimals; with base units only two.
_RAW_PAGE_COMMAND = "ncu --import=REPORT.ncu-rep --page=raw --csv --print-units=auto"
_EXPORT_REMEDY = f"export it with: {_RAW_PAGE_COMMAND}"
_AGAIN_REMEDY = "copy it again, profile again, or pip install --upgrade ncu-report"
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
        # PowerShell redirects output as UTF-16, whose first two bytes tell the order of the others.
        encoding = "utf-16" if first_bytes.startswith(UTF16_MARKS) else "utf-8-sig"
        text = path.read_text(encoding=encoding, errors="replace")
        return _read_csv(path, text)


def from_metrics(path: str, identities: Sequence[Json], metrics: list[_Values], units: _Texts) -> Report:
    """Make a report of profiled kernel launches out of their identities and metrics.

    Parameters
    ----------
    path : str
    identities : sequence of dict
        Of each launch: ``kernel`` at least, and any other of :data:`IDENTITY`.
    metrics : list of dict
        Of each launch, values by NVIDIA's name, in base units.
    units : dict of str to str
        Base unit of each metric, by NVIDIA's name.

    Returns
    -------
    Report
    """
    rows = []
    for number, (identity, values) in enumerate(zip(identities, metrics, strict=True)):
        row: Json = {**dict.fromkeys(IDENTITY), "id": number, "ranges": (), **identity}
        for name, text in _identity_in_metrics(values).items():
            row[name] = row[name] or text  # metrics only complete what the identity lacks
        for metric in ncu_metrics.METRICS:
            # NVIDIA's names differ by version and chip: the first that this launch has counts. All ours are numbers.
            reported_name = next(filter(values.__contains__, metric.nvidia), "")
            value = values.get(reported_name)
            row[metric.name] = None if isinstance(value, str) else value
        rows.append(row)
    names = [metric.name for metric in ncu_metrics.METRICS]
    launches = pd.DataFrame(rows, columns=[*IDENTITY, *names])
    return Report(path, launches.astype(dict.fromkeys(names, "float64")), metrics, units)


def _identity_in_metrics(values: Json) -> dict[str, str | None]:
    """Find GPU, device, stream, grid and block of a launch in its metrics; None for what they lack."""
    prefix = "device__attribute_compute_capability_"
    identity = {
        "gpu": values.get("device__attribute_display_name"),
        "compute_capability": capability(values.get(prefix + "major"), values.get(prefix + "minor")),
        "device": _integer_text(values.get("launch__device_id")),
        "stream": _integer_text(values.get("launch__stream_id")),
    }
    for name in ("grid", "block"):
        sizes = [_integer_text(values.get(f"launch__{name}_dim_{axis}")) for axis in "xyz"]
        identity[name] = None if None in sizes else f"({', '.join(map(str, sizes))})"
    return identity


def _integer_text(value: Value | None) -> str | None:
    """Write the number of a device or a stream, or a size, as an integer; None for anything else than a number."""
    if isinstance(value, (int, float)):
        return str(int(value))
    return None


#: Columns of a page that identify a launch, and the name of each in :data:`IDENTITY`.
_IDENTITY_COLUMNS = {
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
#: A launch's ranges are in one cell, each in quotes, with colons between its fields. The last field is the name again,
#: which shows where a name with colons in it ends. In the column's header, these fields follow the thread's.
_FIELDS_OF_RANGE = "Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
#: The groups are domain and name; five fields follow that are not read, then the name again.
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
        out.writerow(["ID", *_IDENTITY_COLUMNS, f"thread {_FIELDS_OF_RANGE}", *names])
        out.writerow([""] * (2 + len(_IDENTITY_COLUMNS)) + units)  # ID, identity and ranges have no unit
        for row, values in zip(report.launches.to_dict("records"), report.metrics, strict=True):
            identity = [row[column] for column in _IDENTITY_COLUMNS.values()]
            ranges = "  ".join(map(_range_cell, row["ranges"]))
            cells = [row["id"], *identity, ranges, *map(values.get, names)]
            out.writerow(map(_page_cell, cells))
    return path


def _page_cell(value: Any) -> str:
    """Write a value on one line, "" where it is missing."""
    if pd.isna(value):
        return ""
    return _LINE_BREAKS.sub(" ", str(value))


def _range_cell(qualified_name: str) -> str:
    """Write a range, called ``NAME`` or ``DOMAIN@NAME``, as ncu does; "none" in the fields that :func:`read` skips."""
    domain, at, name = qualified_name.replace('"', "'").partition("@")  # on the page a double quote would end the range
    if not at:  # there is only a name, in the place of the domain
        domain, name = _NO_DOMAIN, domain
    return f'"{domain}:{name}:none:none:none:none:none:{name}"'


# ---------------------------------------------------------------- .ncu-rep

#: CPU seconds that NVIDIA's package may take for any report; each MB adds a second.
SECONDS = 60


def _read_report(path: Path) -> Report:
    """Read a ``.ncu-rep`` with NVIDIA's package."""
    spec = importlib.util.find_spec("ncu_report")
    if spec is None or spec.origin is None:
        problem = "is an Nsight Compute report, which NVIDIA's ncu-report package reads"
        raise TraceError(path, problem, f"pip install 'nsightkit[ncu]', or {_EXPORT_REMEDY}")
    # The folder from which the package can be imported: a package's own folder is in it, a module's file directly.
    folder = Path(spec.origin).absolute().parent
    if spec.submodule_search_locations:
        folder = folder.parent
    launches = []
    for launch in _decoded_launches(path, folder):
        identity = {"kernel": launch["kernel"], "ranges": _range_names(launch["ranges"])}
        launches.append((identity, launch["metrics"]))
    if not launches:
        # NVIDIA's reader silently finds nothing in some damaged reports, too.
        raise TraceError(path, "holds no profiled kernel, or is damaged", f"check ncu's filters; {_AGAIN_REMEDY}")
    return _report_in_base_units(path, launches)


def _decoded_launches(path: Path, folder: Path) -> list[Json]:
    """Have NVIDIA's package, in `folder`, read a report in a separate process, as it aborts on some damaged ones.

    The limits of that process grow with the report's size.
    """
    size = path.stat().st_size
    with reading(path, "makes NVIDIA's reader fail: it is damaged, or of a newer ncu", _AGAIN_REMEDY):
        contents = ask_limited(
            ncu_child.__file__,
            [str(folder), str(path.absolute())],
            memory_bytes=2_000_000_000 + 16 * size,
            seconds=SECONDS + size // 1_000_000,
            output_bytes=min(max(64_000_000, 16 * size), 1_000_000_000),
        )
    if "problem" in contents:
        raise TraceError(path, f"is not a report that ncu-report can read ({contents['problem']})", _AGAIN_REMEDY)
    return list(contents["launches"])


def _report_in_base_units(path: Path, launches: Iterable[tuple[Json, Iterable[tuple[str, Value, str]]]]) -> Report:
    """Make a report of each launch's identity and metrics (name, value and unit), converted to base units."""
    units: _Texts = {}
    identities = []
    metrics = []
    for identity, launch_metrics in launches:
        values: _Values = {}
        for name, value, unit in launch_metrics:
            base, factor = ncu_metrics.base_unit(unit)
            units.setdefault(name, base)
            values[name] = value  # an integer in base units stays one
            if factor != 1.0 and not isinstance(value, str):
                values[name] = value * factor
        identities.append(identity)
        metrics.append(values)
    return from_metrics(str(path), identities, metrics, units)


def _range_names(ranges: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Name ranges given by domain and name: ``NAME``, or ``DOMAIN@NAME`` outside the default domain."""
    names = []
    for domain, name in ranges:
        names.append(name if domain in ("", _NO_DOMAIN) else f"{domain}@{name}")
    return tuple(names)


# ---------------------------------------------------------------- CSV

#: How the lines of a page begin: the header, the units (without a number) and the launches. Others are output of the
#: program or messages of ncu.
_PAGE_LINE = re.compile(r'"(?:ID|\d{0,18})","')
_NUMBER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(\.\d+)?([eE][+-]?\d+)?")
#: A number with a decimal comma, as some locales have it: 1.234,5 or 0,25.
_DECIMAL_COMMA = re.compile(r"[+-]?\d{1,3}(?:\D?\d{3})*,\d+|[+-]?\d+,\d+")
_NO_VALUE = ("", "n/a", "nan", "-nan", "inf", "-inf", "no data")


def _read_csv(path: Path, text: str) -> Report:
    """Read ncu's raw page out of a program's output; each page in it has a header, a row of units, and the launches."""
    with reading(path, "is damaged, or is cut short inside a quoted field", _AGAIN_REMEDY):
        records = list(csv.reader(filter(_PAGE_LINE.match, text.split("\n")), strict=True))
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
            raise TraceError(path, problem, f"{_AGAIN_REMEDY}, or {_EXPORT_REMEDY}")
        row = dict(zip(header, record, strict=True))
        if not row["ID"]:
            units = row
            continue
        if not units:
            problem = "is not ncu's raw page: it has no row of units, and its numbers could mean anything"
            raise TraceError(path, problem, f"print the raw page: {_RAW_PAGE_COMMAND}")
        for cell in record:
            if _DECIMAL_COMMA.fullmatch(cell) and not _NUMBER.fullmatch(cell):
                problem = f"has numbers with a decimal comma ({cell})"
                raise TraceError(path, problem, f"export it in another locale: LC_ALL=C {_RAW_PAGE_COMMAND}")
        launches.append((_identity_in_row(row), _metrics_in_row(row, units)))
    if not launches:
        problem = "holds no launch as Nsight Compute's raw page lists them"
        raise TraceError(
            path, problem, f"give an .ncu-rep, or {_EXPORT_REMEDY}; if it is a raw page, check ncu's filters"
        )
    return _report_in_base_units(path, launches)


def _metrics_in_row(row: _Texts, units: _Texts) -> list[tuple[str, Value, str]]:
    """Return name, value and unit of each metric in a row that has a value."""
    metrics = []
    for name, cell in row.items():
        # Other columns have a blank in their name, list ranges ("Id:Domain:…"), or are listed here.
        is_metric = " " not in name and not name.startswith("Id:") and name not in ("ID", "Context", *_IDENTITY_COLUMNS)
        text = cell.strip()
        if is_metric and text.lower() not in _NO_VALUE:
            metrics.append((name, _parsed_value(text), units[name]))
    return metrics


def _parsed_value(text: str) -> Value:
    """Convert a cell that holds a number, such as ``1,234`` or ``0.5``; leave any other text."""
    number = _NUMBER.fullmatch(text)
    if number is None:
        return text
    plain = text.replace(",", "")
    if number[1] or number[2]:  # decimals, or an exponent
        return float(plain)
    return int(plain)


def _identity_in_row(row: _Texts) -> Json:
    """Read from a row the names in :data:`IDENTITY` that it has; None for an empty cell, "" for the kernel's."""
    identity: Json = {"id": int(row["ID"])}
    for column, name in _IDENTITY_COLUMNS.items():
        identity[name] = row.get(column) or None
    identity["kernel"] = identity["kernel"] or ""
    for column, cell in row.items():
        if column.endswith(_FIELDS_OF_RANGE):
            identity["ranges"] = _range_names(_RANGE.findall(cell))
    return identity
