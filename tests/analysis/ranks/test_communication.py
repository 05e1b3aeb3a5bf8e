"""A rank's collectives: synthetic truths, PyTorch's descriptions, CPU back ends, and HolisticTraceAnalysis."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from synthetic.planted_ranks import job

import nsightkit
from nsightkit.analysis.ranks import collectives as communication
from nsightkit.trace import Trace, TraceMeta


@pytest.mark.parametrize("kind", ["nsys", "kineto"])
def test_collectives_are_those_laid_out(tmp_path, kind):
    truth = job(tmp_path, {1: "slow"}, kind=kind, ranks=2, steps=4, layers=3)
    trace = nsightkit.load(truth["paths"][1], cache=False)
    totals = communication.totals(trace)
    for name in ("compute_ns", "communication_ns", "exposed_ns"):
        assert totals[name] == truth[name][1], name
    assert totals["overlapped_ns"] == totals["communication_ns"] - totals["exposed_ns"] > 0
    table = communication.collectives(trace)
    assert (table["start_ns"] + trace.t0_ns).tolist() == [c["starts"][1] for c in truth["collectives"]]
    assert (table["end_ns"] + trace.t0_ns).tolist() == [c["ends"][1] for c in truth["collectives"]]
    assert set(table["kind"]) == {"all_reduce"}
    if kind == "nsys":  # NCCL's ranges give the kind, nothing gives the group
        assert (table[["bytes", "sequence", "group_size"]] == -1).all().all()
        assert set(table["group"]) == {""}
    else:
        assert table["bytes"].tolist() == [c["bytes"] for c in truth["collectives"]]
        assert table["sequence"].tolist() == [c["sequence"] for c in truth["collectives"]]
        assert table.loc[0, ["group", "ranks", "group_size"]].tolist() == ["0", "[0, 1]", 2]


def load(tmp_path, events):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}), encoding="utf-8")
    return nsightkit.load(path, cache=False)


def event(category, name, start, duration, tid=5, **args):
    pid = 0 if category == "kernel" else 5
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


def kernel(name, start, stream=20, **args):
    return event("kernel", name, start, 50, stream, device=0, stream=stream, **args)


SAID = {
    "Collective name": "_allgather_base", "In msg nelems": 256, "Out msg nelems": 1024, "dtype": "BFloat16",
    "Group size": 4, "Process Group Name": "7", "Process Group Ranks": [0, 1, 2, 3],
}  # fmt: skip


def test_kernels_are_described_by_themselves_and_by_what_launched_them(tmp_path):
    nccl = "ncclDevKernel_Generic_1(x)"
    events = [
        event("cpu_op", "record_param_comms", 100, 50, **{"External id": 7, "Seq": 12, **SAID}),
        event("cuda_runtime", "cudaLaunchKernel", 110, 5, correlation=3),
        kernel(nccl, 200, correlation=3, **{"External id": 7, **SAID}),
        kernel(nccl, 300, correlation=3, **{"External id": 7}),
        # Another kernel's number is no reason to take it for one.
        kernel(nccl, 400, correlation=4, **{"External id": 8}),
        kernel(nccl, 500, correlation=5, **SAID | {"dtype": "Mystery", "Group size": "four"}),
    ]
    table = communication.collectives(load(tmp_path, events))
    assert table["kind"].tolist() == ["all_gather", "all_gather", "other", "all_gather"]
    assert table["sequence"].tolist() == [12, 12, -1, -1]
    assert table["bytes"].tolist() == [2048, 2048, -1, -1]  # of the gathered message
    assert table["group_size"].tolist() == [4, 4, -1, -1]
    assert table["ranks"].tolist() == ["[0, 1, 2, 3]", "[0, 1, 2, 3]", "", "[0, 1, 2, 3]"]


def test_a_description_that_is_no_object_describes_nothing():
    kernels = {"name": "ncclDevKernel_AllReduce", "collective": ["x", "[1]"], "start_ns": 0, "end_ns": 1}
    table = communication.collectives(Trace.from_frames({"kernels": pd.DataFrame(kernels)}))
    assert table["kind"].tolist() == ["all_reduce", "all_reduce"]


@pytest.mark.parametrize(
    ("name", "kind"),
    {
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send/recv",
        "ncclDevKernel_Reduce_Sum_f32_RING_LL": "reduce",
        "nccl:_reduce_scatter_base": "reduce_scatter",
        "nccl:all_to_all, op_id = 991144": "all_to_all",
        "allgather_into_tensor_coalesced": "all_gather",
        "ncclGroupEnd": "other",
    }.items(),
)
def test_kinds(name, kind):
    assert communication.kind_of(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    {
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "reduce_scatter",
        "rccl_main_kernel_AllGather": "all_gather",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)": "all_reduce",
        "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)": "all_to_all",
        "nvshmemi_transfer_rma_nbi": "other",
    }.items(),
)
def test_a_kernel_communicates_by_its_name_on_any_stream(tmp_path, name, kind):
    """The second half of the kernel runs beside a GEMM on another stream; no stream is the communication's own."""
    trace = load(tmp_path, [kernel("gemm", 0, 7), kernel(name, 50, 7), kernel("gemm", 75, 13), kernel("gemm", 200, 7)])
    table = communication.collectives(trace)
    assert table[["kind", "exposed_ns"]].to_numpy().tolist() == [[kind, 25_000]]
    totals = communication.totals(trace)
    assert totals == {
        "compute_ns": 150_000, "communication_ns": 50_000, "overlapped_ns": 25_000, "exposed_ns": 25_000
    }  # fmt: skip


MAIN, GLOO = 5 << 24 | 1, 5 << 24 | 9


#: Gloo works in threads of its own, and PyTorch annotates the work there. Waiting is not computation.
ON_GLOO = {
    "ranges": [
        ("backward", 0, 1_000, MAIN), ("gloo:all_reduce", 100, 600, GLOO), ("gloo:broadcast", 700, 800, GLOO)
    ],
    "ops": [("aten::mm", 0, 200, MAIN), ("c10d::barrier", 350, 900, MAIN), ("aten::copy_", 400, 500, GLOO)],
}  # fmt: skip
#: vLLM on a CPU: an operator inside others, on the thread that computes.
OF_VLLM = {
    "ranges": [("execute_model", 0, 1_000, MAIN)],
    "ops": [
        ("aten::mm", 0, 300, MAIN), ("vllm::all_reduce", 300, 520, MAIN), ("_C::shm_allreduce", 310, 510, MAIN),
        ("aten::mm", 600, 900, MAIN),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("tables", "rows", "total"),
    [
        (ON_GLOO, [["all_reduce", 100, 400], ["broadcast", 700, 100]], (200, 600, 500)),
        (OF_VLLM, [["all_reduce", 310, 200]], (620, 200, 200)),
    ],
)
def test_collectives_on_a_cpu(tables, rows, total):
    frames = {}
    for name, events in tables.items():
        frame = pd.DataFrame(events, columns=["name", "start_ns", "end_ns", "thread"])
        frames[name] = frame.assign(process=5).astype({"name": "category"})
    trace = Trace.from_frames(frames, TraceMeta(missing=["kernels", "memops", "graphs", "calls"]))
    table = communication.collectives(trace)
    assert table[["kind", "start_ns", "exposed_ns"]].to_numpy().tolist() == rows
    totals = communication.totals(trace)
    assert (totals["compute_ns"], totals["communication_ns"], totals["exposed_ns"]) == total


#: Rank and the share of its communication that overlaps computation, in per cent, as HTA 0.5.0 prints it.
@pytest.mark.parametrize(("rank", "percent"), [(0, 14.95), (1, 19.93)])
def test_overlap_of_real_ranks_is_that_of_hta(shared_traces, rank, percent):
    trace = nsightkit.load(shared_traces / f"hta/trace_filter__sampled_rank-{rank}.json.gz", cache=False)
    totals = communication.totals(trace)
    assert 100 * totals["overlapped_ns"] / totals["communication_ns"] == pytest.approx(percent, abs=0.005)


def test_kinds_come_from_annotations_of_a_real_capture(shared_traces):
    """All kernels are called SendRecv; PyTorch's annotation around their launch has the kind."""
    trace = nsightkit.load(shared_traces / "nsys-ai/mfu_2gpu_before.sqlite", cache=False)
    table = communication.collectives(trace)
    assert table["kind"].value_counts().to_dict() == {"all_to_all": 64, "send/recv": 2}
    assert set(table["device"]) == {0, 1}
