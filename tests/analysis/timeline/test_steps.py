"""Steps as windows that add up, and the ones that stand out."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import nsightkit
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.selection import select
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace, TraceMeta

P = 7
MAIN, OTHER = P << 24 | 1, P << 24 | 2
COLUMNS = ["step", "start_ns", "wall_ns", "busy_ns", "idle_ns", "outlier", "phase", "tokens", "sequences"]
COLUMNS += ["compile_ns", "regions"]


def _trace(ranges: list[tuple[str, int, int]], thread: int = MAIN, **tables: pd.DataFrame) -> Trace:
    frame = pd.DataFrame(ranges, columns=["name", "start_ns", "end_ns"])
    frame["name"] = frame["name"].astype("category")
    return Trace.from_frames({"ranges": frame.assign(process=P, thread=thread), **tables})


def _kernels(*rows: tuple[int, int, int, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["device", "process", "start_ns", "end_ns"])


def _calls(*starts: int, thread: int = MAIN) -> pd.DataFrame:
    """Calls of 2 ns each; their correlation ids count from 1."""
    frame = pd.DataFrame({"start_ns": starts, "correlation": range(1, len(starts) + 1)})
    return frame.assign(end_ns=frame["start_ns"] + 2, process=P, thread=thread)


def test_a_step_ends_with_its_work_and_the_next_one_begins_there():
    # Launched at 10 and 20, at 110, by another thread at 150, and at 290; the GPU is behind, and then waits.
    calls = pd.concat([_calls(10, 20, 110), _calls(0, 0, 0, 150, thread=OTHER)[3:], _calls(0, 0, 0, 0, 290)[4:]])
    kernels = _kernels((0, P, 30, 60), (0, P, 60, 130), (0, P, 130, 160), (0, P, 160, 240), (0, P, 295, 420))
    trace = _trace(
        [("train_step", 0, 60), ("train_step", 100, 180), ("train_step", 200, 300)],
        calls=calls,
        kernels=kernels.assign(correlation=[1, 2, 3, 4, 5]),
    )
    found = steps.windows(trace)
    assert found["start_ns"].tolist() == [0, 100, 200]
    assert found["cpu_end_ns"].tolist() == [100, 200, 300]
    assert found["end_ns"].tolist() == [130, 240, 420]
    assert found["begin_ns"].tolist() == [0, 130, 240]
    table = steps.summary(trace)
    assert list(table.columns) == COLUMNS
    assert table["start_ns"].tolist() == [0, 130, 240]
    assert table["wall_ns"].tolist() == [130, 110, 180]  # adds up to the window
    assert table["busy_ns"].tolist() == [100, 110, 125]
    assert table["idle_ns"].tolist() == [30, 0, 55]
    assert not table["outlier"].any()


def test_no_step_ends_before_an_earlier_one():
    # What the first step launched outlasts the second one, whose own work ran beside it.
    kernels = _kernels((0, P, 20, 400), (0, P, 130, 180), (0, P, 400, 450)).assign(correlation=[1, 2, 3])
    ranges = [("step", 0, 90), ("step", 100, 190), ("step", 200, 290)]
    table = steps.summary(_trace(ranges, kernels=kernels, calls=_calls(10, 110, 210)))
    assert table["wall_ns"].tolist() == [400, 0, 50]
    assert table["busy_ns"].tolist() == [380, 0, 50]


def test_a_stub_that_the_profiler_left_is_not_a_step():
    ranges = [("ProfilerStep#1", 0, 900), ("ProfilerStep#2", 1000, 1009)]
    kernels = _kernels((0, P, 50, 800)).assign(correlation=[1])
    assert steps.find(_trace(ranges, kernels=kernels, calls=_calls(10)))["end_ns"].tolist() == [900]
    # Short, but it launched something; or as long as the others; or nothing was launched in any.
    two = _kernels((0, P, 50, 800), (0, P, 1010, 1020)).assign(correlation=[1, 2])
    assert len(steps.find(_trace(ranges, kernels=two, calls=_calls(10, 1004)))) == 2
    longer = [ranges[0], ("ProfilerStep#2", 1000, 1100)]
    assert len(steps.find(_trace(longer, kernels=kernels, calls=_calls(10)))) == 2
    assert len(steps.find(_trace(ranges))) == 2


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("execute_context_1(888)_generation_0(0)", ("prefill", 888, 1)),
        ("execute_context_0(0)_generation_0(0)", (None, 0, 0)),
        ("execute_8192_context_9(sq8155sk8430sqsq1sqsk2)_generation_37(sq37sk4sqsq3sqsk4)", ("mixed", 8192, 46)),
        ("step[DECODE bs=32]", ("decode", 32, 32)),
        ("step[EXTEND bs=2 toks=12 c_sqsq=80 c_sqsk=120 c_sk=20]", ("prefill", 12, 2)),
        ("step[MIXED bs=2]", ("mixed", None, 2)),
        ("step 3", (None, None, None)),
    ],
)
def test_what_a_server_says_that_a_step_served(name: str, served: tuple[str | None, int | None, int | None]):
    row = steps.summary(_trace([(name, 0, 50)])).iloc[0]
    assert tuple(None if pd.isna(row[c]) else row[c] for c in ("phase", "tokens", "sequences")) == served


def test_phases_of_a_server():
    names = ["step[EXTEND bs=1 toks=64]", "step[DECODE bs=8]", "step[DECODE bs=6]"]
    trace = _trace([(name, 100 * i, 100 * i + 40) for i, name in enumerate(names)])
    table = steps.phases(steps.summary(trace)).set_index("phase")
    decode = table.loc["decode", ["steps", "wall_ns", "share", "median_ns", "tokens", "sequences", "tokens_per_s"]]
    assert decode.tolist() == [2, 140, 140 / 240, 70, 7, 7, 14e9 / 140]


def test_a_profilers_step_serves_what_is_annotated_in_it():
    ranges = [
        ("ProfilerStep#1", 0, 100),
        ("execute_context_0(0)_generation_4(4)", 10, 90),
        ("execute_context_0(0)_generation_4(4)", 20, 80),  # the same again, inside
        ("ProfilerStep#2", 100, 200),
        ("execute_context_1(64)_generation_0(0)", 110, 120),
        ("execute_context_0(0)_generation_5(5)", 130, 140),
        ("ProfilerStep#3", 200, 300),
        ("execute_context_0(0)_generation_3(3)", 305, 405),  # around a step
        ("ProfilerStep#4", 310, 400),
        ("step[DECODE bs=3]", 320, 390),
    ]
    table = steps.summary(_trace(ranges))
    assert table["phase"].tolist() == ["decode", "mixed", None, "decode"]
    assert table["tokens"].tolist() == [4, 69, pd.NA, 3]
    assert table["sequences"].tolist() == [4, 5, pd.NA, 3]


def test_several_devices_add_up_and_other_processes_do_not_count():
    trace = _trace([("step", 0, 100)], kernels=_kernels((0, P, 0, 40), (1, P, 0, 100), (2, P + 1, 0, 100)))
    row = steps.summary(trace).iloc[0]
    assert (row["busy_ns"], row["idle_ns"]) == (140, 60)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["ProfilerStep#3", "step", "ProfilerStep#4"], ["ProfilerStep#3", "ProfilerStep#4"]),
        (["Optimizer.step#AdamW.step", "optimizer_step", "lr_scheduler.step", "footsteps", "Warm-up Step 3"], []),
        (["warmup step 0", "step 1", "step 2", "step 10 inner"], ["step 1", "step 2"]),
        (
            ["step[EXTEND bs=1 toks=64]", "execute_x", "step[DECODE bs=8]"],
            ["step[EXTEND bs=1 toks=64]", "step[DECODE bs=8]"],
        ),
    ],
)
def test_which_ranges_are_steps(names: list[str], found: list[str]):
    """One kind, numbers aside: the profiler's own, else the one with most time."""
    table = steps.summary(_trace([(name, 100 * i, 100 * i + 40) for i, name in enumerate(names)]))
    assert table["step"].tolist() == found


def test_match_names_the_steps():
    trace = _trace([("iteration", 0, 10), ("inner iteration", 2, 5), ("iteration", 20, 30)])
    assert not len(steps.summary(trace))
    table = steps.summary(trace, match="iteration")
    assert table["start_ns"].tolist() == [0, 20]  # the outermost
    with pytest.raises(UsageError, match="not a regular expression"):
        steps.summary(trace, match="(")


def test_one_thread_has_the_steps():
    main = pd.DataFrame({"start_ns": [0, 100], "end_ns": [90, 190], "thread": MAIN})
    helper = pd.DataFrame({"start_ns": [0], "end_ns": [20], "thread": OTHER})
    frame = pd.concat([helper, main]).assign(process=P, name=pd.Categorical(["step"] * 3))
    assert len(steps.summary(Trace.from_frames({"ranges": frame}))) == 2


def test_outliers_need_distance_and_company():
    def walls(*lengths: int) -> list[bool]:
        begin, ranges = 0, []
        for length in lengths:
            ranges.append(("step", begin, begin + length))
            begin += length
        return steps.summary(_trace(ranges))["outlier"].tolist()

    assert walls(900, 100, 101, 99, 100, 100) == [True, False, False, False, False, False]
    assert walls(100, 100, 100, 100, 104) == [False] * 5  # beyond the spread, but by less than 5%
    assert walls(100, 100, 100, 100, 106) == [False] * 4 + [True]
    assert walls(900, 100, 100) == [False] * 3


def test_without_gpu_tables_there_is_no_busy_time():
    frame = pd.DataFrame({"start_ns": [0], "end_ns": [5], "name": pd.Categorical(["step"])})
    table = steps.summary(Trace.from_frames({"ranges": frame}, TraceMeta(missing=["kernels", "memops", "graphs"])))
    assert table["wall_ns"].tolist() == [5]
    assert table["busy_ns"].isna().all()
    assert table["idle_ns"].isna().all()


def test_resnet_steps_are_as_long_as_its_own_viewer_says(shared_traces: Path):
    # torch-tb-profiler 0.4.3 says 177,592 µs a step without loader workers, 141,068 µs with four.
    for workers, mean_us in ((0, 177_592), (4, 141_068)):
        (path,) = (shared_traces / "kineto").glob(f"*workers_{workers}__*")
        table = steps.summary(nsightkit.load(path, cache=False))
        assert table["step"].str.startswith("ProfilerStep#").all()
        assert table["wall_ns"].mean() == pytest.approx(mean_us * 1000, rel=2e-4)
        assert (table["busy_ns"] + table["idle_ns"] == table["wall_ns"]).all()


def test_the_first_step_begins_where_work_of_before_the_recording_ends():
    """Of four kernels the first was launched before the capture; steps of a selection are the same steps."""
    kernels = _kernels((0, P, 5, 130), (0, P, 130, 230), (0, P, 230, 330), (0, P, 330, 430))
    kernels = kernels.assign(correlation=[9, 1, 2, 3])
    ranges = [("step 1", 0, 60), ("step 2", 60, 120), ("step 3", 120, 180)]
    trace = _trace(ranges, kernels=kernels, calls=_calls(10, 70, 130))
    assert steps.summary(trace)["wall_ns"].tolist() == [100, 100, 100]
    for filtered in ({"last_steps": 3}, {"within": "^step"}, {"last_steps": 2}, {"within": "step [23]"}):
        part = steps.windows(select(trace, **filtered))
        whole = steps.windows(trace).tail(len(part))
        assert part[["begin_ns", "end_ns"]].to_numpy().tolist() == whole[["begin_ns", "end_ns"]].to_numpy().tolist()


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (0, "30 ns in 1 step: frame 1 1 time, 30 ns"),
        (7, "90 ns in 2 steps (ProfilerStep#7 to ProfilerStep#9): frame 0 2 times, 60 ns; frame 1 1 time, 30 ns"),
    ],
)
def test_compilers_and_compiled_regions(first: int, text: str):
    """A profiler that starts at its eighth step sees a program that has settled."""
    ranges = [(f"ProfilerStep#{first + step}", 100 * step, 100 * step + 99) for step in range(3)]
    for start, frame, number in ((10, 0, 1), (50, 0, 1), (220, 1, 2)):
        ranges.append(("_compile.compile_inner (dynamo_timed)", start, start + 30))
        ranges.append((f"dynamo_data: compile_id={frame}/{number}", start + 1, start + 2))
        ranges.append(("inductor_compile", start + 5, start + 25))
    # A graph break begins a region inside the one that it breaks.
    ranges += [("Torch-Compiled Region: 0/1", 110, 150), ("Torch-Compiled Region: 1/2", 130, 149)]
    trace = _trace(ranges)
    table = steps.summary(trace)
    assert table["compile_ns"].tolist() == [60, 0, 30]
    assert table["regions"].tolist() == [0, 2, 0]
    assert steps.recompiled(trace, steps.windows(trace)) == f"Compilers ran for {text}"
