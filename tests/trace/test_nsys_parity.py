"""Figures equal those of `nsys stats`, to the nanosecond, on every real export that has the data."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
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


#: What nsys calls our columns; it prints one decimal.
STATISTICS = {
    "total_ns": "Total Time (ns)",
    "min_ns": "Min (ns)",
    "max_ns": "Max (ns)",
    "mean_ns": "Avg (ns)",
    "median_ns": "Med (ns)",
    "std_ns": "StdDev (ns)",
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
    command = [nsys, "stats", "--format", "csv", *wanted, copy]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=True)
    _, *parts = re.split(r"^Processing .*$", done.stdout.decode("utf-8", "replace"), flags=re.MULTILINE)
    return Real(nsightkit.load(copy, cache=False), dict(zip(REPORTS, parts, strict=True)))


def stats(real: Real, report: str, name: str) -> pd.DataFrame:
    """Rows of one report by name; none where nsys finds no such data, a skip where it cannot read the export."""
    said = real.printed[report]
    table = re.search(r"^(?=.*Total.*,)(?:.+\n)+", said, re.MULTILINE)
    if table:
        rows = pd.read_csv(io.StringIO(table[0]), keep_default_na=False)
        return rows.set_index(rows[name].str.lstrip(":"))
    absent = re.search(r"does not contain (\w+) table", said)
    if absent:
        pytest.skip(f"nsys cannot: the export lacks its table {absent[1]}")
    # Data of no row gives a report without even a header.
    assert "SKIPPED" in said or not said.strip(), said
    return pd.DataFrame()


def compare(ours: pd.DataFrame, theirs: pd.DataFrame, count: str = "Instances"):
    """Every row of both, with all its statistics."""
    assert sorted(ours["name"]) == sorted(theirs.index)
    theirs = theirs.reindex(ours["name"])
    for column, named in {"count": count, **STATISTICS}.items():
        if len(ours):
            np.testing.assert_allclose(
                ours[column], theirs[named].astype(float), rtol=1e-12, atol=0.051, err_msg=column
            )


def test_kernels(real: Real):
    compare(kernels.summary(real.trace), stats(real, "cuda_gpu_kern_sum", "Name"))


def test_memory_operations(real: Real):
    # nsys does not tell pageable from pinned memory, so its rows are by direction alone.
    events = real.trace.table("memops", ["kind", "duration_ns"])
    events["name"] = events["kind"].astype(object).map(COPIES).astype("category")
    compare(durations_by_name(events), stats(real, "cuda_gpu_mem_time_sum", "Operation"), "Count")


def test_cuda_calls(real: Real):
    theirs = stats(real, "cuda_api_sum", "Name")
    # nsys drops a version of four digits (`_v7000`) and keeps one of five (`_v10000`); we drop both.
    theirs.index = theirs.index.astype(str).str.replace(r"_v\d{4,}$", "", regex=True)
    ours = calls.summary(real.trace)
    if theirs.index.is_unique:
        compare(ours, theirs, "Num Calls")
        return
    # One export has two versions of a call; nsys gives them a row each under one name, we one row.
    sums = theirs.groupby(level=0)[["Num Calls", "Total Time (ns)"]].sum().loc[ours["name"]]
    assert len(sums) == len(ours)
    assert sums.to_numpy().tolist() == ours[["count", "total_ns"]].to_numpy().tolist()


def test_os_calls(real: Real):
    ours = calls.summary(real.trace, os=True)
    # Marks of no length ("OS runtime libraries profiling started") are not calls: nsys leaves them out.
    compare(ours[ours["max_ns"] > 0], stats(real, "osrt_sum", "Name"), "Num Calls")


def by_full_name(rows: pd.DataFrame) -> pd.DataFrame:
    """Ranges as nsys names them: without the default domain, and domains whose name was not recorded."""
    names = rows["domain"].astype(str) + ":" + rows["name"].astype(str)
    return rows.set_index(names.str.replace(r"^domain \d+:", "", regex=True).str.lstrip(":"))


def test_ranges(real: Real):
    theirs = stats(real, "nvtx_sum", "Range")
    ours = by_full_name(ranges.summary(real.trace, rule="thread"))
    # nvtx_sum also lists ranges that end on another thread, which the rule `thread` leaves out.
    crossing = real.trace.table("ranges", ["thread", "end_thread", "name", "domain"])
    elsewhere = by_full_name(crossing[crossing["thread"] != crossing["end_thread"]]).index
    names = ours.index.difference(elsewhere)
    assert set(names) == set(theirs.index) - set(elsewhere) - {""}
    if len(names):
        np.testing.assert_array_equal(
            ours.loc[names, ["count", "total_ns"]], theirs.loc[names, ["Instances", "Total Time (ns)"]]
        )
        np.testing.assert_allclose(ours.loc[names, "median_ns"], theirs.loc[names, "Med (ns)"], rtol=1e-12, atol=0.051)


def test_gpu_projection_of_ranges(real: Real):
    theirs = stats(real, "nvtx_gpu_proj_sum", "Range")
    ours = by_full_name(ranges.summary(real.trace, rule="thread"))
    ours = ours[ours["gpu_span_ns"] > 0]  # nsys lists only ranges that launched GPU work
    assert set(ours.index) == set(theirs.index)
    if len(ours):
        assert ours["gpu_span_ns"].tolist() == theirs.loc[ours.index, "Total Proj Time (ns)"].tolist()
