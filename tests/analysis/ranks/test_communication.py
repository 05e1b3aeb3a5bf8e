"""A rank's collectives: planted truths, what PyTorch says of them, and HolisticTraceAnalysis on real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from synthetic.planted_ranks import job

import nsightkit
from nsightkit.analysis.core.intervals import union_length
from nsightkit.analysis.ranks import collectives as communication
from nsightkit.trace import Trace, TraceMeta, store

SIZES = {"ranks": 2, "steps": 4, "layers": 3}


@pytest.fixture(scope="module", params=["nsys", "kineto"])
def planted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    truth = job(folder, {1: "slow"}, kind=request.param, **SIZES)
    return request.param, truth, [nsightkit.load(path, cache=False) for path in truth["paths"]]


def test_totals_are_those_planted(planted):
    _, truth, traces = planted
    for rank, trace in enumerate(traces):
        found = communication.totals(trace)
        for what in ("compute_ns", "communication_ns", "exposed_ns"):
            assert found[what] == truth[what][rank], what
        assert found["overlapped_ns"] == found["communication_ns"] - found["exposed_ns"] > 0


def test_each_collective_is_what_was_planted(planted):
    kind, truth, traces = planted
    for rank, trace in enumerate(traces):
        found = communication.collectives(trace)
        assert (found["start_ns"] + trace.t0_ns).tolist() == [c["starts"][rank] for c in truth["collectives"]]
        assert (found["end_ns"] + trace.t0_ns).tolist() == [c["ends"][rank] for c in truth["collectives"]]
        assert found["kind"].tolist() == ["all_reduce"] * 2 * SIZES["steps"]
        assert set(found["stream"]) == {20}
        assert set(found["where"]) == {"GPU"}
        if kind == "kineto":
            assert found["bytes"].tolist() == [c["bytes"] for c in truth["collectives"]]
            assert found["sequence"].tolist() == [c["sequence"] for c in truth["collectives"]]
            assert set(found["group"]) == {"0"}
            assert set(found["ranks"]) == {"[0, 1]"}
            assert set(found["group_size"]) == {2}
        else:  # NCCL's ranges tell the kind, nothing tells the group
            assert set(found["group"]) == {""}
            assert (found[["bytes", "sequence", "group_size"]] == -1).all().all()
        # The call is launched while the gradients before it are still being computed.
        assert (found["launch_ns"] < found["start_ns"]).all()


def test_what_pytorch_says_survives_a_conversion(planted, tmp_path):
    kind, _, traces = planted
    if kind == "nsys":
        pytest.skip("nsys exports hold no such description")
    store.write(traces[1], tmp_path / "again.parquet")
    again = nsightkit.load(tmp_path / "again.parquet")
    pd.testing.assert_frame_equal(communication.collectives(again), communication.collectives(traces[1]))
    assert again.meta.distributed["rank"] == 1


def kineto(tmp_path, events):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}), encoding="utf-8")
    return nsightkit.load(path, cache=False)


SAID = {
    "Collective name": "_allgather_base", "In msg nelems": 256, "Out msg nelems": 1024, "dtype": "BFloat16",
    "Group size": 4, "Process Group Name": "7", "Process Group Ranks": [0, 1, 2, 3],
}  # fmt: skip


def event(category, name, start, duration, tid=5, pid=5, **args):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def test_kernels_are_described_by_themselves_and_by_what_launched_them(tmp_path):
    nccl = "ncclDevKernel_Generic_1(x)"
    events = [
        event("cpu_op", "record_param_comms", 100, 50, **{"External id": 7, "Seq": 12, **SAID}),
        event("cuda_runtime", "cudaLaunchKernel", 110, 5, correlation=3),
        # By its own arguments, which lack the number of the collective.
        event("kernel", nccl, 200, 50, 20, 0, device=0, stream=20, correlation=3, **{"External id": 7, **SAID}),
        # By the operator alone.
        event("kernel", nccl, 300, 50, 20, 0, device=0, stream=20, correlation=3, **{"External id": 7}),
        # By nobody; another kernel's number is no reason to take it for one.
        event("kernel", nccl, 400, 50, 20, 0, device=0, stream=20, correlation=4, **{"External id": 8}),
        event("kernel", "gemm", 500, 50, 7, 0, device=0, stream=7, correlation=5, **{"External id": 9}),
    ]
    trace = kineto(tmp_path, events)
    found = communication.collectives(trace)
    assert found["kind"].tolist() == ["all_gather", "all_gather", "other"]
    assert found["sequence"].tolist() == [12, 12, -1]
    assert found["group"].tolist() == ["7", "7", ""]
    assert found["bytes"].tolist() == [2048, 2048, -1]  # of what is gathered, not of one part
    assert found["ranks"].tolist() == ["[0, 1, 2, 3]", "[0, 1, 2, 3]", ""]
    assert trace["kernels"]["sequence"].tolist() == [12, 12, -1, -1]


@pytest.mark.parametrize(
    "said",
    [{}, {"dtype": "Mystery"}, {"In msg nelems": "many", "Out msg nelems": None}, {"Group size": "four"}, {"Seq": "x"}],
)
def test_what_is_said_badly_is_not_known(tmp_path, said):
    args = {"External id": 7, **SAID, **said}
    trace = kineto(
        tmp_path, [event("kernel", "ncclDevKernel_X", 1, 5, 20, 0, device=0, stream=20, correlation=3, **args)]
    )
    found = communication.collectives(trace).iloc[0]
    assert found["kind"] == "all_gather"
    assert found["bytes"] == (2048 if not said or "Group size" in said or "Seq" in said else -1)
    assert found["group_size"] == (-1 if "Group size" in said else 4)
    assert found["sequence"] == -1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL", "all_gather"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send/recv"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce"),
        ("nccl:_all_gather_base", "all_gather"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"),
        ("nccl:all_to_all, op_id = 991144", "all_to_all"),
        ("nccl:recv 0<-1", "send/recv"),
        ("gloo:all_reduce", "all_reduce"),
        ("ncclAllReduce", "all_reduce"),
        ("ncclAlltoAll", "all_to_all"),
        ("all_to_allv", "all_to_all"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("_broadcast_oop", "broadcast"),
        ("barrier", "barrier"),
        ("gather", "gather"),
        ("ncclGroupEnd", "other"),
        ("", "other"),
    ],
)
def test_kinds(name, kind):
    assert communication.kind_of(name) == kind
    assert kind in communication.KINDS


@pytest.mark.parametrize("n", [2, 4, 8, 1024])
def test_bus_bandwidth_counts_as_nccl_tests_does(n):
    """https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md."""
    factor = {kind: communication.wire_factor(kind, n) for kind in communication.KINDS}
    assert factor["all_reduce"] == pytest.approx(2 * (n - 1) / n)
    assert factor["all_gather"] == factor["reduce_scatter"] == factor["all_to_all"] == pytest.approx((n - 1) / n)
    assert factor["broadcast"] == factor["reduce"] == 1
    assert factor["send/recv"] is factor["barrier"] is factor["other"] is None


def test_collectives_on_a_cpu():
    """Gloo works in threads of its own, and PyTorch annotates the work there."""
    main, gloo = 5 << 24 | 1, 5 << 24 | 9
    frames = {
        "ranges": pd.DataFrame(
            {
                "name": ["backward", "gloo:all_reduce", "gloo:broadcast", "nccl:all_reduce"],
                "start_ns": [0, 100, 700, 50],
                "end_ns": [1_000, 600, 800, 60],
                "thread": [main, gloo, gloo, main],
                "process": 5,
            }
        ),
        "ops": pd.DataFrame(
            {
                "name": ["aten::mm", "aten::add_", "c10d::barrier", "aten::copy_"],
                "start_ns": [0, 300, 350, 400],
                "end_ns": [200, 400, 900, 500],
                "thread": [main, main, main, gloo],
                "process": 5,
            }
        ),
    }
    frames = {table: frame.astype({"name": "category"}) for table, frame in frames.items()}
    trace = Trace.from_frames(frames, TraceMeta(missing=["kernels", "memops", "graphs", "calls"]))
    found = communication.collectives(trace)
    assert found[["kind", "where", "start_ns"]].to_numpy().tolist() == [
        ["all_reduce", "CPU", 100],
        ["broadcast", "CPU", 700],
    ]
    # The program computes from 0 to 200 and from 300 to 400; waiting and what gloo itself does is not computation.
    assert found["exposed_ns"].tolist() == [500 - 100 - 100, 100]
    assert communication.totals(trace) == {
        "compute_ns": 300, "communication_ns": 600, "overlapped_ns": 200, "exposed_ns": 400
    }  # fmt: skip


def test_without_collectives_nothing_is_said():
    trace = Trace.from_frames({})
    assert len(communication.collectives(trace)) == 0
    assert set(communication.totals(trace).values()) == {None}


# --- HolisticTraceAnalysis on real ranks ---

#: rank: (communication that overlaps computation, of all communication, in per cent), as HTA 0.5.0 prints it.
HTA = {0: 14.95, 1: 19.93}


def test_overlap_of_real_ranks_is_that_of_hta(shared_traces):
    for rank, percent in HTA.items():
        trace = nsightkit.load(shared_traces / f"hta/trace_filter__sampled_rank-{rank}.json.gz", cache=False)
        found = communication.totals(trace)
        assert 100 * found["overlapped_ns"] / found["communication_ns"] == pytest.approx(percent, abs=0.005)
        # By hand from the table: communication is what NCCL's kernels cover.
        nccl = trace["kernels"][trace["kernels"]["name"].astype(str).str.startswith("nccl")]
        assert found["communication_ns"] == union_length(nccl["start_ns"], nccl["end_ns"])
        rest = trace["kernels"].drop(nccl.index)
        assert found["compute_ns"] == union_length(rest["start_ns"], rest["end_ns"])


def test_hta_still_says_so(shared_traces):
    python = os.environ.get("NSIGHTKIT_HTA_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import hta.trace_analysis"], capture_output=True, check=False).returncode:
        pytest.skip("HolisticTraceAnalysis is not installed (NSIGHTKIT_HTA_PYTHON names an interpreter that has it)")
    files = [str((shared_traces / f"hta/trace_filter__sampled_rank-{rank}.json.gz").resolve()) for rank in HTA]
    done = subprocess.run(
        [python, "-c", SCRIPT, *files],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "HTA_DISABLE_NS_ROUNDING": "1"},
    )
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(list(HTA.values()), abs=0.005)


SCRIPT = """
import contextlib, io, json, logging, os, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis

files = dict(enumerate(sys.argv[1:]))
with contextlib.redirect_stdout(io.StringIO()):
    analysis = TraceAnalysis(
        trace_files=files, trace_dir=os.path.dirname(sys.argv[1]), include_last_profiler_step=True
    )
    overlap = analysis.get_comm_comp_overlap(visualize=False)
print(json.dumps([float(x) for x in overlap.sort_values("rank")["comp_comm_overlap_pctg"]]))
"""


def test_kinds_are_told_from_annotations_of_a_real_capture(shared_traces):
    """All kernels are called SendRecv; PyTorch's annotation around their launch says what they are for."""
    trace = nsightkit.load(shared_traces / "nsys-ai/mfu_2gpu_before.sqlite", cache=False)
    found = communication.collectives(trace)
    assert found["kind"].value_counts().to_dict() == {"all_to_all": 64, "send/recv": 2}
    assert np.sort(found["device"].unique()).tolist() == [0, 1]
