"""Phases that add up: planted loops, overlapping work, and what lies in no phase."""

import pytest
from synthetic.planted import Export, training

import nsightkit
from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import phases, steps

PID = 3
PROCESS = Export.process(PID)
MAIN, AUTOGRAD = Export.thread(PID, PID), Export.thread(PID, PID + 1)


def test_planted_training_reconciles(tmp_path):
    truth = training(tmp_path / "t.sqlite", "pageable")
    trace = nsightkit.load(tmp_path / "t.sqlite")
    found = phases.summary(trace)
    by_phase = found.set_index("phase")
    assert found["gpu_ns"].sum() == truth["busy_ns"]
    assert found["share_of_busy"].sum() == pytest.approx(1)
    window = steps.find(trace)
    assert found["cpu_ns"].sum() == (window["end_ns"] - window["start_ns"]).sum()
    for name in ("dataload", "to_device", "forward", "backward", "optimizer"):
        assert by_phase.loc[name, ["count", "cpu_ns"]].tolist() == list(truth["ranges"][name])
    assert by_phase.loc["backward", "gpu_ns"] > 0
    assert by_phase.loc[phases.UNATTRIBUTED, "gpu_ns"] == 0


def test_overlap_counts_once_for_what_began_first(tmp_path):
    out = Export()
    out.range("step", MAIN, 0, 1_000)
    out.range("forward", MAIN, 0, 400)
    out.range("backward", MAIN, 400, 900)
    out.range("forward", MAIN, 500, 600)  # recomputation inside: the outermost counts
    for thread, at, start, end, stream in [
        (MAIN, 10, 2_000, 3_000, 1),
        (AUTOGRAD, 450, 2_500, 3_400, 2),
        (MAIN, 550, 5_000, 5_100, 1),
        (MAIN, 950, 6_000, 6_010, 1),
    ]:
        c = out.call("cudaLaunchKernel", thread, at, at + 5)
        out.kernel("k", start, end, c, PROCESS, stream=stream)
    out.kernel("orphan", 7_000, 7_007, 999_999, PROCESS)
    trace = nsightkit.load(out.write(tmp_path / "t.sqlite", shuffle=1))
    found = phases.summary(trace).set_index("phase")
    assert found["gpu_ns"].to_dict() == {"forward": 1_000, "backward": 500, phases.UNATTRIBUTED: 17}
    assert found["kernel_count"].to_dict() == {"forward": 1, "backward": 2, phases.UNATTRIBUTED: 2}
    assert found["count"].to_dict() == {"forward": 1, "backward": 1, phases.UNATTRIBUTED: 0}
    assert found.loc[phases.UNATTRIBUTED, "cpu_ns"] == 100
    assert found["gpu_ns"].sum() == intervals.busy(trace)["busy_ns"].sum()


def test_a_moment_in_phases_of_two_threads_is_inside_once(tmp_path):
    out = Export()
    for name, thread, end in (("step", MAIN, 100), ("forward", MAIN, 90), ("data", AUTOGRAD, 95)):
        out.range(name, thread, 0, end)
    found = phases.summary(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    assert found["cpu_ns"].tolist() == [95, 90, 5]
