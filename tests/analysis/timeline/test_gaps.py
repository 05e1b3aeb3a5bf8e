"""Causes of idle time: planted truths, hand-laid cases for each rule, and decoys that must not fool it."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Any

import numpy as np
import pytest
from synthetic.planted import Export

import nsightkit
from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import compiler, gaps, phases
from nsightkit.analysis.timeline.gaps import threads
from nsightkit.analysis.timeline.gaps.threads import LABELS

US = 1_000
PID = 77
PROCESS = Export.process(PID)
MAIN, OTHER = Export.thread(PID, PID), Export.thread(PID, PID + 1)
STRANGER = Export.thread(99, 99)


class Case:
    """Two kernels of one microsecond around a gap, and what the CPU did in between; times in µs since it ran dry."""

    def __init__(self, gap: int = 1000, launched: int | None = None):
        self.out, self.gap, self.dry = Export(gpus=2), gap, 20_000
        self.launched = gap - 3 if launched is None else launched
        self.kernel("a", -1, 0, (-10, -7))

    def at(self, time: int) -> int:
        return (self.dry + time) * US

    def kernel(self, name: str, start: int, end: int, call: tuple[int, int], thread: int = MAIN, device: int = 0):
        launch = self.out.call("cudaLaunchKernel_v7000", thread, self.at(call[0]), self.at(call[1]))
        self.out.kernel(name, self.at(start), self.at(end), launch, PROCESS, device=device)

    def add(self, kind: str, name: str, start: int, end: int, thread: int = MAIN, **options: Any):
        getattr(self.out, kind)(name, thread, self.at(start), self.at(end), **options)

    def found(self, tmp_path: Any, thread: int = MAIN, **options: Any) -> Any:
        self.kernel("b", self.gap, self.gap + 1, (self.launched, self.launched + 2), thread)
        return self.only(tmp_path, **options)

    def only(self, tmp_path: Any, **options: Any) -> Any:
        found = gaps.find(nsightkit.load(self.out.write(tmp_path / "case.sqlite", shuffle=3)), **options)
        found = found[found["device"] == 0]
        by_b = [evidence["ended_by"] == "b" for evidence in found["evidence"]]
        return (found[by_b] if any(by_b) else found).iloc[-1]


# The events of a gap, and its cause with the name of the evidence ("" where only the cause counts). Of events: kind,
# name, start and end in µs since the device ran dry, and the thread where it is not the launching one. The gap lasts
# 1000 µs, and the launch that ends it begins 3 µs before its end.
COVERING = [
    # the profiler, on any thread of the process, but not what it says of the driver
    ([("overhead", "CUPTI flush", 50, 700), ("os_call", "poll", 0, 997)], "profiler", "CUPTI flush"),
    ([("overhead", "flush", 0, 500, OTHER), ("range", "tokenize", 10, 987)], "profiler", ""),
    ([("overhead", "flush", 0, 1000, STRANGER), ("range", "tokenize", 10, 987)], "cpu-work", "tokenize"),
    ([("overhead", "Command Buffer Full", 0, 1000), ("range", "tokenize", 10, 987)], "cpu-work", "tokenize"),
    # what happens once
    ([("overhead", "Lazy Function Loading", 50, 700)], "start-up", "Lazy Function Loading"),
    ([("overhead", "Lazy Function Loading", 0, 1000, OTHER), ("range", "tokenize", 10, 987)], "cpu-work", "tokenize"),
    ([("range", "triton.compile", 10, 987)], "start-up", "triton.compile"),
    ([("range", "ncclCommInitRank", -50, 1050)], "start-up", "ncclCommInitRank"),
    ([("call", "cuModuleLoadData", 5, 992)], "start-up", "cuModuleLoadData"),
    (
        [
            ("call", "cudaStreamBeginCapture_v10000", 10, 11),
            *(("call", "cudaLaunchKernel_v7000", at, at + 1) for at in range(20, 500, 20)),
            ("call", "cudaStreamEndCapture_v10000", 520, 530),
        ],
        "start-up",
        "cudaStreamBeginCapture",
    ),
    # data, by name or by waits
    ([("range", "dataload", -20, 900)], "input-pipeline", "dataload"),
    ([("os_call", "pthread_cond_timedwait", 10, 600)], "input-pipeline", "pthread_cond_timedwait"),
    ([("os_call", "poll", 10, 400)], "unknown", ""),
    ([("os_call", "poll", 0, 997), ("range", "read_and_wait", 5, 990)], "cpu-work", "read_and_wait"),
    # sleeps are the program's choice, input from a person at a terminal nobody's
    ([("os_call", "clock_nanosleep", 10, 900)], "cpu-work", "clock_nanosleep"),
    ([("os_call", "getc", 5, 992)], "unknown", "getc"),
    # messages
    ([("os_call", "MPI_Allreduce", 5, 992), ("os_call", "poll", 6, 990)], "communication", "MPI_Allreduce"),
    ([("range", "ncclAllReduce", 5, 992)], "communication", "ncclAllReduce"),
    # work
    ([("range", "step", -50, 1050), ("range", "evaluate", 2, 995), ("range", "bleu", 3, 994)], "cpu-work", "bleu"),
    ([("call", "cudaHostRegister", 5, 992)], "cpu-work", "cudaHostRegister"),
    # a wait that was over, or began, as the device ran dry is no cause
    ([("synchronize", "cudaStreamSynchronize", 0, 2), ("range", "augment", 3, 997)], "cpu-work", "augment"),
    ([("synchronize", "cudaStreamSynchronize", -50, 5), ("range", "dataload", 10, 987)], "input-pipeline", "dataload"),
    # an OS wait inside a CUDA call is the driver's
    ([("synchronize", "cudaStreamSynchronize", -5, 900), ("os_call", "poll", -4, 890)], "synchronization", ""),
    # a library's threads that load data while the launching one is silent
    ([("range", "[DALI][CPU op] readers__File", 10, 990, OTHER)], "input-pipeline", "[DALI][CPU op] readers__File"),
    ([("range", "[DALI][CPU op] readers__File", 10, 990, OTHER), ("range", "bleu", 3, 994)], "cpu-work", "bleu"),
    ([], "unknown", ""),
]


# The same in gaps of 100 µs: a wait counts for as much as it held back, half of the gap, or the CPU's work is the
# cause.
SHORT = [
    ([], "launch-overhead", "cudaLaunchKernel"),
    ([("range", "aten::empty, op_id = 7", 1, 96)], "launch-overhead", ""),
    ([("range", "python_hook", 1, 96)], "cpu-work", "python_hook"),
    ([("range", "copy a layer", 5, 92), ("range", "copy w3", 40, 60)], "cpu-work", "copy a layer"),
    ([("synchronize", "cudaDeviceSynchronize", -45, 5), ("range", "logging", 10, 87)], "synchronization", ""),
    ([("synchronize", "cudaDeviceSynchronize", -44, 5), ("range", "logging", 10, 87)], "cpu-work", "logging"),
    ([("call", "cudaMemcpy_v3020", -55, 5)], "synchronization", "cudaMemcpy"),
    # freeing memory is work of the call's own
    ([("call", "cudaFree_v3020", -500, 60)], "cpu-work", "cudaFree"),
    # waits in a row count together, unless the device was given work in between
    (
        [
            ("synchronize", "cudaEventSynchronize", -60, -20),
            ("synchronize", "cudaStreamSynchronize", -10, 2),
            ("range", "logging", 10, 87),
        ],
        "synchronization",
        "cudaStreamSynchronize",
    ),
    (
        [
            ("synchronize", "cudaEventSynchronize", -60, -20),
            ("call", "cudaLaunchKernel_v7000", -18, -16),
            ("synchronize", "cudaStreamSynchronize", -10, 2),
            ("range", "logging", 10, 87),
        ],
        "cpu-work",
        "logging",
    ),
]


@pytest.mark.parametrize(
    ("expression", "meant", "others"),
    [
        (
            threads.DATA,
            "next_batch|load the next batch|enumerate(DataLoader)#_Single.__next__|data_time|collate_fn",
            "load_state_dict|prefetch_layers_[4, 5]|get_input_embeddings|get_batch_size",
        ),
        (compiler.COMPILES, "inductor_compile (dynamo_timed)|Nvrtc::CompileProgram", "Torch-Compiled Region: 0/0"),
        (threads.LOADS, "Lazy Function Loading|Driver Compiler", "Command Buffer Full"),
        (threads.MESSAGES, "ucp_worker_progress|nvshmem_barrier_all|MPI_Wait", "MPI_Init|ncclCommInitRank"),
        (threads.OS_WAIT, "fread|poll|futex|pthread_cond_wait", "usleep|read_and_wait"),
    ],
)
def test_names_by_meaning(expression, meant, others):
    assert all(map(expression.search, meant.split("|")))
    assert not any(map(expression.search, others.split("|")))


@pytest.mark.parametrize(
    ("gap", "events", "cause", "name"), [*((1000, *row) for row in COVERING), *((100, *row) for row in SHORT)]
)
def test_what_the_thread_did_in_the_gap(tmp_path, gap, events, cause, name):
    case = Case(gap=gap)
    for event in events:
        case.add(*event)
    found = case.found(tmp_path)
    assert found["cause"] == cause
    if name:
        assert found["evidence"]["name"] == name
    assert found["evidence"]["ended_by"] == "b"


@pytest.mark.parametrize(("first", "cause"), [(1, "recompilation"), (-1, "start-up")])
@pytest.mark.parametrize(
    "event", [("range", "triton.compile", 10, 990), ("call", "cuModuleLoadData", 5, 992)], ids=["range", "call"]
)
def test_a_compiler_in_a_settled_step_recompiles(tmp_path, event, first, cause):
    case = Case()
    for number in range(4):  # the gap lies in the last step, or in the first
        start = 1_100 * (number - (3 if first > 0 else 0)) - 50
        case.add("range", f"train_step {number}", start, start + 1_099)
        case.kernel("k", start + 60 if start > 0 else -3, start + 61 if start > 0 else -2, (start + 1, start + 4))
    case.add(*event)
    assert case.found(tmp_path)["cause"] == cause


@pytest.mark.parametrize(
    ("others", "gap", "cause"),
    [
        # ten times what nine tenths of the calls of its name take, and 1 ms
        ([3] * 5, 1100, "start-up"),
        ([3] * 5, 1000, "launch-overhead"),
        ([1900] * 5, 3000, "launch-overhead"),
    ],
)
def test_a_launch_call_that_takes_the_whole_gap(tmp_path, others, gap, cause):
    case = Case(gap)
    for number, lasting in enumerate(others):
        case.add("call", "cudaLaunchKernel_v7000", 2000 * number - 18_000, 2000 * number - 18_000 + lasting, OTHER)
    case.kernel("b", gap, gap + 1, (20, gap - 2))
    assert case.only(tmp_path)["cause"] == cause


def test_staging_pageable_memory(tmp_path):
    case = Case()
    upload = case.out.call("cudaMemcpyAsync_v3020", MAIN, case.at(-3), case.at(1001))
    case.out.copy("HtoD", case.at(1000), case.at(1009), upload, PROCESS, 1 << 20, host="pageable")
    found = case.only(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("memory-transfer", "cudaMemcpyAsync")


def test_pages_that_move_one_after_another_are_a_transfer(tmp_path):
    case = Case(gap=1000)
    for number in range(10):
        start = 500 + 45 * number
        case.out.copy("DtoH", case.at(start), case.at(start + 2), 0, PROCESS, 4096)
    case.found(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "case.sqlite")) as file, file:
        file.execute("UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET copyKind = 12")
    found = gaps.find(nsightkit.load(tmp_path / "case.sqlite", cache=False))
    assert found["cause"].tolist()[1:3] == ["memory-transfer", "memory-transfer"]
    assert found["evidence"].iloc[0]["ended_by"] == "memcpy unified DtoH"


@pytest.mark.parametrize(
    ("gap", "launched", "cause"),
    # It lay in the queue for half of the gap, and for 20 µs.
    [(1000, -30, "queued"), (100, 48, "queued"), (100, 49, "launch-overhead"), (40, 18, "launch-overhead")],
)
def test_a_queued_operation_starts_late_for_no_recorded_reason(tmp_path, gap, launched, cause):
    case = Case(gap, launched)
    case.add("range", "epoch", -90, gap)
    found = case.found(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == (cause, "cudaLaunchKernel")


# Of a thread that launches every 20 µs up to 143 µs: kind, name, start and end in µs.
DID = [
    ("range", "step 1", 0, 9_000),
    ("range", "dataload", 200, 300),
    ("os_call", "poll", 290, 320),
    ("os_call", "clock_nanosleep", 330, 340),
    ("range", "ensure_layer_3_weights", 400, 500),
    ("os_call", "poll", 410, 480),
    ("call", "cudaMalloc_v3020", 450, 460),
    ("os_call", "MPI_Wait", 510, 520),
    ("overhead", "Lazy Function Loading", 600, 620),
    ("call", "cudaLaunchKernel_v7000", 1_000, 2_500),
    ("call", "cuModuleLoadData", 2_600, 2_700),
    # The first in time sets up, though its row comes second.
    ("call", "cudaMallocHost_v3020", 4_000, 5_100),
    ("call", "cudaMallocHost_v3020", 6_000, 7_100),
    ("overhead", "CUPTI Buffer flush", 10, 30),
]


@pytest.mark.parametrize(
    ("what", "times"),
    [
        ("data", [(200, 320)]),
        ("work", [(330, 340), (400, 500), (6_000, 7_100)]),
        ("messages", [(510, 520)]),
        ("once", [(600, 620), (1_000, 2_500), (2_600, 2_700), (4_000, 5_100)]),
        ("profiler", [(10, 50)]),  # on any thread
        # Between the malloc and the launch of 1.5 ms lie 540 µs: too long for dispatch, as is the end.
        ("free of dispatch", [(10, 50), (200, 320), (330, 340), (400, 2_500), (2_600, 9_000)]),
    ],
)
def test_what_a_thread_did(tmp_path, what, times):
    """The same facts without gaps, as the replay of a trace takes them: exact intervals."""
    out = Export()
    for start in range(0, 160, 20):
        correlation = out.call("cudaLaunchKernel_v7000", MAIN, start * US, (start + 3) * US)
        out.kernel("k", (start + 4) * US, (start + 9) * US, correlation, PROCESS)
    for kind, name, start, end in DID:
        getattr(out, kind)(name, MAIN, start * US, end * US)
    out.overhead("CUPTI Buffer flush", OTHER, 15 * US, 50 * US)
    facts = threads.Threads(nsightkit.load(out.write(tmp_path / "t.sqlite", shuffle=7)))
    thread = MAIN & (2**48 - 1)
    found = np.transpose(facts.when(thread, [what]) if what in LABELS else facts.dispatch_free(thread))
    merged = np.transpose(intervals.merge(*np.transpose(times)))
    assert found.tolist() == (US * merged).tolist()


class TestHandOver:
    """Work that changes threads: forward on one, backward on autograd's, the optimizer on the first again."""

    def test_autograd_waiting_for_work_is_not_waiting_for_data(self, tmp_path):
        case = Case(gap=60)
        case.add("os_call", "pthread_cond_wait", -99, 52, OTHER)
        assert case.found(tmp_path, thread=OTHER)["cause"] == "launch-overhead"

    def test_what_the_main_thread_did_before_handing_over(self, tmp_path):
        # Its wait of 10 µs must be half of the gap, as on one thread.
        case = Case(gap=20)
        case.add("synchronize", "cudaStreamSynchronize", -6, 4)
        case.add("os_call", "pthread_cond_wait", -99, 12, OTHER)
        found = case.found(tmp_path, thread=OTHER)
        assert (found["cause"], found["evidence"]["name"]) == ("synchronization", "cudaStreamSynchronize")

    @pytest.mark.parametrize(("name", "cause"), [("dataload", "input-pipeline"), ("metrics", "cpu-work")])
    def test_after_the_backward_pass_the_main_thread_is_asked(self, tmp_path, name, cause):
        case = Case()
        case.kernel("backward", -2, 0, (-20, -18), OTHER)
        case.add("os_call", "pthread_cond_wait", -10, 1500, OTHER)
        case.add("range", name, 20, 977)
        found = case.found(tmp_path)
        assert (found["cause"], found["evidence"]["name"]) == (cause, name)


class TestSamples:
    """Samples of a thread, 0.5 ms apart, in a gap of five that nothing else explains."""

    def case(self, *frames, thread=MAIN, count=10, state=1):
        case = Case(gap=5000)
        for number in range(count):
            case.out.sample(thread, case.at(number * 500), *frames, state=state)
        return case

    def test_they_name_the_work(self, tmp_path):
        case = self.case(("rand_normal", "/home/me/darknet"), ("main", "/home/me/darknet"))
        evidence = case.found(tmp_path)["evidence"]
        assert (evidence["kind"], evidence["name"]) == ("sample", "rand_normal")

    def test_the_name_of_most_of_the_time_counts_not_the_longest_sample(self, tmp_path):
        case = Case(gap=5000)
        for start in (10, 500, 1_000, 1_500, 2_200, 2_700, 3_200, 3_700, 4_200, 4_700):
            case.out.sample(MAIN, case.at(start), ("parse" if start == 1_500 else "sha256", "a.out"))
        assert case.found(tmp_path)["evidence"]["name"] == "sha256"

    @pytest.mark.parametrize("planted", [{"count": 4}, {"thread": OTHER}, {"state": 2}], ids=str)
    def test_what_they_do_not_cover_is_unknown(self, tmp_path, planted):
        assert self.case(("work", "a.out"), **planted).found(tmp_path)["cause"] == "unknown"

    def test_a_thread_that_runs_in_a_cuda_call_waits_for_the_gpu(self, tmp_path):
        case = self.case(("spin", "libcuda.so"))
        for number in range(10):  # calls that enqueue, not longer than the samples are apart
            case.add("call", "cudaEventQuery_v3020", 500 * number - 200, 500 * number + 10)
        assert case.found(tmp_path)["cause"] != "cpu-work"


def test_decoys_with_a_busy_device_cost_nothing(tmp_path):
    """A sync with a full queue, tiny kernels beside a long one, a data-loading range while the device works."""
    case = Case()
    case.kernel("long", 0, 5_000, (-5, -3))
    for start in range(0, 1_000, 20):
        case.kernel("tiny", start + 4, start + 5, (start, start + 2))
    case.add("range", "dataload", 1_100, 3_000)
    case.add("synchronize", "cudaStreamSynchronize", 3_000, 4_000)
    trace = nsightkit.load(case.out.write(tmp_path / "decoys.sqlite"))
    assert gaps.summary(trace, min_ns=8 * US).empty


def test_causes_sum_to_idle_and_phases_to_busy_on_real_traces(shared_traces):
    for path in sorted([*shared_traces.glob("*/*.sqlite"), *shared_traces.glob("hta/*.json.gz")]):
        trace = nsightkit.load(path)
        busy = intervals.busy(trace)
        assert gaps.summary(trace)["total_ns"].sum() == busy["idle_ns"].sum(), path.name
        if trace.recorded("kernels") and trace.recorded("calls"):
            split = phases.summary(trace, match="(?i)forward|backward|optim|loss|data|softmax|matmul")
            assert split["gpu_ns"].sum() == busy["busy_ns"].sum(), path.name
