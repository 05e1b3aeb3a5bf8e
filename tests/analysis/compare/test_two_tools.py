"""One program seen by two tools: the figures side by side, against a known truth."""

from __future__ import annotations

import make_kineto
import numpy as np
import pandas as pd
import pytest
from synthetic import planted

import nsightkit
from nsightkit.analysis.compare import two_tools
from nsightkit.errors import UsageError
from nsightkit.trace.model import TABLES, Trace, TraceMeta

STEPS = 5
Pair = tuple[dict[str, Trace], dict]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One synthetic loop as Kineto's JSON and as an SQLite export, and what is true of it."""
    folder = tmp_path_factory.mktemp("loop")
    truth = planted.training(folder / "loop.sqlite", "sync", steps=STEPS)
    by_nsys = nsightkit.load(folder / "loop.sqlite")
    by_kineto = make_kineto.from_trace(folder / "loop.json.gz", by_nsys)
    return {"kineto": nsightkit.load(by_kineto), "nsys": by_nsys}, truth


@pytest.fixture(scope="module")
def table(pair: Pair) -> pd.DataFrame:
    return two_tools.compare(pair[0])


def frames(trace: Trace) -> dict[str, pd.DataFrame]:
    return {table: trace.table(table).copy() for table in TABLES}


def figure(table: pd.DataFrame, *key: str) -> pd.Series:
    (row,) = table[(table[["group", "name", "figure"]] == list(key)).all(axis=1)].to_dict("records")
    return pd.Series(row)


def test_one_program_in_both_forms_agrees_to_the_nanosecond(pair: Pair, table: pd.DataFrame) -> None:
    _, truth = pair
    assert list(table) == ["group", "name", "figure", "clock", "kineto", "nsys", "difference"]
    assert (table["difference"] == 0).all()
    assert (table["kineto"] == table["nsys"]).all()
    for name in ("busy_ns", "span_ns", "idle_ns"):
        assert figure(table, "step", "step", name)["nsys"] * STEPS == pytest.approx(truth[name])
    for name, planted_ones in (("kernel_count", "kernels"), ("memop_count", "copies")):
        count = sum(number for number, _ in truth[planted_ones].values())
        assert figure(table, "step", "step", name)["nsys"] * STEPS == count
    on_gpu = table[table["figure"] == "gpu_ns"].groupby("group")["nsys"].sum() * STEPS
    assert on_gpu["phase"] == pytest.approx(truth["busy_ns"])
    assert on_gpu["category"] == pytest.approx(sum(total for _, total in truth["kernels"].values()))
    for name in ("forward", "backward"):
        assert figure(table, "phase", name, "cpu_ns")["nsys"] * STEPS == pytest.approx(truth["ranges"][name][1])
    assert set(table.loc[table["clock"] == "CPU", "figure"]) == {"wall_ns", "cpu_ns"}


def test_a_slower_cpu_shows_in_the_columns_of_the_cpu_alone(pair: Pair) -> None:
    traces, _ = pair
    slowed = frames(traces["kineto"])
    for table in ("ranges", "calls"):  # everything the CPU did, twice as slowly
        slowed[table][["start_ns", "end_ns"]] *= 2
    table = two_tools.compare({"nsys": traces["nsys"], "slow": Trace.from_frames(slowed, TraceMeta(tool="planted"))})
    on_cpu = table["clock"] == "CPU"
    assert table.loc[on_cpu, "difference"].to_numpy() == pytest.approx(1.0)
    assert (table.loc[~on_cpu, "difference"] == 0).all()


def test_what_ran_outside_of_the_steps_does_not_count(pair: Pair) -> None:
    traces, _ = pair
    more = frames(traces["nsys"])
    calls, kernels = more["calls"], more["kernels"]
    before = calls.iloc[[0]].assign(start_ns=-5_000, end_ns=-4_000, correlation=7)
    more["calls"] = pd.concat([calls, before], ignore_index=True)
    early = kernels.iloc[[0]].assign(start_ns=-3_000, end_ns=-2_000, correlation=7)
    more["kernels"] = pd.concat([kernels, early], ignore_index=True)
    table = two_tools.compare({"nsys": traces["nsys"], "more": Trace.from_frames(more, TraceMeta(tool="planted"))})
    assert (table["difference"] == 0).all()


def test_what_one_tool_did_not_record_is_no_number(pair: Pair) -> None:
    traces, _ = pair
    cpu = {table: frame for table, frame in frames(traces["nsys"]).items() if table == "ranges"}
    meta = TraceMeta(tool="planted", missing=["kernels", "memops", "graphs", "calls", "syncs"])
    ranges_only = Trace.from_frames(cpu, meta)
    table = two_tools.compare({"kineto": traces["kineto"], "ranges": ranges_only})
    on_gpu = table["clock"] != "CPU"
    assert table.loc[on_gpu, "ranges"].isna().all()
    assert table.loc[on_gpu, "difference"].isna().all()
    assert table.loc[on_gpu, "kineto"].notna().all()
    assert (table.loc[~on_gpu, "difference"] == 0).all()
    both = two_tools.compare({"one": ranges_only, "other": ranges_only})
    assert set(both["clock"]) == {"CPU"}  # a figure that neither has is not a row


def test_a_kind_of_kernel_that_one_lacks_took_no_time_there(pair: Pair) -> None:
    traces, _ = pair
    fewer = frames(traces["nsys"])
    fewer["kernels"] = fewer["kernels"][~fewer["kernels"]["name"].str.contains("layer_norm")]
    without = Trace.from_frames(fewer, TraceMeta(tool="planted"))
    row = figure(two_tools.compare({"nsys": traces["nsys"], "fewer": without}), "category", "normalization", "gpu_ns")
    assert (row["nsys"] > 0, row["fewer"], row["difference"]) == (True, 0, -1)
    turned = two_tools.compare({"fewer": without, "nsys": traces["nsys"]})
    assert np.isnan(figure(turned, "category", "normalization", "gpu_ns")["difference"])


def test_categories_can_be_few_and_traces_need_steps(pair: Pair, table: pd.DataFrame) -> None:
    top = two_tools.compare(pair[0], top=2)
    assert top.loc[top["group"] == "category", "name"].unique().tolist() == ["GEMM", "elementwise"]
    assert len(top[top["group"] != "category"]) == len(table[table["group"] != "category"])
    with pytest.raises(UsageError, match="empty: the trace has no steps"):
        two_tools.compare({"nsys": pair[0]["nsys"], "empty": Trace.from_frames({}, TraceMeta())})
