"""Nsight Compute: readers against NVIDIA's own, CSV in the wild, the metric table, the rule and its questions."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import math
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from child import command

import nsightkit
from nsightkit import cli
from nsightkit.analysis.roofline import counters as analysis
from nsightkit.errors import TraceError, UsageError
from nsightkit.trace import ncu, ncu_metrics

REPORTS = (
    "ESMM/profile_b.ncu-rep",
    "armleth/report.ncu-rep",
    "armleth/report_v4_8_per_thread.ncu-rep",
    "nsight-training/manual_nvtx.ncu-rep",
)
SOL = ".avg.pct_of_peak_sustained_elapsed"
HOSTILE = (
    "void k<(int)3>(float *, \"quoted\", 'single')",
    "<script>alert(1)</script>",
    "=cmd|' /C calc'!A0 \x1b[31mred\x1b[0m",
    '"ID","Process ID","Kernel Name"',
)


def actions(path: Path):
    """Everything in a report, through NVIDIA's own interface."""
    ncu_report = pytest.importorskip("ncu_report")
    return [action for one in ncu_report.load_report(str(path)) for action in one]


HEADER = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size",
          "Grid Size", "Device", "CC"]  # fmt: skip


def identity(number: int, kernel: str) -> list[str]:
    return [str(number), "77", "a.out", "127.0.0.1", kernel, "1", "7", "(256, 1, 1)", "(64, 2, 1)", "0", "9.0"]


def written(rows: list[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return out.getvalue()


def raw(values: dict[str, tuple[str, list[str]]], kernels: list[str]) -> str:
    """The raw page: units below the names, then a row a launch."""
    head = [HEADER + list(values), [""] * len(HEADER) + [unit for unit, _ in values.values()]]
    body = [identity(i, k) + [cells[i] for _, cells in values.values()] for i, k in enumerate(kernels)]
    return written(head + body)


# -- .ncu-rep ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPORTS)
def test_every_value_of_a_report_is_nvidias(shared_traces: Path, name: str):
    """In a new process: in one that has read another report, NVIDIA's package gives units of that one."""
    pytest.importorskip("ncu_report")
    program = "import runpy, sys; runpy.run_path(sys.argv[1])['compare_with_nvidia'](sys.argv[2])"
    compare = [sys.executable, "-c", program, __file__, str(shared_traces / name)]
    subprocess.run(compare, check=True, timeout=120, cwd=Path(__file__).parents[1])


def compare_with_nvidia(path: str):
    """Check a report as nsightkit reads it against NVIDIA's own interface."""
    truth = actions(Path(path))
    report = ncu.read(path)
    assert len(report.metrics) == len(report.launches) == len(truth)
    for place, action in enumerate(truth):
        found = report.metrics[place]
        for metric in (action.metric_by_name(n) for n in action.metric_names()):
            value = metric.value() if metric.has_value() else None
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                assert metric.name() not in found
            else:
                assert found[metric.name()] == value
                unit = metric.unit() if not isinstance(value, str) else ""
                assert report.units[metric.name()] == {"sectors": "sector"}.get(unit, unit)
        row = report.launches.iloc[place]
        assert row["kernel"] == action.name(action.NameBase_DEMANGLED)
        assert row["gpu"] == action["device__attribute_display_name"].value()


@pytest.mark.parametrize("name", REPORTS)
def test_the_classification_is_that_of_nvidias_own_rule_in_the_report(shared_traces: Path, name: str):
    rows = {row.kernel: row for row in analysis.summary(ncu.read(shared_traces / name)).itertuples()}
    for action in actions(shared_traces / name):
        row = rows[action.name(action.NameBase_DEMANGLED)]
        messages = {r["rule_identifier"]: r["rule_message"] for r in action.rule_results_as_dicts()}
        title = messages["SOLBottleneck"]["title"]
        text = messages["SOLBottleneck"]["message"]
        expected = {
            "High Throughput": "memory-bound" if "Memory Workload" in text else "compute-bound",
            "High Memory Throughput": "memory-bound",
            "High Compute Throughput": "compute-bound",
            "Balanced Throughput": "balanced",
            "Small Grid": "latency-bound",
            "Latency Issue": "latency-bound",
        }[title]
        assert row.classification == expected
        assert ("too small" in "".join(row.evidence)) == (title == "Small Grid")


def test_stall_shares_are_those_of_the_report(shared_traces: Path):
    report = ncu.read(shared_traces / REPORTS[2])
    (action,) = actions(shared_traces / REPORTS[2])
    found = analysis.stalls(report)
    assert found["share"].sum() == pytest.approx(1)
    latency = action["smsp__average_warp_latency_per_inst_issued.ratio"].value()
    for row in found.itertuples():
        value = action[f"smsp__average_warps_issue_stalled_{row.reason}_per_issue_active.ratio"].value()
        # all states together are the latency between two instructions: NVIDIA measures it separately
        assert row.share == pytest.approx(value / latency, rel=0.02, abs=1e-4)
    assert found.loc[0, ["reason", "source"]].tolist() == ["lg_throttle", "ratio"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"hello\n" * 100, "holds no launch"),
        (raw({}, []).encode(), "holds no launch"),
        (raw({}, ["a"]).replace('"","",', "", 1).encode(), "is damaged"),
        ("".join(raw({}, ["a"]).splitlines(keepends=True)[::2]).encode(), "no row of units"),
        (written([[*HEADER, "Metric Name"], [*identity(0, "k"), "x"]]).encode(), "--page=raw"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, words: str
):
    path = tmp_path / "x.csv"
    path.write_bytes(data)
    assert cli.run(["ncu", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.ncu-rep"
    path.write_bytes(b"NVR\0" + bytes(4))
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    with pytest.raises(TraceError, match=re.escape("pip install 'nsightkit[ncu]'")):
        ncu.read(path)
    with pytest.raises(TraceError, match="nsightkit ncu"):
        nsightkit.load(path)


# -- writing -----------------------------------------------------------------------------------------------------


def same(one: ncu.Report, other: ncu.Report):
    pd.testing.assert_frame_equal(one.launches, other.launches)
    assert one.metrics == other.metrics
    assert one.units == other.units


@pytest.mark.parametrize("name", REPORTS)
def test_what_is_written_is_read_again_to_the_last_digit(shared_traces: Path, tmp_path: Path, name: str):
    pytest.importorskip("ncu_report")
    report = ncu.read(shared_traces / name)
    path = ncu.write(report, tmp_path / "x.csv")
    again = ncu.read(path)
    same(dataclasses.replace(report, path=str(path)), again)
    pd.testing.assert_frame_equal(analysis.summary(report), analysis.summary(again))
    # Nothing of the machine: a raw page of ncu's own has columns of the process and its host.
    head = next(csv.reader(io.StringIO(path.read_text())))
    assert not {"Process ID", "Process Name", "Host Name", "Context"} & set(head)
    assert [p.name for p in tmp_path.iterdir()] == ["x.csv"]


@pytest.mark.parametrize("kernel", HOSTILE)
def test_hostile_names_survive_writing(tmp_path: Path, kernel: str):
    ranges = ("step", "a:b: c", "lib@inner", kernel.replace('"', "'"))
    identity = {"kernel": kernel, "stream": "7", "grid": "(1, 1, 1)", "ranges": ranges}
    metrics: dict[str, ncu.Value] = {
        "gpu__time_duration.sum": 1234, f"sm__throughput{SOL}": 1.234, "launch__waves_per_multiprocessor": 1e-7,
        "device__attribute_display_name": kernel, "breakdown:x": "a,b", "launch__grid_size": 123456789,
    }  # fmt: skip
    units = {"gpu__time_duration.sum": "ns", f"sm__throughput{SOL}": "%"} | dict.fromkeys(list(metrics)[2:], "")
    report = ncu.from_metrics("planted", [identity, {"kernel": "other"}], [metrics, {}], units)
    again = ncu.read(ncu.write(report, tmp_path / "x.csv"))
    same(report, again)
    assert again.launches.loc[0, "ranges"] == ranges


# -- CSV ---------------------------------------------------------------------------------------------------------

RAW = {
    "gpu__time_duration.sum": ("usecond", ["431.84", "1,234.50"]),
    f"sm__throughput{SOL}": ("%", ["64.86", "12.04"]),
    f"gpu__compute_memory_throughput{SOL}": ("%", ["64.86", "90.72"]),
    "dram__bytes_read.sum": ("Mbyte", ["9.61", "4,000"]),
    "dram__cycles_elapsed.avg.per_second": ("cycle/nsecond", ["6.23", "6.68"]),
    "launch__grid_size": ("", ["256", "16,384"]),
    "breakdown:x": ("", ["a__b.avg,c__d.avg", "a__b.avg"]),
    "launch__func_cache_config": ("", ["CachePreferNone", ""]),
}
CHATTER = "epoch 1, loss 0.3\n==PROF== Connected to process 77 (/home/x)\n"
BETWEEN = '==PROF== Profiling "k" - 1: 0%....50%....100% - 8 passes\n1,2,3 printed by the program\n"quoted" by it\n'


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("kernel", HOSTILE)
def test_a_page_is_read_whatever_kernels_are_called(tmp_path: Path, kernel: str, around: bool):
    lines = raw(RAW, [kernel, "other"]).splitlines(keepends=True)
    if around:
        lines = [CHATTER, *lines[:3], BETWEEN, *lines[3:], "==PROF== Disconnected from process 77\n"]
    report = read_text(tmp_path / "x.csv", "".join(lines))
    first, second = report.launches.to_dict("records")
    expected = {"kernel": kernel, "grid": "(64, 2, 1)", "block": "(256, 1, 1)", "stream": "7", "sm_pct": 64.86}
    assert first.items() >= expected.items()
    assert first["compute_capability"] == "9.0"
    assert first["time_ns"] == pytest.approx(431_840)
    assert second["time_ns"] == pytest.approx(1_234_500)
    assert second["dram_clock_hz"] == pytest.approx(6.68e9)
    assert second["dram_read_bytes"] == pytest.approx(4e9)
    assert second["grid_blocks"] == 16384
    assert report.units["dram__bytes_read.sum"] == "byte"
    assert report.metrics[0]["breakdown:x"] == "a__b.avg,c__d.avg"
    assert "launch__func_cache_config" not in report.metrics[1]


@pytest.mark.parametrize("cell", ["431,84", "1.234,5", "1.234.567,89", "1\u202f234,50", "-0,123456"])
def test_a_page_with_decimal_commas_is_refused(tmp_path: Path, cell: str):
    page = raw(RAW | {"gpu__time_duration.sum": ("usecond", ["1.234", cell])}, ["k", "k"])
    with pytest.raises(TraceError, match=r"decimal comma .*LC_ALL=C ncu"):
        read_text(tmp_path / "x.csv", page)


def read_text(path: Path, text: str) -> ncu.Report:
    path.write_text(text)
    return ncu.read(path)


def test_a_page_that_is_cut_anywhere_never_passes_for_the_whole(tmp_path: Path):
    path = tmp_path / "x.csv"
    page = raw(RAW, ["a", "b"])
    whole = read_text(path, page)
    for keep in range(0, len(page) - 1, 29):
        try:
            part = read_text(path, page[:keep])
        except TraceError:
            continue
        # Cut exactly between lines: fewer launches or metrics, but none that is wrong.
        for ours, theirs in zip(part.metrics, whole.metrics, strict=False):
            assert ours.items() <= theirs.items()


@pytest.mark.parametrize(
    ("unit", "base", "factor"),
    [
        ("usecond", "ns", 1e3), ("ms", "ns", 1e6), ("second", "ns", 1e9), ("Kbyte", "byte", 1e3), ("byte", "byte", 1),
        ("Gbyte/second", "byte/s", 1e9), ("Tbyte/s", "byte/s", 1e12), ("cycle/usecond", "hz", 1e6), ("Ghz", "hz", 1e9),
        ("Kbyte/block", "byte/block", 1e3), ("sector/msecond", "sector/s", 1e3), ("%", "%", 1), ("", "", 1),
        ("inst/cycle", "inst/cycle", 1), ("warp", "warp", 1), ("made up", "made up", 1),
    ],
)  # fmt: skip
def test_units_come_down_to_their_base(unit: str, base: str, factor: float):
    assert ncu_metrics.base_unit(unit) == (base, factor)


@pytest.mark.parametrize(("name", "units"), [(REPORTS[0], "auto"), (REPORTS[3], "base")])
def test_csv_that_a_real_ncu_exports_gives_the_same_table(
    shared_traces: Path, real_ncu: Path, tmp_path: Path, name: str, units: str
):
    pytest.importorskip("ncu_report")
    truth = ncu.read(shared_traces / name)
    export = [real_ncu, "--import", shared_traces / name, "--csv", "--page=raw", "--print-units", units]
    page = subprocess.run(export, capture_output=True, text=True, timeout=120, check=True).stdout
    found = read_text(tmp_path / "x.csv", page)
    for same in ("kernel", "grid", "block", "device", "stream", "compute_capability"):
        assert found.launches[same].tolist() == truth.launches[same].tolist()
    for metric in ncu_metrics.METRICS:  # a page rounds to two decimals, of the unit it chose
        expected = truth.launches[metric.name]
        np.testing.assert_allclose(found.launches[metric.name], expected, rtol=6e-3, atol=6e-3, err_msg=metric.name)
    classes = analysis.summary(truth)["classification"].tolist()
    assert analysis.summary(found)["classification"].tolist() == classes


# -- the metric table --------------------------------------------------------------------------------------------


def test_every_name_exists_on_the_chips_it_is_said_to(real_ncu: Path):
    export = [real_ncu, "--query-metrics", "--chips", ",".join(ncu_metrics.CHIPS)]
    out = subprocess.run(export, capture_output=True, text=True, timeout=120, check=True).stdout
    exist: dict[str, set[str]] = defaultdict(set)
    chip = ""
    for line in out.splitlines():
        chip = line.split()[1] if line.startswith("Chip ") else chip
        if "__" in line:
            exist[line.split()[0]].add(chip)
    assert len(exist) > 1000
    for metric in ncu_metrics.METRICS:
        if metric.listed:
            assert exist[metric.nvidia[0].partition(".")[0]] == set(metric.chips), metric.name
            for other in metric.nvidia[1:]:
                assert exist[other.partition(".")[0]], other


# -- the rule and its questions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sm", "memory", "expected"),
    [
        (80, 80, "compute-bound"), (85, 90, "memory-bound"), (80, 79.9, "compute-bound"), (79.9, 80, "memory-bound"),
        (59.99, 59.99, "latency-bound"), (60, 59.99, "balanced"), (60, 50, "compute-bound"), (50, 60, "memory-bound"),
        (60, 50.01, "balanced"), (69.9, 79.9, "memory-bound"), (math.nan, 90, "not-enough-data"),
    ],
)  # fmt: skip
def test_nvidias_rule_at_its_borders(sm: float, memory: float, expected: str):
    assert analysis.classify(sm, memory) == expected


def test_launches_are_chosen_by_their_names_and_the_ranges_around_them(shared_traces: Path):
    report = ncu.read(shared_traces / REPORTS[3])
    assert analysis.summary(report)["time_ns"].is_monotonic_decreasing
    daxpy = [report.launches.loc[1, "kernel"]]
    assert analysis.summary(report, kernel="^daxpy")["kernel"].tolist() == daxpy
    assert analysis.summary(report, within="^daxpy$")["kernel"].tolist() == daxpy
    assert len(analysis.summary(report, within="run_test")) == 3
    assert set(analysis.stalls(report, within="_data$")["id"]) == {0}
    assert analysis.summary(report, kernel="nothing", within="^daxpy$").empty
    with pytest.raises(UsageError, match="there are check_results, daxpy, init_data, run_test"):
        analysis.summary(report, within="absent")
    with pytest.raises(UsageError, match="run ncu with --nvtx"):
        analysis.stalls(ncu.from_metrics("planted", [{"kernel": "k"}], [{}], {}), within="any")


# -- whatever NVIDIA's package does ---------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Take the place of NVIDIA's package, and give a report for it to read."""

    def make(body: str) -> Path:
        folder = tmp_path / "packages"
        folder.mkdir(exist_ok=True)
        (folder / "ncu_report.py").write_text(f"import os, sys, time\ndef load_report(path):\n    {body}\n")
        monkeypatch.delitem(sys.modules, "ncu_report", raising=False)
        monkeypatch.syspath_prepend(folder)
        importlib.invalidate_caches()
        report = tmp_path / "x.ncu-rep"
        report.write_bytes(b"NVR\0\0\0\0\0")
        return report

    return make


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("os.abort()", r"makes NVIDIA's reader fail.* \(ChildProcessError: SIGABRT\)"),
        ("os._exit(7)", r"fail.* \(ChildProcessError: exit code 7\)"),
        ("raise RuntimeError('no\\nreport')", r"is not a report that ncu-report can read \(RuntimeError: no report\)"),
        ("sys.stdout.write('[')", "makes NVIDIA's reader fail.*Error"),
        ("time.sleep(60)", "not done within 2 s"),
        ("return []", "holds no profiled kernel, or is damaged"),
        ("x = []\n    while True: x.append(bytearray(1 << 26))", "MemoryError|ChildProcessError"),
    ],
)
def test_whatever_nvidias_package_does_is_one_line(
    stand_in: Callable[[str], Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    words: str,
):
    report = stand_in(body)
    if "sleep" in body:
        monkeypatch.setattr(ncu, "SECONDS", 1)
    assert cli.run(["ncu", str(report)]) == 2
    out, said = capfd.readouterr()
    assert re.fullmatch(rf"nsightkit: {re.escape(str(report))}: .*({words}).*\n", said), said
    assert out == ""


def test_a_report_that_makes_nvidias_reader_abort_is_one_line(shared_traces: Path, tmp_path: Path):
    pytest.importorskip("ncu_report")
    data = bytearray((shared_traces / REPORTS[3]).read_bytes())
    data[75_760] ^= 1 << 3  # this bit makes the size of a message negative
    path = tmp_path / "flipped.ncu-rep"
    path.write_bytes(data)
    ended = command("ncu", path)
    assert ended.code == 2, ended.error
    assert re.fullmatch(rf"nsightkit: {re.escape(str(path))}: .*\(ChildProcessError: SIGABRT\).*; .*\n", ended.error), (
        ended.error
    )


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_page_in_utf_16_is_read(tmp_path, encoding):
    """PowerShell's > writes such files."""
    page = tmp_path / "raw.csv"
    page.write_text("\ufeff" + raw({}, ["a"]), encoding)
    assert ncu.read(page).launches["kernel"].tolist() == ["a"]
