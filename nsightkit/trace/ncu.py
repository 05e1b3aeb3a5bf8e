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
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from nsightkit.errors import TraceError, reading
from nsightkit.trace import ncu_child, ncu_metrics, programs
from nsightkit.trace.files import replacing, require_regular
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
    with reading(path), path.open("rb") as stream:
        head = stream.read(4096)
        if not head:
            raise TraceError(path, "is empty", "profile again: ncu was probably stopped before it wrote")
        return _read_report(path) if head.startswith(_MAGIC) else _read_csv(path, _decoded(path, head + stream.read()))


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
        row: dict[str, Any] = {"id": number, **dict.fromkeys(IDENTITY[1:]), "ranges": (), **identity}
        gpu = values.get("device__attribute_display_name")
        row["gpu"] = row["gpu"] or (gpu if isinstance(gpu, str) and gpu else None)
        major, minor = (values.get(f"device__attribute_compute_capability_{part}") for part in ("major", "minor"))
        if row["compute_capability"] is None and major is not None and minor is not None:
            row["compute_capability"] = f"{major:g}.{minor:g}" if not isinstance(major, str) else None
        for metric in ncu_metrics.METRICS:
            found = next((values[name] for name in metric.nvidia if name in values), None)
            row[metric.name] = found if isinstance(found, (int, float)) else math.nan
        rows.append(row)
    launches = pd.DataFrame(rows, columns=[*IDENTITY, *ncu_metrics.names()])
    return Report(path, launches.astype(dict.fromkeys(ncu_metrics.names(), "float64")), metrics, units)


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
    with replacing(path) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as stream:
        out = csv.writer(stream, quoting=csv.QUOTE_ALL, lineterminator="\n")
        out.writerow(["ID", *_NAMED, f"thread {_FIELDS_OF_RANGE}", *names])
        out.writerow([""] * (2 + len(_NAMED)) + [report.units[name] for name in names])
        for row, values in zip(report.launches.to_dict("records"), report.metrics, strict=True):
            identity = [str(row[ours]) if isinstance(row[ours], str) else "" for ours in _NAMED.values()]
            cells = ["" if values.get(name) is None else str(values[name]) for name in names]
            out.writerow([str(row["id"]), *identity, "  ".join(map(_written, row["ranges"])), *cells])
    return path


def _written(name: str) -> str:
    # A double quote ends a range's name here.
    domain, at, rest = name.replace('"', "'").partition("@")
    if not at:
        domain, rest = _NO_DOMAIN, domain
    return f'"{domain}:{rest}:none:none:none:none:none:{rest}"'


# ---------------------------------------------------------------- .ncu-rep


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
    ncu = None if folder else programs.NCU.find()
    if folder is None and ncu is None:
        raise _unreadable(path)
    if _cut_short(path):
        raise TraceError(path, "is cut short", _AGAIN)
    if folder is not None:
        contents = _printed(path, folder)
        if contents.usable:
            return _reported(path, contents)
        ncu = programs.NCU.find()
        if ncu is None:
            raise _unreadable(path)
    # The same package that NVIDIA puts on PyPI does the work in ncu.
    assert ncu is not None
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
    memory = (2 << 30) + 16 * size
    seconds = SECONDS + size // 1_000_000
    most = min(max(64 << 20, 16 * size), 1 << 30)
    limits = [str(limit) for limit in (memory, seconds, most)]
    # Isolated: nothing of the folder it stands in or of the environment takes the place of what the package imports.
    command = [sys.executable, "-I", "-S", ncu_child.__file__, str(folder), str(path.absolute()), *limits]
    with tempfile.TemporaryFile() as output:
        try:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=2 * seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise TraceError(path, f"was not read by NVIDIA's package within {2 * seconds} s", _AGAIN) from error
        if code:
            problem = f"makes NVIDIA's reader crash ({_name_of_end(code)}): it is damaged, or of a newer ncu"
            raise TraceError(path, problem, f"{_AGAIN}, or pip install --upgrade ncu-report")
        if output.tell() > most:
            raise TraceError(path, "says far more than its size allows", _AGAIN)
        output.seek(0)
        try:
            contents = msgspec.json.decode(output.read(), type=_Contents)
        except msgspec.DecodeError as error:
            raise TraceError(path, f"is not a report that ncu-report can read ({error})", _AGAIN) from error
    if contents.problem:
        problem = f"is not a report that ncu-report can read ({' '.join(contents.problem.split())[:160]})"
        raise TraceError(path, problem, _AGAIN)
    return contents


def _name_of_end(code: int) -> str:
    """How a process ended: the name of the signal, or its exit code."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


def _reported(path: Path, contents: _Contents) -> Report:
    if not contents.launches:
        # Damage, too, makes NVIDIA's reader find nothing, without a word.
        raise TraceError(path, "holds no profiled kernel, or is damaged", f"check ncu's filters; {_AGAIN}")
    units: dict[str, str] = {}
    identities, metrics = zip(*(_launch(launch, units) for launch in contents.launches), strict=True)
    return from_metrics(str(path), identities, list(metrics), units)


def _launch(launch: _Launched, units: dict[str, str]) -> _Launch:
    """What identifies one launch of a report, and its metrics."""
    values: dict[str, Value] = {}
    for name, value, unit in launch.metrics:
        _put(values, units, name, value, unit)
    return {
        "kernel": launch.kernel,
        "grid": _sizes(values, "grid"),
        "block": _sizes(values, "block"),
        "device": _whole(values.get("launch__device_id")),
        "stream": _whole(values.get("launch__stream_id")),
        "ranges": tuple(_in_domain(domain, name) for domain, name in launch.ranges),
    }, values


def _whole(value: Value | None) -> str | None:
    """A number of a device or a stream as text."""
    return str(int(value)) if isinstance(value, (int, float)) else None


def _sizes(values: dict[str, Value], what: str) -> str | None:
    found = [values.get(f"launch__{what}_dim_{axis}") for axis in "xyz"]
    return f"({', '.join(f'{n:.0f}' for n in found if isinstance(n, (int, float)))})" if None not in found else None


def _put(values: dict[str, Value], units: dict[str, str], name: str, value: Value, unit: str) -> None:
    """Take down a value in the base of its unit."""
    base, factor = ncu_metrics.base_unit(unit)
    values[name] = value if factor == 1.0 or isinstance(value, str) else value * factor
    units.setdefault(name, base)


def _in_domain(domain: str, name: str) -> str:
    return name if domain in ("", _NO_DOMAIN) else f"{domain}@{name}"


def _exported(path: Path, ncu: Path) -> Report:
    text = programs.csv_of(path, ncu)
    if not any(_HEADER.match(line) for line in text.splitlines()):
        # An older ncu refuses the reports of a newer one.
        raise TraceError(
            path,
            f"{ncu} cannot export it ({tail(text, 2) or 'it said nothing'})",
            f"use the ncu that wrote it or a newer one, or pip install 'nsightkit[ncu]'; {_AGAIN}",
        )
    return _read_csv(path, text)


#: Of processor time that any report may take NVIDIA's package, and twice as long by the clock; each MB takes one more.
SECONDS = 60
_PAYLOAD = 5 << 3 | 0  # field 5, a whole number


def _cut_short(path: Path) -> bool:
    """Whether a report ends inside a block: NVIDIA's reader then gives fewer kernels, without a word.

    The frames are described in Nsight Compute's ``extras/FileFormat``: magic, size and header of the file, then
    blocks of a header's size, the header, and a payload whose size is field 5 of the header.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(len(_MAGIC))
        at = len(_MAGIC) + 4 + int.from_bytes(stream.read(4), "little")
        while at < size:
            stream.seek(at)
            length = int.from_bytes(stream.read(4), "little")
            header = stream.read(length) if length <= size else b""
            if len(header) < length:
                return True
            if not header:
                return False  # another layout
            try:
                at += 4 + length + _payload(header)
            except (KeyError, ValueError):
                return False  # NVIDIA's reader is to judge
    return at > size


def _payload(header: bytes) -> int:
    """Read a block's header, which is a protocol buffer's message: how long the payload after it is."""
    found: dict[int, int] = {}
    at = 0
    while at < len(header):
        tag, at = _number(header, at)
        value, end = _number(header, at)
        at = {0: end, 1: at + 8, 2: end + value, 5: at + 4}[tag & 7]
        found.setdefault(tag, value)
    return found.get(_PAYLOAD, 0)


def _number(message: bytes, at: int) -> tuple[int, int]:
    """Read a number of seven bits a byte, the low ones first; also where it ends."""
    found = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]").match(message, at)
    if found is None:
        raise ValueError("a number without an end")
    return sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(found[0])), found.end()


# ---------------------------------------------------------------- CSV

#: The first line of a page, as ncu writes it or as a spreadsheet saved it again.
_HEADER = re.compile(r'"?ID"?([,;\t])(?="?(?:Process ID|Process Name|Kernel Name|Context)\b)')
_NUMBER = re.compile(r"[+-]?(?:\d[\d.,' \u00a0\u202f\u2019]*|[.,]\d+)(?:[eE][+-]?\d+)?")
_INSTANCES = re.compile(r"(\S+) \(.*\)", re.DOTALL)  # --print-metric-instances: "64.86 (1; 2; 3)"
_LABELLED = re.compile(r".*\S \(([\w.:]+)\)")  # --print-metric-name label-name
_NVIDIAS = re.compile(r"[a-zA-Z_]\w*__[\w.:]+")


def _decoded(path: Path, data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # redirected by PowerShell
        return data.decode("utf-16", errors="replace")
    if b"\0" in data[:4096]:
        raise TraceError(path, "is not a report of Nsight Compute", f"give an .ncu-rep, or {_EXPORT}")
    return data.decode("utf-8-sig", errors="replace")


def _read_csv(path: Path, text: str) -> Report:
    blocks = _blocks(path, text)
    if not blocks:
        raise TraceError(path, *next(said for sign, *said in _FOREIGN if re.search(sign, text)))
    units: dict[str, str] = {}
    launches = [
        launch
        for header, records in blocks
        for launch in (_details if "Metric Name" in header else _raw)(path, header, records, units)
    ]
    if not launches:
        raise TraceError(path, "holds no profiled kernel", "check ncu's filters and profile again")
    identities, metrics = zip(*launches, strict=True)
    return from_metrics(str(path), identities, list(metrics), units)


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
    ("", 'is not a report of Nsight Compute (no line begins with "ID")', f"give an .ncu-rep, or {_EXPORT}"),
)


def _blocks(path: Path, text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Find the pages in a text: a header and its records each, without what the program and ncu printed between."""
    lines = iter(io.StringIO(text))
    blocks: list[tuple[list[str], list[list[str]]]] = []
    begins, separator = re.compile(r"(?!)"), ","
    for line in lines:
        if found := _HEADER.match(line):
            separator = found[1]
            sign, mark = re.escape(separator), '"' if line.startswith('"') else '"?'
            # a launch begins with its number; the units stand under columns that have none
            begins = re.compile(rf"{mark}\d{{1,18}}{mark}{sign}|(?:{mark}{mark}{sign}){{4}}")
            blocks.append((_split(path, [line], separator), []))
        elif begins.match(line):
            # a name or a rule's text may hold line ends: the reader takes as many lines as the record has
            blocks[-1][1].append(_split(path, itertools.chain([line], lines), separator))
    return blocks


def _split(path: Path, lines: Iterable[str], separator: str) -> list[str]:
    with reading(path, "is damaged, or is cut short inside a quoted field", _AGAIN):
        return next(csv.reader(lines, delimiter=separator, strict=True))


_TEXTS = ("ID", "Context", "Stream", "Device", "CC")
#: What ncu calls the domain of ranges that have none.
_NO_DOMAIN = "<default domain>"
# Each range of a launch stands in quotes, between colons: domain, name, payload (two), colour (two), kind of message,
# and the message, which is the name again; so that a name with colons in it can be told.
_FIELDS_OF_RANGE = "Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
_RANGE = re.compile(r'"([^":]*):([^"]*)"')
_BETWEEN = 5  # fields from one name to the other


def _raw(path: Path, header: list[str], records: list[list[str]], units: dict[str, str]) -> Iterator[_Launch]:
    """Read the raw page: a column a metric, and a row of units before the launches."""
    wide = len(set(header))
    for width in {len(record) for record in records} - {wide}:
        problem = f"is damaged: a line has {width} fields, the header {wide}"
        raise TraceError(path, problem, f"{_AGAIN}, or {_EXPORT}")
    rows = [dict(zip(header, record, strict=True)) for record in records]
    launches = [row for row in rows if row["ID"]]
    written = next((row for row in rows if not row["ID"]), {})
    if launches and not written:
        raise TraceError(path, "has no row of units, so its numbers could mean anything", _EXPORT)
    names = [n for n in dict.fromkeys(header) if " " not in n and n not in _TEXTS and not n.startswith("Id:")]
    decimal = _decimal(path, (row[name] for row in launches for name in names))
    for row in launches:
        values: dict[str, Value] = {}
        for name in names:
            if (value := _value(row[name], decimal)) is not None:
                _put(values, units, name, value, written[name])
        yield _identity(row), values


def _details(path: Path, header: list[str], records: list[list[str]], units: dict[str, str]) -> Iterator[_Launch]:
    """Read the details page: a row a metric, and rows of rules that have none."""
    for name in {"Section Name", "Metric Unit", "Metric Value"}.difference(header):
        raise TraceError(path, f"has no column '{name}' (a summary page?)", _EXPORT)
    amount = header.index("Metric Value")
    if records and len(records[-1]) <= amount:
        raise TraceError(path, "is cut short: its last line is not whole", _AGAIN)
    # a section's table, such as that of NUMA affinity, stands between the rows, and its lines begin with numbers too
    rows = [row for row in (dict(zip(header, record, strict=False)) for record in records) if row.get("Section Name")]
    measured = [row for row in rows if row.get("Metric Name") and "Metric Value" in row]
    decimal = _decimal(path, (row["Metric Value"] for row in measured))
    launches: dict[str, _Launch] = {row["ID"]: (_identity(row), {}) for row in rows}
    for row in measured:
        values, value = launches[row["ID"]][1], _value(row["Metric Value"], decimal)
        name = _named(row["Section Name"], row["Metric Name"], row["Metric Unit"])
        if value is not None and name not in values:  # a metric may stand in several sections
            _put(values, units, name, value, row["Metric Unit"])
    yield from launches.values()


def _named(section: str, label: str, unit: str) -> str:
    labelled = _LABELLED.fullmatch(label)
    if labelled and _NVIDIAS.fullmatch(labelled[1]):
        return labelled[1]
    if re.fullmatch(r"[A-Za-z_][\w.:]*", label) and "_" in label:  # --print-metric-name name, or ncu --metrics
        return label
    metric = ncu_metrics.by_label(label, ncu_metrics.base_unit(unit)[0], section)
    return metric.nvidia[0] if metric else f"{section}: {label}"


def _identity(row: dict[str, str]) -> dict[str, Any]:
    around = next((cell for name, cell in row.items() if name.endswith(_FIELDS_OF_RANGE)), "")
    return {
        "id": int(row["ID"]),
        "kernel": row.get("Kernel Name") or "",
        **{ours: row.get(name) or None for name, ours in _NAMED.items() if ours != "kernel"},
        "ranges": tuple(_ranges(around)),
    }


def _ranges(cell: str) -> Iterator[str]:
    """Names of the ranges in a cell, each with its domain."""
    for domain, rest in _RANGE.findall(cell):
        parts = rest.split(":")
        width = (len(parts) - _BETWEEN) // 2  # of a name with colons in it
        name = ":".join(parts[:width])
        if width > 0 and name == ":".join(parts[width + _BETWEEN :]):
            yield _in_domain(domain, name)


_OTHER = {".": ",", ",": "."}
_GROUPED = re.compile(r"[+-]*[1-9]\d{0,2}[.,]\d{3}")  # may be a thousand and some, or one and some
_SPACES = str.maketrans("", "", " '\u00a0\u202f\u2019")


def _decimal(path: Path, cells: Iterator[str]) -> str:
    """Find out which sign is the decimal point: in some locales it is a comma, and the point parts thousands.

    One number alone can be both (1,234); all numbers of a file together rarely can. What stays open is read as
    ncu writes it without a locale: 1,234 is a thousand and some.
    """
    found: dict[str, str] = {}
    for cell in cells:
        sole = _INSTANCES.fullmatch(cell)
        text = (sole[1] if sole else cell).translate(_SPACES)
        signs = re.sub("[^.,]", "", text)
        if signs and _NUMBER.fullmatch(text) and not _GROUPED.fullmatch(text):
            repeated = len(signs) > 1 and len(set(signs)) == 1
            found.setdefault(_OTHER[signs[0]] if repeated else signs[-1], text)
    if len(found) > 1:
        both = f"{found['.']} and {found[',']}"
        raise TraceError(path, f"mixes two ways to write numbers ({both})", f"{_EXPORT}, in one locale")
    return next(iter(found), ".")


def _value(cell: str, decimal: str) -> Value | None:
    sole = _INSTANCES.fullmatch(cell)
    text = sole[1] if sole and _NUMBER.fullmatch(sole[1]) else cell.strip()
    if text.lower() in ("", "n/a", "nan", "-nan", "inf", "-inf", "no data"):
        return None
    if not _NUMBER.fullmatch(text):
        return text
    plain = text.translate(_SPACES).replace("," if decimal == "." else ".", "").replace(",", ".")
    try:
        return int(plain) if plain.lstrip("+-").isdigit() else float(plain)
    except ValueError:
        return text
