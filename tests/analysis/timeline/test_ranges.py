"""What ranges cost: planted truths, both rules, and the sums that must reconcile."""

import re

import pytest
from synthetic.planted import Export

import nsightkit
from nsightkit.analysis.timeline import phases, ranges, selection

PID = 5
PROCESS = Export.process(PID)
MAIN, OTHER, THIRD = (Export.thread(PID, t) for t in (5, 6, 7))


def loaded(out, tmp_path):
    return nsightkit.load(out.write(tmp_path / "t.sqlite", shuffle=1))


def by_name(trace, rule="window"):
    return ranges.summary(trace, rule=rule).set_index("name")


def test_exclusive_is_per_thread(tmp_path):
    out = Export()
    out.range("outer", MAIN, 0, 1000)
    out.range("inner", MAIN, 100, 400, domain="library")
    out.range("leaf", MAIN, 150, 200)
    out.range("beside", OTHER, 100, 900)
    found = by_name(loaded(out, tmp_path))
    assert found["exclusive_ns"].to_dict() == {"outer": 700, "inner": 250, "leaf": 50, "beside": 800}
    assert found.loc["inner", "domain"] == "library"


def test_threads_with_ranges_keep_their_work_to_themselves(tmp_path):
    out = Export()
    out.range("main", MAIN, 0, 1_000)
    out.range("prefetch", OTHER, 100, 300)
    for thread, at in [(MAIN, 10), (OTHER, 150), (OTHER, 500), (THIRD, 600)]:
        c = out.call("cudaLaunchKernel", thread, at, at + 5)
        out.kernel("k", 2_000 + at, 2_001 + at, c, PROCESS)
    found = by_name(loaded(out, tmp_path))["kernel_count"].to_dict()
    assert found == {"main": 2, "prefetch": 1}


@pytest.mark.parametrize(
    ("annotation", "domain"),
    [
        ("nccl:all_reduce", ""),
        ("ncclAllReduce", "NCCL"),
        ("aten::mul, seq = 5", ""),
    ],
)
def test_what_a_library_annotates_does_not_make_a_thread_one_with_ranges(tmp_path, annotation, domain):
    out = Export()
    out.range("backward", MAIN, 0, 1_000)
    out.range(annotation, OTHER, 200, 300, domain=domain)
    for thread, at in [(OTHER, 100), (OTHER, 250), (OTHER, 400), (THIRD, 250), (OTHER, 1_500)]:
        c = out.call("cudaLaunchKernel", thread, at, at + 5)
        out.kernel("k", 2_000 + at, 2_001 + at, c, PROCESS)
    trace = loaded(out, tmp_path)
    # Its range holds what its own thread launched in it, the program's what any such thread did.
    assert by_name(trace)["kernel_count"].to_dict() == {"backward": 4, annotation: 1}
    assert by_name(trace, "thread")["kernel_count"].to_dict() == {"backward": 0, annotation: 1}
    both = ["backward", annotation]
    assert [selection.select(trace, within=f"^{re.escape(n)}$").size("kernels") for n in both] == [4, 1]
    found = phases.summary(trace).set_index("phase")["kernel_count"]
    assert found.to_dict() == {"backward": 4, phases.UNATTRIBUTED: 1}
    # A range of the program's own on that thread, and its work is its own again.
    out.range("prefetch", OTHER, 390, 450)
    assert by_name(loaded(out, tmp_path))["kernel_count"].to_dict() == {"backward": 1, annotation: 1, "prefetch": 1}


@pytest.mark.parametrize(
    ("name", "domain", "threads"),
    [
        ("[DALI][CPU op] readers__File", "", [THIRD]),
        ("readers__File", "DALI", [THIRD]),
        ("decode", "", [THIRD, THIRD + 1]),  # of a pool
    ],
)
def test_threads_that_load_data_own_no_launches_of_others(tmp_path, name, domain, threads):
    out = Export()
    out.range("backward", MAIN, 0, 1_000)
    for thread in threads:
        out.range(name, thread, 100, 900, domain=domain)
    for at in (200, 300, 400):
        launch = out.call("cudaLaunchKernel", OTHER, at, at + 5)
        out.kernel("k", 2_000 + at, 2_001 + at, launch, PROCESS)
    assert by_name(loaded(out, tmp_path))["kernel_count"].to_dict() == {"backward": 3, name: 0}


def test_a_real_rank_keeps_its_backward_pass(shared_traces):
    """Collectives, their compression and a backward's own `record_function` are annotated on autograd's thread."""
    trace = nsightkit.load(shared_traces / "hta/trace_filter__sampled_rank-0.json.gz", cache=False)
    found, by_thread = by_name(trace), by_name(trace, "thread")
    steps = ["ProfilerStep#551", "ProfilerStep#552"]
    # All launches lie in the two steps.
    assert found.loc[steps, "kernel_count"].sum() == 1154
    assert by_thread.loc[steps, "kernel_count"].sum() == 633
    assert found.loc["## backward ##", "kernel_count"] > 5 * by_thread.loc["## backward ##", "kernel_count"]


def test_a_graph_launch_counts_its_nodes_and_its_replay(tmp_path):
    out = Export()
    out.range("nodes", MAIN, 0, 100)
    c = out.call("cudaGraphLaunch_v10000", MAIN, 10, 20)
    for node in range(1, 4):
        out.kernel("k", 1_000 * node, 1_000 * node + 500, c, PROCESS, node=node)
    out.range("replay", MAIN, 200, 300)
    c = out.call("cudaGraphLaunch_v10000", MAIN, 210, 220)
    out.graph(9_000, 9_400, c, PROCESS)
    trace = loaded(out, tmp_path)
    found = by_name(trace)
    assert found.loc["nodes", ["gpu_ns", "gpu_span_ns", "kernel_count"]].tolist() == [1_500, 2_500, 3]
    assert found.loc["replay", ["gpu_ns", "kernel_count"]].tolist() == [400, 0]
    assert by_name(trace, "thread").loc["replay", "gpu_ns"] == 0


def test_start_end_ranges(tmp_path):
    out = Export()
    out.start_end("request", MAIN, 0, 1_000, end_thread=OTHER)
    out.start_end("batch", MAIN, 100, 600)
    out.range("", MAIN, 700, 800)
    for at in (50, 550, 900):
        c = out.call("cudaLaunchKernel", MAIN, at, at + 5)
        out.kernel("k", 2_000 + at, 2_010 + at, c, PROCESS)
    trace = loaded(out, tmp_path)
    found = by_name(trace)
    assert found["kernel_count"].to_dict() == {"request": 3, "batch": 1, "": 0}
    assert found["exclusive_ns"].to_dict() == {"request": 1_000, "batch": 500, "": 100}
    # nsys leaves out what ends on another thread, and what has no name.
    assert by_name(trace, "thread").index.tolist() == ["batch"]


def test_open_ranges_end_with_the_last_range(tmp_path):
    out = Export()
    out.range("whole", MAIN, -500, None, registered=False)
    out.range("inner", MAIN, 100, 900)
    trace = loaded(out, tmp_path)
    assert trace.t0_ns == -500
    found = by_name(trace)
    assert found["total_ns"].to_dict() == {"whole": 1_400, "inner": 800}
    assert trace["ranges"].set_index("name")["open"].to_dict() == {"whole": True, "inner": False}


def test_without_gpu_tables_the_gpu_columns_are_unknown_not_zero(shared_traces):
    trace = nsightkit.load(shared_traces / "EfficientCenterFormer" / "baseline_v2.sqlite")
    found = ranges.summary(trace)
    assert found["count"].sum() == 649
    assert found[["gpu_ns", "gpu_span_ns", "kernel_count"]].isna().all().all()
