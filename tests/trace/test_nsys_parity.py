"""Figures equal those of `nsys stats`, to the nanosecond, on every real export that has the data."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

import nsightkit
from nsightkit.analysis.core.grouped import durations_by_name
from nsightkit.analysis.timeline import calls, kernels, ranges
from nsightkit.trace import Trace

pytestmark = pytest.mark.nsys

EXPORTS = [
    "EfficientCenterFormer/baseline_v2.sqlite",
    "StellaWava/report1.sqlite",
    "cs336-zx3xyy/result_2_7B_compile_ro.sqlite",
    "cs336-zx3xyy/result_2_7B_nvtx.sqlite",
    "cuda-perf-sandbox/report1.sqlite",
    "memfusion/report1.sqlite",
    "nsys-ai/mfu_2gpu_before.sqlite",
    "nvFuser/report1_c.sqlite",
    "pipit/saxpy-mpi-cuda_nsys_perlmutter0.sqlite",
    "tutorial_vqe/report1.sqlite",
]
COPIES = {
    "HtoD": "[CUDA memcpy Host-to-Device]",
    "DtoH": "[CUDA memcpy Device-to-Host]",
    "DtoD": "[CUDA memcpy Device-to-Device]",
    "HtoH": "[CUDA memcpy Host-to-Host]",
    "PtoP": "[CUDA memcpy Peer-to-Peer]",
    "memset": "[CUDA memset]",
}


def stats(nsys: Path, export: Path, report: str) -> list[dict[str, str]]:
    """Rows of one report; none where nsys finds no such data, a skip where it cannot read the export."""
    command = [nsys, "stats", "--format", "csv", "--report", report, export]
    done = subprocess.run(command, capture_output=True, timeout=300, check=True)
    lines = done.stdout.decode("utf-8", "replace").splitlines(keepends=True)
    head = next((i for i, line in enumerate(lines) if "Total" in line and "," in line), None)
    if head is None:
        said = "".join(lines) + done.stderr.decode("utf-8", "replace")
        absent = re.search(r"does not contain (\w+) table", said)
        if absent:
            pytest.skip(f"nsys cannot: the export lacks its table {absent[1]}")
        # Data of no row gives a report without even a header.
        assert "SKIPPED" in said or all(not x.strip() or x.startswith("Processing") for x in lines), said
        return []
    rows = "".join(lines[head:]).split("\n\n")[0]
    return list(csv.DictReader(io.StringIO(rows)))


@pytest.fixture(params=EXPORTS)
def export(request: pytest.FixtureRequest, shared_traces: Path, tmp_path: Path) -> tuple[str, Path]:
    """A copy: nsys writes beside what it reads."""
    copy = tmp_path / "export.sqlite"
    shutil.copyfile(shared_traces / request.param, copy)
    return request.param, copy


@pytest.fixture
def trace(export: tuple[str, Path]) -> Trace:
    return nsightkit.load(export[1], cache=False)


def compare(ours: pd.DataFrame, theirs: list[dict[str, str]], name: str = "Name", count: str = "Instances") -> None:
    """Every row of both, with all its statistics."""
    mine = {row["name"]: row for row in ours.to_dict("records")}
    assert set(mine) == {row[name] for row in theirs}
    assert len(mine) == len(theirs)
    for row in theirs:
        got = mine[row[name]]
        assert got["count"] == int(row[count]), row
        assert got["total_ns"] == int(row["Total Time (ns)"]), row
        assert got["min_ns"] == int(row["Min (ns)"]), row
        assert got["max_ns"] == int(row["Max (ns)"]), row
        for column, key in (("mean_ns", "Avg (ns)"), ("median_ns", "Med (ns)"), ("std_ns", "StdDev (ns)")):
            # nsys prints one decimal
            assert got[column] == pytest.approx(float(row[key]), abs=0.051, rel=1e-12), row


def test_kernels(nsys: Path, export: tuple[str, Path], trace: Trace) -> None:
    compare(kernels.summary(trace), stats(nsys, export[1], "cuda_gpu_kern_sum"))


def test_memory_operations(nsys: Path, export: tuple[str, Path], trace: Trace) -> None:
    # nsys does not tell pageable from pinned memory, so its rows are by direction alone.
    events = trace.table("memops", ["kind", "duration_ns"])
    events["name"] = events["kind"].astype(object).map(COPIES).astype("category")
    compare(durations_by_name(events), stats(nsys, export[1], "cuda_gpu_mem_time_sum"), "Operation", "Count")


def test_cuda_calls(nsys: Path, export: tuple[str, Path], trace: Trace) -> None:
    theirs = stats(nsys, export[1], "cuda_api_sum")
    for row in theirs:
        # nsys drops a version of four digits (`_v7000`) and keeps one of five (`_v10000`); we drop both.
        row["Name"] = re.sub(r"_v\d{4,}$", "", row["Name"])
    names = [row["Name"] for row in theirs]
    if len(set(names)) == len(names):
        compare(calls.summary(trace), theirs, count="Num Calls")
        return
    # One export has two versions of a call; nsys gives them a row each under one name, we one row.
    ours = calls.summary(trace).set_index("name")
    assert set(ours.index) == set(names)
    for name in ours.index:
        same = [row for row in theirs if row["Name"] == name]
        assert ours["count"][name] == sum(int(row["Num Calls"]) for row in same)
        assert ours["total_ns"][name] == sum(int(row["Total Time (ns)"]) for row in same)


def test_os_calls(nsys: Path, export: tuple[str, Path], trace: Trace) -> None:
    ours = calls.summary(trace, os=True)
    # Marks of no length ("OS runtime libraries profiling started") are not calls: nsys leaves them out.
    compare(ours[ours["max_ns"] > 0], stats(nsys, export[1], "osrt_sum"), count="Num Calls")


def _full_name(row: dict[str, str]) -> str:
    """As nsys writes it: it leaves out the default domain, and domains whose name was not recorded."""
    return re.sub(r"^domain \d+:", "", f"{row['domain']}:{row['name']}").lstrip(":")


def test_ranges(nsys: Path, export: tuple[str, Path], trace: Trace) -> None:
    theirs = {r["Range"].lstrip(":"): r for r in stats(nsys, export[1], "nvtx_sum")}
    ours = {_full_name(row): row for row in ranges.summary(trace, rule="thread").to_dict("records")}
    # nvtx_sum also lists ranges that end on another thread, which the rule `thread` leaves out.
    crossing = trace.table("ranges", ["thread", "end_thread", "name", "domain"])
    crossing = crossing[crossing["thread"] != crossing["end_thread"]]
    elsewhere = {_full_name(row) for row in crossing.to_dict("records")}
    assert set(ours) - elsewhere == set(theirs) - elsewhere - {""}
    for name in set(ours) - elsewhere:
        assert ours[name]["count"] == int(theirs[name]["Instances"]), name
        assert ours[name]["total_ns"] == int(theirs[name]["Total Time (ns)"]), name
        assert ours[name]["median_ns"] == pytest.approx(float(theirs[name]["Med (ns)"]), abs=0.051), name


def test_gpu_projection_of_ranges(nsys: Path, export: tuple[str, Path], trace: Trace) -> None:
    report = "nvtx_gpu_proj_sum"
    theirs = {r["Range"].lstrip(":"): r for r in stats(nsys, export[1], report)}
    found = ranges.summary(trace, rule="thread")
    # nsys lists only ranges that launched GPU work.
    ours = {_full_name(row): row for row in found.to_dict("records") if row["gpu_span_ns"]}
    assert set(ours) == set(theirs)
    for name, row in theirs.items():
        assert ours[name]["gpu_span_ns"] == int(row["Total Proj Time (ns)"]), name
