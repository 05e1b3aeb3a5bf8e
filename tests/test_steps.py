"""Steps as windows that add up, and the ones that stand out."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import nsightkit
from nsightkit.analysis import steps
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace, TraceMeta

P = 7
MAIN, OTHER = P << 24 | 1, P << 24 | 2
COLUMNS = ["step", "start_ns", "wall_ns", "busy_ns", "idle_ns", "outlier"]


def _trace(ranges: list[tuple[str, int, int]], thread: int = MAIN, **tables: pd.DataFrame) -> Trace:
    frame = pd.DataFrame(ranges, columns=["name", "start_ns", "end_ns"])
    frame["name"] = frame["name"].astype("category")
    return Trace.from_frames({"ranges": frame.assign(process=P, thread=thread), **tables})


def _kernels(*rows: tuple[int, int, int, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["device", "process", "start_ns", "end_ns"])


def test_windows_reach_to_the_next_step_and_clip_the_gpus_work() -> None:
    trace = _trace(
        [("train_step", 0, 60), ("train_step", 100, 180), ("train_step", 200, 300)],
        kernels=_kernels((0, P, 50, 120), (0, P, 110, 150), (0, P, 290, 900)),
    )
    table = steps.summary(trace)
    assert list(table.columns) == COLUMNS
    assert table["start_ns"].tolist() == [0, 100, 200]
    assert table["wall_ns"].tolist() == [100, 100, 100]
    assert table["busy_ns"].tolist() == [50, 50, 10]  # work that no step launched is in none after the last
    assert table["idle_ns"].tolist() == [50, 50, 90]
    assert not table["outlier"].any()


def test_the_last_step_lasts_until_its_own_work_is_done() -> None:
    calls = pd.DataFrame({"start_ns": [110, 150, 205], "end_ns": [112, 155, 207]})
    calls = calls.assign(process=P, thread=MAIN, correlation=[1, 2, 3])
    kernels = _kernels((0, P, 130, 180), (0, P, 220, 250), (0, P, 300, 400)).assign(correlation=[1, 2, 3])
    table = steps.summary(_trace([("step", 0, 90), ("step", 100, 200)], kernels=kernels, calls=calls))
    assert table["wall_ns"].tolist() == [100, 150]  # not to 400: that was launched after the step
    assert table["busy_ns"].tolist() == [0, 80]


def test_several_devices_add_up_and_other_processes_do_not_count() -> None:
    trace = _trace([("step", 0, 100)], kernels=_kernels((0, P, 0, 40), (1, P, 0, 100), (2, P + 1, 0, 100)))
    row = steps.summary(trace).iloc[0]
    assert (row["busy_ns"], row["idle_ns"]) == (140, 60)


def test_the_profilers_own_steps_come_first() -> None:
    trace = _trace([("ProfilerStep#3", 0, 100), ("step", 10, 50), ("ProfilerStep#4", 100, 200)])
    assert steps.summary(trace)["step"].tolist() == ["ProfilerStep#3", "ProfilerStep#4"]


def test_an_optimizers_step_is_a_part_of_one() -> None:
    names = ["Optimizer.step#AdamW.step", "optimizer_step", "lr_scheduler.step", "footsteps"]
    assert not len(steps.summary(_trace([(name, i * 10, i * 10 + 5) for i, name in enumerate(names)])))


def test_numbered_names_are_one_kind_and_the_longest_kind_wins() -> None:
    trace = _trace([("warmup step 0", 0, 10), ("step 1", 10, 50), ("step 2", 60, 100), ("step 2 inner", 70, 80)])
    assert steps.summary(trace)["step"].tolist() == ["step 1", "step 2"]


def test_match_names_the_steps() -> None:
    trace = _trace([("iteration", 0, 10), ("inner iteration", 2, 5), ("iteration", 20, 30)])
    assert not len(steps.summary(trace))
    table = steps.summary(trace, match="iteration")
    assert table["start_ns"].tolist() == [0, 20]  # the outermost
    with pytest.raises(UsageError, match="not a regular expression"):
        steps.summary(trace, match="(")


def test_one_thread_has_the_steps() -> None:
    main = pd.DataFrame({"start_ns": [0, 100], "end_ns": [90, 190], "thread": MAIN})
    helper = pd.DataFrame({"start_ns": [0], "end_ns": [20], "thread": OTHER})
    frame = pd.concat([helper, main]).assign(process=P, name=pd.Categorical(["step"] * 3))
    assert len(steps.summary(Trace.from_frames({"ranges": frame}))) == 2


def test_outliers_need_distance_and_company() -> None:
    def walls(*lengths: int) -> list[bool]:
        begin, ranges = 0, []
        for length in lengths:
            ranges.append(("step", begin, begin + length))
            begin += length
        return steps.summary(_trace(ranges))["outlier"].tolist()

    assert walls(900, 100, 101, 99, 100, 100) == [True, False, False, False, False, False]
    assert walls(100, 100, 100, 100, 104) == [False] * 5  # beyond the spread, but by less than 5 %
    assert walls(100, 100, 100, 100, 106) == [False] * 4 + [True]
    assert walls(900, 100, 100) == [False] * 3


def test_without_gpu_tables_there_is_no_busy_time() -> None:
    frame = pd.DataFrame({"start_ns": [0], "end_ns": [5], "name": pd.Categorical(["step"])})
    table = steps.summary(Trace.from_frames({"ranges": frame}, TraceMeta(missing=["kernels", "memops", "graphs"])))
    assert table["wall_ns"].tolist() == [5]
    assert table["busy_ns"].isna().all()
    assert table["idle_ns"].isna().all()


def test_resnet_steps_are_as_long_as_its_own_viewer_says(shared_traces: Path) -> None:
    # torch-tb-profiler 0.4.3 says 177,592 µs a step without loader workers, 141,068 µs with four.
    for workers, mean_us in ((0, 177_592), (4, 141_068)):
        (path,) = (shared_traces / "kineto").glob(f"*workers_{workers}__*")
        table = steps.summary(nsightkit.load(path, cache=False))
        assert table["step"].str.startswith("ProfilerStep#").all()
        assert table["wall_ns"].mean() == pytest.approx(mean_us * 1000, rel=2e-4)
        assert (table["busy_ns"] + table["idle_ns"] == table["wall_ns"]).all()


def test_moments_lie_in_steps() -> None:
    windows = steps.find(_trace([("step", 0, 60), ("step", 100, 180)]))
    assert steps.number(windows, [-5, 0, 99, 100, 179, 180]).tolist() == [-1, 0, 0, 1, 1, -1]
    assert steps.number(windows.head(0), [1, 2]).tolist() == [-1, -1]


def test_steps_on_the_gpus_clock_and_whose_work_is_whose() -> None:
    calls = pd.DataFrame({"start_ns": [10, 20, 110, 120], "end_ns": [12, 22, 112, 122], "correlation": [1, 2, 3, 4]})
    calls = calls.assign(process=P, thread=MAIN)
    # The third was launched in the second step, which the GPU reaches late; the last by another process.
    kernels = _kernels((0, P, 50, 300), (0, P, 300, 600), (0, P, 700, 900), (0, P, 900, 950), (1, P + 1, 5, 8))
    kernels = kernels.assign(correlation=[1, 2, 3, 4, 9])
    trace = _trace([("step", 0, 60), ("step", 100, 180)], kernels=kernels, calls=calls)
    windows = steps.find(trace)
    assert steps.launched_in(trace, "kernels", windows).tolist() == [0, 0, 1, 1, -1]
    on_gpu = steps.on_gpu(trace, windows)
    assert on_gpu is not None
    assert on_gpu.to_numpy().tolist() == [[50, 700], [700, 950]]
    parts = steps.divided(trace, on_gpu, P)
    assert parts.to_numpy().tolist() == [[650, 550, 100], [250, 250, 0]]


def test_steps_that_the_gpu_does_not_know() -> None:
    calls = pd.DataFrame({"start_ns": [10, 110], "end_ns": [12, 112], "correlation": [1, 2]})
    calls = calls.assign(process=P, thread=MAIN)

    def on_gpu(*starts: int) -> pd.DataFrame | None:
        rows = [(0, P, start, start + 10) for start in starts]
        kernels = _kernels(*rows).assign(correlation=range(1, len(rows) + 1))
        trace = _trace([("step", 0, 60), ("step", 100, 180)], kernels=kernels, calls=calls)
        return steps.on_gpu(trace, steps.find(trace))

    assert on_gpu(50, 150) is not None
    assert on_gpu(50) is None, "the second launched nothing"
    assert on_gpu(150, 50) is None, "the second began before the first"
    bare = _trace([("step", 0, 60)])
    assert steps.on_gpu(bare, steps.find(bare)) is None
    assert steps.on_gpu(bare, steps.find(bare).head(0)) is None
