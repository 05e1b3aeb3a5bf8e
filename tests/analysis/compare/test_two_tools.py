"""One program seen by two tools: the figures side by side, against what was planted."""

from __future__ import annotations

from pathlib import Path

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
    """One planted loop as Kineto's JSON and as an SQLite export, and what is true of it."""
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
    traces, truth = pair
    assert list(table) == ["group", "name", "figure", "clock", "kineto", "nsys", "difference"]
    assert (table["difference"] == 0).all()
    assert (table["kineto"] == table["nsys"]).all()
    for tool in traces:
        whole = {name: figure(table, "step", "step", name)[tool] * STEPS for name in ("busy_ns", "span_ns", "idle_ns")}
        assert whole == pytest.approx({name: truth[name] for name in whole})
        assert figure(table, "step", "step", "kernel_count")[tool] * STEPS == sum(
            n for n, _ in truth["kernels"].values()
        )
        assert figure(table, "step", "step", "memop_count")[tool] * STEPS == sum(n for n, _ in truth["copies"].values())
        phases = table[table["group"] == "phase"]
        assert phases.loc[phases["figure"] == "gpu_ns", tool].sum() * STEPS == pytest.approx(truth["busy_ns"])
        for name, (_, total) in truth["ranges"].items():
            if name != "step":
                assert figure(table, "phase", name, "cpu_ns")[tool] * STEPS == pytest.approx(total)
        kinds = table[(table["group"] == "category") & (table["figure"] == "gpu_ns")]
        assert kinds[tool].sum() * STEPS == pytest.approx(sum(ns for _, ns in truth["kernels"].values()))
    assert set(table.loc[table["clock"] == "CPU", "figure"]) == {"wall_ns", "cpu_ns"}
    assert set(table.loc[table["clock"] == "both", "figure"]) == {"span_ns", "idle_ns"}


def test_a_slower_cpu_shows_in_the_columns_of_the_cpu_alone(pair: Pair) -> None:
    traces, _ = pair
    slowed = frames(traces["kineto"])
    for table in ("ranges", "calls"):  # everything the CPU did, twice as slowly
        slowed[table][["start_ns", "end_ns"]] *= 2
    table = two_tools.compare({"nsys": traces["nsys"], "slow": Trace.from_frames(slowed, TraceMeta(tool="planted"))})
    on_cpu = table["clock"] == "CPU"
    assert table.loc[on_cpu, "difference"].to_numpy() == pytest.approx(1.0)
    assert (table.loc[~on_cpu, "difference"] == 0).all()


def test_captures_of_different_length_compare(pair: Pair, tmp_path: Path) -> None:
    traces, _ = pair
    planted.training(tmp_path / "longer.sqlite", "sync", steps=3 * STEPS)
    table = two_tools.compare({"five": traces["nsys"], "fifteen": nsightkit.load(tmp_path / "longer.sqlite")})
    assert figure(table, "step", "step", "kernel_count")["difference"] == 0
    assert abs(figure(table, "step", "step", "busy_ns")["difference"]) < 0.02  # the loop's jitter


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
    table = two_tools.compare({"nsys": traces["nsys"], "fewer": Trace.from_frames(fewer, TraceMeta(tool="planted"))})
    row = figure(table, "category", "normalization", "gpu_ns")
    assert row["nsys"] > 0
    assert row["fewer"] == 0
    assert row["difference"] == -1
    turned = two_tools.compare({"fewer": Trace.from_frames(fewer, TraceMeta(tool="planted")), "nsys": traces["nsys"]})
    assert np.isnan(figure(turned, "category", "normalization", "gpu_ns")["difference"])


def test_the_rule_and_the_number_of_categories_can_be_chosen(pair: Pair, table: pd.DataFrame) -> None:
    top = two_tools.compare(pair[0], rule="thread", top=2)
    assert figure(top, "phase", "backward", "gpu_ns")["nsys"] == 0
    assert figure(table, "phase", "backward", "gpu_ns")["nsys"] > 0
    assert top.loc[top["group"] == "category", "name"].unique().tolist() == ["GEMM", "elementwise"]
    assert len(top[top["group"] != "category"]) == len(table.query("group != 'category'"))


def test_two_traces_with_steps_are_needed(pair: Pair) -> None:
    traces, _ = pair
    with pytest.raises(UsageError, match="two traces"):
        two_tools.compare({"one": traces["nsys"]})
    with pytest.raises(UsageError, match="empty: the trace has no steps"):
        two_tools.compare({"nsys": traces["nsys"], "empty": Trace.from_frames({}, TraceMeta())})
