"""Figures equal those of `nsys stats`, to the nanosecond, on every real export that has the data."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

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
REPORTS = [
    "cuda_gpu_kern_sum",
    "cuda_gpu_mem_time_sum",
    "cuda_api_sum",
    "osrt_sum",
    "nvtx_sum",
    "nvtx_gpu_proj_sum",
]
COPIES = {
    "HtoD": "[CUDA memcpy Host-to-Device]",
    "DtoH": "[CUDA memcpy Device-to-Host]",
    "DtoD": "[CUDA memcpy Device-to-Device]",
    "HtoH": "[CUDA memcpy Host-to-Host]",
    "PtoP": "[CUDA memcpy Peer-to-Peer]",
    "memset": "[CUDA memset]",
}


class Real(NamedTuple):
    """A real export as nsightkit has it, and the part that each report has in what `nsys stats` prints of it."""

    trace: Trace
    printed: dict[str, str]


@pytest.fixture(params=EXPORTS, scope="module")
def real(
    request: pytest.FixtureRequest, nsys: Path, shared_traces: Path, tmp_path_factory: pytest.TempPathFactory
) -> Real:
    # A copy: nsys writes beside what it reads.
    copy = tmp_path_factory.mktemp("parity") / "export.sqlite"
    shutil.copyfile(shared_traces / request.param, copy)
    wanted = [word for report in REPORTS for word in ("--report", report)]
    done = subprocess.run(
        [nsys, "stats", "--format", "csv", *wanted, copy],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=True,
    )
    _, *parts = re.split(r"^Processing .*$", done.stdout.decode("utf-8", "replace"), flags=re.MULTILINE)
    return Real(nsightkit.load(copy, cache=False), dict(zip(REPORTS, parts, strict=True)))


def stats(real: Real, report: str) -> list[dict[str, str]]:
    """Rows of one report; none where nsys finds no such data, a skip where it cannot read the export."""
    said = real.printed[report]
    lines = said.splitlines(keepends=True)
    head = next((i for i, line in enumerate(lines) if "Total" in line and "," in line), None)
    if head is None:
        absent = re.search(r"does not contain (\w+) table", said)
        if absent:
            pytest.skip(f"nsys cannot: the export lacks its table {absent[1]}")
        # Data of no row gives a report without even a header.
        assert "SKIPPED" in said or not said.strip(), said
        return []
    rows = "".join(lines[head:]).split("\n\n")[0]
    return list(csv.DictReader(io.StringIO(rows)))


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


def test_kernels(real: Real) -> None:
    compare(kernels.summary(real.trace), stats(real, "cuda_gpu_kern_sum"))


def test_memory_operations(real: Real) -> None:
    # nsys does not tell pageable from pinned memory, so its rows are by direction alone.
    events = real.trace.table("memops", ["kind", "duration_ns"])
    events["name"] = events["kind"].astype(object).map(COPIES).astype("category")
    compare(durations_by_name(events), stats(real, "cuda_gpu_mem_time_sum"), "Operation", "Count")


def test_cuda_calls(real: Real) -> None:
    theirs = stats(real, "cuda_api_sum")
    for row in theirs:
        # nsys drops a version of four digits (`_v7000`) and keeps one of five (`_v10000`); we drop both.
        row["Name"] = re.sub(r"_v\d{4,}$", "", row["Name"])
    names = [row["Name"] for row in theirs]
    if len(set(names)) == len(names):
        compare(calls.summary(real.trace), theirs, count="Num Calls")
        return
    # One export has two versions of a call; nsys gives them a row each under one name, we one row.
    ours = calls.summary(real.trace).set_index("name")
    assert set(ours.index) == set(names)
    for name in ours.index:
        same = [row for row in theirs if row["Name"] == name]
        assert ours["count"][name] == sum(int(row["Num Calls"]) for row in same)
        assert ours["total_ns"][name] == sum(int(row["Total Time (ns)"]) for row in same)


def test_os_calls(real: Real) -> None:
    ours = calls.summary(real.trace, os=True)
    # Marks of no length ("OS runtime libraries profiling started") are not calls: nsys leaves them out.
    compare(ours[ours["max_ns"] > 0], stats(real, "osrt_sum"), count="Num Calls")


def _full_name(row: dict[str, str]) -> str:
    """As nsys writes it: it leaves out the default domain, and domains whose name was not recorded."""
    return re.sub(r"^domain \d+:", "", f"{row['domain']}:{row['name']}").lstrip(":")


def test_ranges(real: Real) -> None:
    theirs = {r["Range"].lstrip(":"): r for r in stats(real, "nvtx_sum")}
    ours = {_full_name(row): row for row in ranges.summary(real.trace, rule="thread").to_dict("records")}
    # nvtx_sum also lists ranges that end on another thread, which the rule `thread` leaves out.
    crossing = real.trace.table("ranges", ["thread", "end_thread", "name", "domain"])
    crossing = crossing[crossing["thread"] != crossing["end_thread"]]
    elsewhere = {_full_name(row) for row in crossing.to_dict("records")}
    assert set(ours) - elsewhere == set(theirs) - elsewhere - {""}
    for name in set(ours) - elsewhere:
        assert ours[name]["count"] == int(theirs[name]["Instances"]), name
        assert ours[name]["total_ns"] == int(theirs[name]["Total Time (ns)"]), name
        assert ours[name]["median_ns"] == pytest.approx(float(theirs[name]["Med (ns)"]), abs=0.051), name


def test_gpu_projection_of_ranges(real: Real) -> None:
    report = "nvtx_gpu_proj_sum"
    theirs = {r["Range"].lstrip(":"): r for r in stats(real, report)}
    found = ranges.summary(real.trace, rule="thread")
    # nsys lists only ranges that launched GPU work.
    ours = {_full_name(row): row for row in found.to_dict("records") if row["gpu_span_ns"]}
    assert set(ours) == set(theirs)
    for name, row in theirs.items():
        assert ours[name]["gpu_span_ns"] == int(row["Total Proj Time (ns)"]), name
