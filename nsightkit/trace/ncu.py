"""Nsight Compute reports: ``.ncu-rep`` files, and both CSV pages that ``ncu --csv`` prints.

Whatever the form, a :class:`Report` has a row for each profiled kernel launch and values in base units. A report
holds the program's command line, host name and paths too; none of them are read, so :func:`write` cannot write them.
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
from nsightkit.trace import ncu_child, ncu_metrics, programs
from nsightkit.trace.files import replacing, require_regular
from nsightkit.trace.limited import name_of_end, run_limited
from nsightkit.trace.programs import tail

__all__ = ["IDENTITY", "Report", "Value", "from_metrics", "read", "write"]

#: A metric's value: a number in base units, or text.
Value = int | float | str
#: What identifies a launch, and its metrics.
_Launch = tuple[dict[str, Any], dict[str, Value]]

_MAGIC = b"NVR\0"
_EXPORT = f"export it with: {' '.join(programs.csv_command('REPORT.ncu-rep'))}"
_AGAIN = "copy it again, or profile again"
#: Columns of ``launches`` that say which launch it was.
IDENTITY = ("id", "kernel", "gpu", "compute_capability", "device", "stream", "grid", "block", "ranges")


@dataclasses.dataclass(frozen=True)
class Report:
    """What Nsight Compute measured, a launch at a time.

    Parameters
    ----------
    path : str
    launches : DataFrame
        A row a profiled launch, in the order they ran: ``id``, ``kernel`` (demangled), ``gpu``,
        ``compute_capability``, ``device``, ``stream``, ``grid``, ``block``, ``ranges`` (a tuple: names of the NVTX
        push/pop ranges around it, the outermost first, as ``DOMAIN@NAME`` outside the default domain; ncu keeps them
        when it is run with ``--nvtx``), and a float column for each metric of
        :data:`nsightkit.trace.ncu_metrics.METRICS`, NaN where the report lacks it.
    metrics : list of dict
        Of each launch, all its metrics by NVIDIA's names, in base units. Where the details page gives a metric no
        more than a label that :mod:`nsightkit.trace.ncu_metrics` does not know, ``section: label``.
    units : dict of str to str
        Base unit of each metric.
    """

    path: str
    launches: pd.DataFrame
    metrics: list[dict[str, Value]]
    units: dict[str, str]

    def __len__(self) -> int:
        return len(self.metrics)

    def metric(self, name: str) -> pd.Series:
        """Give one metric of all launches.

        Parameters
        ----------
        name : str
            Ours, such as ``dram_pct``, or NVIDIA's with its suffix.

        Returns
        -------
        Series
            Indexed as ``launches``; None or NaN where a launch lacks it.

        Raises
        ------
        UsageError
            There is no such metric, neither in the table nor in this report. Names the likely ones.
        """
        if name in self.launches.columns:
            return self.launches[name]
        known = ncu_metrics.find(name, self.units)
        return pd.Series([row.get(known) for row in self.metrics], index=self.launches.index, name=known)


def read(path: str | os.PathLike[str]) -> Report:
    """Read a report of Nsight Compute.

    Parameters
    ----------
    path : path-like
        A ``.ncu-rep``, or what ``ncu --csv`` printed with ``--page raw`` or ``--page details``, also with the
        program's own output around it. The bytes decide, not the name.

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
        return _read_csv(path, _decoded(path, path.read_bytes()))


def from_metrics(
    path: str, identities: Sequence[dict[str, Any]], metrics: list[dict[str, Value]], units: dict[str, str]
) -> Report:
    """Make a report of what was read from somewhere.

    Parameters
    ----------
    path : str
    identities : sequence of dict
        Of each launch what identifies it: ``kernel`` at least, and any other of :class:`Report`'s.
    metrics : list of dict
        Of each launch, values by NVIDIA's name, in base units.
    units : dict of str to str

    Returns
    -------
    Report
    """
    rows = []
    for number, (identity, values) in enumerate(zip(identities, metrics, strict=True)):
        row: dict[str, Any] = dict.fromkeys(IDENTITY)
        row |= {"id": number, "ranges": (), **identity}
        row["gpu"] = row["gpu"] or values.get("device__attribute_display_name") or None
        row["compute_capability"] = row["compute_capability"] or _compute_capability(values)
        for metric in ncu_metrics.METRICS:
            row[metric.name] = _first_number(values, metric.nvidia)
        rows.append(row)
    names = ncu_metrics.names()
    launches = pd.DataFrame(rows, columns=[*IDENTITY, *names])
    return Report(path, launches.astype(dict.fromkeys(names, "float64")), metrics, units)


def _first_number(values: dict[str, Value], names: Iterable[str]) -> float:
    """Give the value of the first name that a launch has; NaN where it has none, or a text."""
    for name in names:
        if name in values:
            value = values[name]
            return value if isinstance(value, (int, float)) else math.nan
    return math.nan


def _compute_capability(values: dict[str, Value]) -> str | None:
    major = values.get("device__attribute_compute_capability_major")
    minor = values.get("device__attribute_compute_capability_minor")
    if isinstance(major, (int, float)) and isinstance(minor, (int, float)):
        return f"{major:g}.{minor:g}"
    return None


#: What the pages call the columns that identify a launch.
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
        What ncu itself gives only a label, and no name, is left out.
    path : path-like
        Appears whole or not at all; replaced when it exists.

    Returns
    -------
    Path
        `path`.
    """
    path = Path(path)
    names = [name for name in report.units if " " not in name]
    units = [report.units[name] for name in names]
    with replacing(path) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as stream:
        out = csv.writer(stream, quoting=csv.QUOTE_ALL, lineterminator="\n")
        out.writerow(["ID", *_NAMED, f"thread {_FIELDS_OF_RANGE}", *names])
        out.writerow([""] * (2 + len(_NAMED)) + units)
        for row, values in zip(report.launches.to_dict("records"), report.metrics, strict=True):
            identity = [row[column] for column in _NAMED.values()]
            ranges = "  ".join(_range_cell(name) for name in row["ranges"])
            cells = [row["id"], *identity, ranges, *(values.get(name) for name in names)]
            out.writerow(["" if pd.isna(cell) else str(cell) for cell in cells])
    return path


def _range_cell(name: str) -> str:
    domain, at, rest = name.replace('"', "'").partition("@")  # a double quote ends a range's name here
    if not at:
        domain, rest = _NO_DOMAIN, domain
    return f'"{domain}:{rest}:none:none:none:none:none:{rest}"'


# ---------------------------------------------------------------- .ncu-rep

#: Of processor time that any report may take NVIDIA's package; each MB takes a second more.
SECONDS = 60


class _Launched(msgspec.Struct):
    """A launch as :mod:`nsightkit.trace.ncu_child` prints it."""

    kernel: str
    ranges: list[tuple[str, str]]  # domain, name
    metrics: list[tuple[str, int | float | str, str]]  # name, value, unit


class _Contents(msgspec.Struct):
    """What :mod:`nsightkit.trace.ncu_child` prints of a report."""

    launches: list[_Launched] = []
    problem: str = ""
    usable: bool = True  # the package


def _read_report(path: Path) -> Report:
    folder = _folder_of_package()
    ncu = programs.NCU.find()
    if folder is None and ncu is None:
        raise _unreadable(path)
    if _is_cut_short(path):
        raise TraceError(path, "is cut short", _AGAIN)
    if folder is not None:
        contents = _printed(path, folder)
        if contents.usable:
            return _reported(path, contents)
    if ncu is None:
        raise _unreadable(path)
    # The same package that NVIDIA puts on PyPI does the work in ncu.
    return _exported(path, ncu)


def _unreadable(path: Path) -> TraceError:
    problem = "is an Nsight Compute report, which only NVIDIA's ncu-report package or ncu itself reads"
    return TraceError(path, problem, f"pip install 'nsightkit[ncu]', or {_EXPORT}")


def _folder_of_package() -> Path | None:
    """Where NVIDIA's package lies, which may be known to this process only; None where it is not installed."""
    spec = importlib.util.find_spec("ncu_report")
    if spec is None or spec.origin is None:
        return None
    module = Path(spec.origin).absolute()
    return module.parent.parent if spec.submodule_search_locations else module.parent


def _printed(path: Path, folder: Path) -> _Contents:
    """Have NVIDIA's package read a report in a process of its own, as it aborts on some damaged ones."""
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


def _reported(path: Path, contents: _Contents) -> Report:
    if not contents.launches:
        # Damage, too, makes NVIDIA's reader find nothing, without a word.
        raise TraceError(path, "holds no profiled kernel, or is damaged", f"check ncu's filters; {_AGAIN}")
    units: dict[str, str] = {}
    return _report(path, [_launch(launch, units) for launch in contents.launches], units)


def _report(path: Path, launches: Sequence[_Launch], units: dict[str, str]) -> Report:
    identities = [identity for identity, _ in launches]
    metrics = [values for _, values in launches]
    return from_metrics(str(path), identities, metrics, units)


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
        "ranges": tuple(_in_domain(domain, name) for domain, name in launch.ranges),
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


def _exported(path: Path, ncu: Path) -> Report:
    text = programs.csv_of(path, ncu)
    if not any(_HEADER.match(line) for line in text.splitlines()):
        # An older ncu refuses the reports of a newer one.
        problem = f"{ncu} cannot export it ({tail(text, 2) or 'it said nothing'})"
        remedy = f"use the ncu that wrote it or a newer one, or pip install 'nsightkit[ncu]'; {_AGAIN}"
        raise TraceError(path, problem, remedy)
    return _read_csv(path, text)


def _is_cut_short(path: Path) -> bool:
    """Check whether a report ends inside a block: NVIDIA's reader then gives fewer kernels, without a word.

    The frames are described in Nsight Compute's ``extras/FileFormat``: magic, size and header of the file, then
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
                return False  # another layout: NVIDIA's reader is to judge
            position += 4 + length + payload
    return position > size


#: Field 5 of a protocol buffer's message, a whole number.
_PAYLOAD_TAG = 5 << 3
_VARINT = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]")


def _payload_size(header: bytes) -> int | None:
    """Read from a block's header how long the payload after it is; None where the header is none of ours."""
    if not header:
        return None
    position = 0
    while position < len(header):
        tag, position = _varint(header, position)
        value, end = _varint(header, position)
        if value < 0:
            return None
        if tag == _PAYLOAD_TAG:
            return value
        ends = {0: end, 1: position + 8, 2: end + value, 5: position + 4}
        if tag & 7 not in ends:
            return None
        position = ends[tag & 7]
    return 0


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Read a number of seven bits a byte, the low ones first; also where it ends. -1 where there is none."""
    match = _VARINT.match(message, position)
    if match is None:
        return -1, position
    number = 0
    for place, byte in enumerate(match[0]):
        number |= (byte & 0x7F) << (7 * place)
    return number, match.end()


# ---------------------------------------------------------------- CSV

#: The first line of a page, as ncu writes it or as a spreadsheet saved it again.
_HEADER = re.compile(r'"?ID"?([,;\t])(?="?(?:Process ID|Process Name|Kernel Name|Context)\b)')
#: A page: its header, and its records.
_Page = tuple[list[str], list[list[str]]]


def _decoded(path: Path, data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # redirected by PowerShell
        return data.decode("utf-16", errors="replace")
    if b"\0" in data[:4096]:
        raise TraceError(path, "is not a report of Nsight Compute", f"give an .ncu-rep, or {_EXPORT}")
    return data.decode("utf-8-sig", errors="replace")


def _read_csv(path: Path, text: str) -> Report:
    units: dict[str, str] = {}
    launches: list[_Launch] = []
    pages = _pages(path, text)
    for header, records in pages:
        if "Metric Name" in header:
            launches += _details(path, header, records, units)
        else:
            launches += _raw(path, header, records, units)
    if not pages:
        raise _foreign(path, text)
    if not launches:
        raise TraceError(path, "holds no profiled kernel", "check ncu's filters and profile again")
    return _report(path, launches, units)


#: What a text without a page of ours is, by what stands in it, and what to do about it; the first that fits.
_FOREIGN = (
    (
        "No kernels were profiled",
        "is the output of a run in which ncu profiled no kernel",
        "check the kernel filter (a regular expression needs the prefix regex:) and the NVTX filter",
    ),
    (
        "ERR_NVGPUCTRPERM",
        "is the output of a run that was not permitted to read the GPU's counters (ERR_NVGPUCTRPERM)",
        "nsightkit doctor says what to do",
    ),
    (
        r'(?m)^"(?:Process ID|Device Name|Kernel Name|Address|Launch Attribute|#)"',
        "is another page of ncu's (summary, source or session)",
        _EXPORT,
    ),
    ("==PROF==", "is output of ncu that is not CSV", _EXPORT),
)


def _foreign(path: Path, text: str) -> TraceError:
    for sign, problem, remedy in _FOREIGN:
        if re.search(sign, text):
            return TraceError(path, problem, remedy)
    problem = 'is not a report of Nsight Compute (no line begins with "ID")'
    return TraceError(path, problem, f"give an .ncu-rep, or {_EXPORT}")


def _pages(path: Path, text: str) -> list[_Page]:
    """Find the pages in a text, without what the program and ncu printed between."""
    lines = iter(io.StringIO(text))
    pages: list[_Page] = []
    records: list[list[str]] = []
    begins = re.compile(r"(?!)")
    separator = ","
    for line in lines:
        if match := _HEADER.match(line):
            separator = match[1]
            sign = re.escape(separator)
            quote = '"' if line.startswith('"') else '"?'
            # a launch begins with its number; the units stand under columns that have none
            begins = re.compile(rf"{quote}\d{{1,18}}{quote}{sign}|(?:{quote}{quote}{sign}){{4}}")
            records = []
            pages.append((_split(path, [line], separator), records))
        elif begins.match(line):
            # a name or a rule's text may hold line ends: the reader takes as many lines as the record has
            records.append(_split(path, itertools.chain([line], lines), separator))
    return pages


def _split(path: Path, lines: Iterable[str], separator: str) -> list[str]:
    with reading(path, "is damaged, or is cut short inside a quoted field", _AGAIN):
        return next(csv.reader(lines, delimiter=separator, strict=True))


def _raw(path: Path, header: list[str], records: list[list[str]], units: dict[str, str]) -> list[_Launch]:
    """Read the raw page: a column a metric, and a row of units before the launches."""
    columns = len(set(header))
    for record in records:
        if len(record) != columns:
            problem = f"is damaged: a line has {len(record)} fields, the header {columns}"
            raise TraceError(path, problem, f"{_AGAIN}, or {_EXPORT}")
    rows = [dict(zip(header, record, strict=True)) for record in records]
    launched = [row for row in rows if row["ID"]]
    unit_rows = [row for row in rows if not row["ID"]]
    if launched and not unit_rows:
        raise TraceError(path, "has no row of units, so its numbers could mean anything", _EXPORT)
    names = [name for name in header if _is_metric(name)]
    decimal_sign = _decimal_sign(path, [row[name] for row in launched for name in names])
    launches = []
    for row in launched:
        values: dict[str, Value] = {}
        for name in names:
            value = _value(row[name], decimal_sign)
            if value is not None:
                _put(values, units, name, value, unit_rows[0][name])
        launches.append((_identity(row), values))
    return launches


def _is_metric(column: str) -> bool:
    return " " not in column and not column.startswith("Id:") and column not in ("ID", "Context", *_NAMED)


def _details(path: Path, header: list[str], records: list[list[str]], units: dict[str, str]) -> list[_Launch]:
    """Read the details page: a row a metric, and rows of rules that have none."""
    for name in ("Section Name", "Metric Unit", "Metric Value"):
        if name not in header:
            raise TraceError(path, f"has no column '{name}' (a summary page?)", _EXPORT)
    if records and len(records[-1]) <= header.index("Metric Value"):
        raise TraceError(path, "is cut short: its last line is not whole", _AGAIN)
    launches: dict[str, _Launch] = {}
    measured = []
    for record in records:
        row = dict(zip(header, record, strict=False))
        if not row.get("Section Name"):
            continue  # of a section's table, such as that of NUMA affinity: its lines begin with numbers too
        launches[row["ID"]] = (_identity(row), {})
        if row.get("Metric Name") and "Metric Value" in row:
            measured.append(row)
    decimal_sign = _decimal_sign(path, [row["Metric Value"] for row in measured])
    for row in measured:
        _, values = launches[row["ID"]]
        value = _value(row["Metric Value"], decimal_sign)
        name = _metric_name(row["Section Name"], row["Metric Name"], row["Metric Unit"])
        if value is not None and name not in values:  # a metric may stand in several sections
            _put(values, units, name, value, row["Metric Unit"])
    return list(launches.values())


_LABELLED = re.compile(r".*\S \(([\w.:]+)\)")  # --print-metric-name label-name
_NAME = re.compile(r"[A-Za-z_][\w.:]*")  # --print-metric-name name, or ncu --metrics


def _metric_name(section: str, label: str, unit: str) -> str:
    labelled = _LABELLED.fullmatch(label)
    if labelled and "__" in labelled[1]:
        return labelled[1]
    if "_" in label and _NAME.fullmatch(label):
        return label
    metric = ncu_metrics.by_label(label, ncu_metrics.base_unit(unit)[0], section)
    return metric.nvidia[0] if metric else f"{section}: {label}"


def _identity(row: dict[str, str]) -> dict[str, Any]:
    identity: dict[str, Any] = {"id": int(row["ID"]), "ranges": ()}
    for column, name in _NAMED.items():
        identity[name] = row.get(column) or None
    identity["kernel"] = identity["kernel"] or ""
    for column, cell in row.items():
        if column.endswith(_FIELDS_OF_RANGE):
            identity["ranges"] = tuple(_ranges(cell))
    return identity


#: What ncu calls the domain of ranges that have none.
_NO_DOMAIN = "<default domain>"
# Each range of a launch stands in quotes, between colons: domain, name, payload (two), colour (two), kind of message,
# and the message, which is the name again; so that a name with colons in it can be told.
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


_NUMBER = re.compile(r"[+-]?(?:\d[\d.,' \u00a0\u202f\u2019]*|[.,]\d+)(?:[eE][+-]?\d+)?")
_INSTANCES = re.compile(r"(\S+) \(.*\)", re.DOTALL)  # --print-metric-instances: "64.86 (1; 2; 3)"
_GROUPED = re.compile(r"[+-]*[1-9]\d{0,2}[.,]\d{3}")  # may be a thousand and some, or one and some
_SPACES = str.maketrans("", "", " '\u00a0\u202f\u2019")
_MISSING = ("", "n/a", "nan", "-nan", "inf", "-inf", "no data")


def _number_text(cell: str) -> str | None:
    """Give a cell's number without what groups its digits but points and commas; None where it is text."""
    instances = _INSTANCES.fullmatch(cell)
    text = instances[1] if instances else cell.strip()
    return text.translate(_SPACES) if _NUMBER.fullmatch(text) else None


def _decimal_sign(path: Path, cells: Iterable[str]) -> str:
    """Find out which sign is the decimal point: in some locales it is a comma, and the point parts thousands.

    One number alone can be both (1,234); all numbers of a file together rarely can. What stays open is read as
    ncu writes it without a locale: 1,234 is a thousand and some.
    """
    examples: dict[str, str] = {}
    for cell in cells:
        text = _number_text(cell)
        if text is None or _GROUPED.fullmatch(text):
            continue
        points, commas = text.count("."), text.count(",")
        if points + commas == 0:
            continue
        last = "." if text.rfind(".") > text.rfind(",") else ","
        if points > 1 and not commas:
            last = ","
        if commas > 1 and not points:
            last = "."
        examples.setdefault(last, text)
    if len(examples) > 1:
        problem = f"mixes two ways to write numbers ({examples['.']} and {examples[',']})"
        raise TraceError(path, problem, f"{_EXPORT}, in one locale")
    return "," if "," in examples else "."


def _value(cell: str, decimal_sign: str) -> Value | None:
    text = cell.strip()
    if text.lower() in _MISSING:
        return None
    number = _number_text(cell)
    if number is None:
        return text
    grouping = "," if decimal_sign == "." else "."
    plain = number.replace(grouping, "").replace(",", ".")
    try:
        return int(plain) if plain.lstrip("+-").isdigit() else float(plain)
    except ValueError:
        return text
