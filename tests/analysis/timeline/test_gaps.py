"""Causes of idle time: planted truths, hand-laid cases for each rule, and decoys that must not fool it."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Any

import pytest
from synthetic.planted import Export, training

import nsightkit
from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import gaps, phases
from nsightkit.analysis.timeline.gaps.threads import Threads

US = 1_000
PID = 77
PROCESS = Export.process(PID)
MAIN, OTHER = Export.thread(PID, PID), Export.thread(PID, PID + 1)
STRANGER = Export.thread(99, 99)


@pytest.mark.parametrize("fault", [None, "starved", "sync", "tiny", "pageable"])
def test_planted_training(tmp_path, fault):
    truth = training(tmp_path / "t.sqlite", fault, seed=1)
    trace = nsightkit.load(tmp_path / "t.sqlite")
    busy = intervals.busy(trace).iloc[0]
    assert (busy["span_ns"], busy["busy_ns"], busy["idle_ns"]) == (truth["span_ns"], truth["busy_ns"], truth["idle_ns"])
    found = gaps.summary(trace).set_index("cause")["total_ns"].to_dict()
    assert sum(found.values()) == truth["idle_ns"]
    for cause, planted in truth["gaps"].items():
        assert found[cause] == pytest.approx(planted, rel=0.02)
    long = gaps.find(trace, min_ns=1_000_000)
    assert (long["duration_ns"] >= 1_000_000).all()


class Case:
    """Two kernels of one microsecond around a gap, and what the CPU did in between; times in µs since it ran dry."""

    def __init__(self, gap: int = 1000, launched: int | None = None) -> None:
        self.out, self.gap, self.dry = Export(gpus=2), gap, 20_000
        self.launched = gap - 3 if launched is None else launched
        self.kernel("a", -1, 0, (-10, -7))

    def at(self, time: int) -> int:
        return (self.dry + time) * US

    def kernel(
        self, name: str, start: int, end: int, call: tuple[int, int], thread: int = MAIN, device: int = 0
    ) -> None:
        launch = self.out.call("cudaLaunchKernel_v7000", thread, self.at(call[0]), self.at(call[1]))
        self.out.kernel(name, self.at(start), self.at(end), launch, PROCESS, device=device)

    def add(self, kind: str, name: str, start: int, end: int, thread: int = MAIN, **options: Any) -> None:
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
    ([("overhead", "Driver Compiler", 50, 700)], "start-up", "Driver Compiler"),
    ([("overhead", "Lazy Function Loading", 0, 1000, OTHER), ("range", "tokenize", 10, 987)], "cpu-work", "tokenize"),
    ([("range", "triton.compile", 10, 987)], "start-up", "triton.compile"),
    ([("range", "inductor_compile (dynamo_timed)", 10, 987)], "start-up", "inductor_compile (dynamo_timed)"),
    ([("range", "Nvrtc::CompileProgram", 10, 987)], "start-up", "Nvrtc::CompileProgram"),
    ([("range", "Torch-Compiled Region: 0/0", 10, 987)], "cpu-work", "Torch-Compiled Region: 0/0"),
    ([("range", "ncclCommInitRank", -50, 1050)], "start-up", "ncclCommInitRank"),
    ([("call", "cuModuleLoadData", 5, 992)], "start-up", "cuModuleLoadData"),
    # data, by name or by waits
    ([("range", "dataload", -20, 900)], "input-pipeline", "dataload"),
    ([("range", "next_batch", -20, 900)], "input-pipeline", "next_batch"),
    ([("range", "load the next batch", -20, 900)], "input-pipeline", "load the next batch"),
    ([("range", "enumerate(DataLoader)#_Single.__next__", -20, 900)], "input-pipeline", ""),
    ([("range", "load_state_dict", 1, 996)], "cpu-work", "load_state_dict"),
    ([("range", "prefetch_layers_[4, 5]", 1, 996)], "cpu-work", ""),
    ([("range", "get_input_embeddings", 1, 996)], "cpu-work", ""),
    ([("range", "get_batch_size", 1, 996)], "cpu-work", ""),
    ([("os_call", "pthread_cond_timedwait", 10, 600)], "input-pipeline", "pthread_cond_timedwait"),
    ([("os_call", "fread", 5, 992)], "input-pipeline", "fread"),
    ([("os_call", "poll", 10, 400)], "unknown", ""),
    ([("os_call", "poll", 0, 997), ("range", "read_and_wait", 5, 990)], "cpu-work", "read_and_wait"),
    # sleeps are the program's choice, input from a person at a terminal nobody's
    ([("os_call", "clock_nanosleep", 10, 900)], "cpu-work", "clock_nanosleep"),
    ([("os_call", "getc", 5, 992)], "unknown", "getc"),
    ([("os_call", "fgets", 5, 992)], "unknown", "fgets"),
    # messages
    ([("os_call", "MPI_Allreduce", 5, 992), ("os_call", "poll", 6, 990)], "communication", "MPI_Allreduce"),
    ([("os_call", "ucp_worker_progress", 5, 992)], "communication", "ucp_worker_progress"),
    ([("os_call", "nvshmem_barrier_all", 5, 992)], "communication", "nvshmem_barrier_all"),
    ([("range", "ncclAllReduce", 5, 992)], "communication", "ncclAllReduce"),
    # work
    ([("range", "step", -50, 1050), ("range", "evaluate", 2, 995), ("range", "bleu", 3, 994)], "cpu-work", "bleu"),
    ([("call", "cudaHostRegister", 5, 992)], "cpu-work", "cudaHostRegister"),
    ([("call", "cudaGetDeviceProperties_v12000", 50, 900)], "cpu-work", "cudaGetDeviceProperties"),
    # a wait that was over, or began, as the device ran dry is no cause
    ([("synchronize", "cudaStreamSynchronize", -50, -2), ("range", "augment", 0, 997)], "cpu-work", "augment"),
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
    ([("synchronize", "cudaStreamSynchronize", -50, 0)], "synchronization", "cudaStreamSynchronize"),
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
    (
        [("call", "cudaMemcpy", -60, -12), ("call", "cudaMemcpy", -11, 2), ("range", "random numbers", 10, 87)],
        "cpu-work",
        "random numbers",
    ),
]


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
    assert found["evidence"]["launch"]["name"] == "cudaLaunchKernel"
    assert found["evidence"]["ended_by"] == "b"


def test_data_loading_names_are_configurable(tmp_path):
    case = Case()
    case.add("range", "fütterung", 0, 997)
    assert case.found(tmp_path, data_loading="fütter")["cause"] == "input-pipeline"
    with pytest.raises(nsightkit.UsageError, match="regular expression"):
        gaps.summary(nsightkit.load(tmp_path / "case.sqlite"), data_loading="(")


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


def test_the_first_launch_of_a_program_is_start_up(tmp_path):
    """A program of a few calls, all of which set something up: no other launch says what is ordinary."""
    out = Export()
    for name, start, end in (("cudaMalloc_v3020", 0, 90_000), ("cudaFree_v3020", 120_000, 121_000)):
        out.call(name, MAIN, start * US, end * US)
    upload = out.call("cudaMemcpyAsync_v3020", MAIN, 90_010 * US, 90_020 * US)
    out.copy("HtoD", 90_030 * US, 90_100 * US, upload, PROCESS, 4096, host="pinned")
    launch = out.call("cudaLaunchKernel_v7000", MAIN, 90_100 * US, 96_600 * US)
    out.kernel("k", 96_610 * US, 96_700 * US, launch, PROCESS)
    found = gaps.find(nsightkit.load(out.write(tmp_path / "t.sqlite")))
    assert (found["cause"].tolist(), found["evidence"].iloc[0]["name"]) == (["start-up"], "cudaLaunchKernel")


def test_a_launch_call_that_waits_in_a_full_queue_is_not_start_up(tmp_path):
    case = Case(gap=4)
    for number in range(5):
        case.add("call", "cudaLaunchKernel_v7000", number * 10 - 100, number * 10 - 97)
    case.kernel("b", 4, 5004, (-5, 1904))
    assert case.only(tmp_path)["cause"] == "launch-overhead"


@pytest.mark.parametrize(("rounds", "cause"), [(3, "start-up"), (20, "cpu-work")])
def test_what_takes_long_in_every_round_is_not_start_up(tmp_path, rounds, cause):
    out, now = Export(), 1_000 * US
    for number in range(20):
        launch = out.call("hipLaunchKernel", MAIN, now, now + 5 * US)
        out.kernel("k", now + 8 * US, now + 108 * US, launch, PROCESS)
        now += 120 * US
        for lasting in (2, 2, 2, 5_000 if number >= 20 - rounds else 2):
            out.call("hipFree", MAIN, now, now + lasting * US)
            now += (lasting + 1) * US
    found = gaps.causes(nsightkit.load(out.write(tmp_path / "case.sqlite")))
    long = found[found["end_ns"] - found["start_ns"] > 1_000 * US]
    assert set(long["cause"]) == {cause}
    assert set(long["name"]) == {"hipFree"}


def test_capturing_a_graph_is_start_up(tmp_path):
    case = Case(gap=400)
    case.add("call", "cudaStreamBeginCapture_v10000", 10, 11)
    for number in range(10):
        case.add("call", "cudaLaunchKernel_v7000", 20 + 20 * number, 21 + 20 * number)
    case.add("call", "cudaStreamEndCapture_v10000", 220, 230)
    found = case.found(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("start-up", "cudaStreamBeginCapture")


def test_staging_pageable_memory(tmp_path):
    case = Case()
    upload = case.out.call("cudaMemcpyAsync_v3020", MAIN, case.at(-3), case.at(1001))
    case.out.copy("HtoD", case.at(1000), case.at(1009), upload, PROCESS, 1 << 20, host="pageable")
    found = case.only(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("memory-transfer", "cudaMemcpyAsync")


def test_pages_that_move_one_after_another_are_a_transfer(tmp_path):
    """Nobody launches a page of managed memory: the thread that touched it is the one that launches next."""
    case = Case(gap=1000)
    case.add("range", "look at the result", 10, 480)
    for number in range(10):
        start = 500 + 45 * number
        case.out.copy("DtoH", case.at(start), case.at(start + 2), 0, PROCESS, 4096)
    case.found(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "case.sqlite")) as file, file:
        file.execute("UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET copyKind = 12")
    found = gaps.find(nsightkit.load(tmp_path / "case.sqlite", cache=False))
    assert found["cause"].tolist()[:3] == ["cpu-work", "memory-transfer", "memory-transfer"]
    assert found["evidence"].iloc[0]["ended_by"] == "memcpy unified DtoH"


def test_an_operation_without_its_launch_is_unknown(tmp_path):
    case = Case()
    case.out.kernel("orphan", case.at(1000), case.at(1001), 9_999_999, PROCESS)
    found = case.only(tmp_path)
    assert found["cause"] == "unknown"
    assert "launch" not in found["evidence"]


def test_the_same_correlation_id_in_another_process_is_not_the_launch(tmp_path):
    case = Case()
    correlation = next(case.out.correlations)
    for thread, start in ((STRANGER, 0), (MAIN, 997)):
        case.out.call("cudaLaunchKernel_v7000", thread, case.at(start), case.at(start + 2), correlation)
    case.add("range", "dataload", 0, 1000, STRANGER)
    case.add("range", "checkpoint", 1, 996)
    case.out.kernel("b", case.at(1000), case.at(1001), correlation, PROCESS)
    assert case.only(tmp_path)["cause"] == "cpu-work"


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


class TestWhatAThreadDid:
    """The same facts without gaps, as the replay of a trace takes them: exact intervals."""

    @pytest.fixture
    def trace(self, tmp_path):
        out = Export()
        for number in range(8):  # ordinary launches, 3 µs each
            correlation = out.call("cudaLaunchKernel_v7000", MAIN, (20 * number) * US, (20 * number + 3) * US)
            out.kernel("k", (20 * number + 4) * US, (20 * number + 9) * US, correlation, PROCESS)
        out.range("step 1", MAIN, 0, 9_000 * US)
        out.range("dataload", MAIN, 200 * US, 300 * US)
        out.os_call("poll", MAIN, 290 * US, 320 * US)
        out.os_call("clock_nanosleep", MAIN, 330 * US, 340 * US)
        out.range("ensure_layer_3_weights", MAIN, 400 * US, 500 * US)
        out.os_call("poll", MAIN, 410 * US, 480 * US)
        out.call("cudaMalloc_v3020", MAIN, 450 * US, 460 * US)
        out.os_call("MPI_Wait", MAIN, 510 * US, 520 * US)
        out.overhead("Lazy Function Loading", MAIN, 600 * US, 620 * US)
        out.call("cudaLaunchKernel_v7000", MAIN, 1_000 * US, 2_500 * US)
        out.call("cuModuleLoadData", MAIN, 2_600 * US, 2_700 * US)
        out.overhead("CUPTI Buffer flush", MAIN, 10 * US, 30 * US)
        out.overhead("CUPTI Buffer flush", OTHER, 15 * US, 50 * US)
        return nsightkit.load(out.write(tmp_path / "t.sqlite", shuffle=1))

    @pytest.mark.parametrize(
        ("what", "found"),
        [
            (Threads.input_waits, [(200, 320)]),
            (Threads.own_work, [(330, 340), (400, 450), (460, 500)]),
            (Threads.messages, [(510, 520)]),
            (Threads.once, [(600, 620), (1_000, 2_500), (2_600, 2_700)]),
            # Of the other thread only while the device was idle: it ran from 4 to 9, 24 to 29, 44 to 49 µs.
            (Threads.profiler, [(10, 30), (30, 44), (49, 50)]),
            # Between the malloc and the launch of 1.5 ms lie 540 µs: too long for dispatch, as is the end.
            (Threads.dispatch_free, [(200, 320), (330, 340), (400, 2_500), (2_600, 9_000)]),
        ],
    )
    def test_exactly(self, trace, what, found):
        start, end = what(Threads(trace), MAIN & (2**48 - 1))
        together = intervals.merge([a * US for a, _ in found], [b * US for _, b in found])
        assert [start.tolist(), end.tolist()] == [t.tolist() for t in together]

    def test_waiting_for_another_thread_that_feeds_the_device_is_not_waiting_for_data(self, tmp_path):
        out = Export(gpus=2)
        for thread, device, at in ((MAIN, 0, 0), (OTHER, 0, 100), (OTHER + 1, 1, 400)):
            correlation = out.call("cudaLaunchKernel_v7000", thread, at * US, (at + 3) * US)
            out.kernel("k", (at + 4) * US, (at + 9) * US, correlation, PROCESS, device=device)
        out.os_call("pthread_cond_wait", MAIN, 50 * US, 200 * US)
        out.os_call("poll", MAIN, 300 * US, 500 * US)
        trace = nsightkit.load(out.write(tmp_path / "t.sqlite"))
        start, end = Threads(trace).input_waits(MAIN & (2**48 - 1))
        assert (start.tolist(), end.tolist()) == ([300 * US], [500 * US])


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

    def test_main_waiting_for_autograd_is_not_waiting_for_data(self, tmp_path):
        case = Case(gap=200)
        case.add("os_call", "pthread_cond_wait", -80, 192)
        case.add("call", "cudaEventRecord_v3020", 150, 152, OTHER)
        case.kernel("backward", -2, 0, (-20, -18), OTHER)
        assert case.found(tmp_path)["cause"] == "launch-overhead"

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
        case = self.case(("rand_normal", "/home/me/darknet"), ("main", "/home/me/darknet"), count=6)
        case.out.sample(MAIN, case.at(3000), ("sin", "/lib/libm.so.6"))
        evidence = case.found(tmp_path)["evidence"]
        assert (evidence["kind"], evidence["name"]) == ("sample", "rand_normal")

    @pytest.mark.parametrize("planted", [{"count": 4}, {"thread": OTHER}, {"state": 2}], ids=str)
    def test_what_they_do_not_cover_is_unknown(self, tmp_path, planted):
        assert self.case(("work", "a.out"), **planted).found(tmp_path)["cause"] == "unknown"

    def test_without_a_name_they_say_nothing(self, tmp_path):
        assert self.case().found(tmp_path)["cause"] == "unknown"

    def test_a_thread_that_runs_in_a_cuda_call_waits_for_the_gpu(self, tmp_path):
        case = self.case(("spin", "libcuda.so"))
        for number in range(10):  # calls that enqueue, not longer than the samples are apart
            case.add("call", "cudaEventQuery_v3020", 500 * number - 200, 500 * number + 10)
        assert case.found(tmp_path)["cause"] != "cpu-work"


def test_decoys_with_a_busy_device_cost_nothing(tmp_path):
    """A sync with a full queue, tiny kernels beside a long one, a data-loading range while the device works."""
    out = Export()
    long = out.call("cudaLaunchKernel_v7000", MAIN, 0, 2 * US)
    out.kernel("long", 5 * US, 5_000 * US, long, PROCESS, stream=7)
    for i in range(50):
        tiny = out.call("cudaLaunchKernel_v7000", MAIN, (10 + 20 * i) * US, (12 + 20 * i) * US)
        out.kernel("tiny", (14 + 20 * i) * US, (15 + 20 * i) * US, tiny, PROCESS, stream=8)
    out.range("dataload", MAIN, 1_100 * US, 3_000 * US)
    out.synchronize("cudaStreamSynchronize", MAIN, 3_000 * US, 4_000 * US)
    trace = nsightkit.load(out.write(tmp_path / "decoys.sqlite"))
    assert gaps.summary(trace).empty


def test_causes_sum_to_idle_and_phases_to_busy_on_real_traces(shared_traces):
    for path in sorted([*shared_traces.glob("*/*.sqlite"), *shared_traces.glob("*/*.json.gz")]):
        trace = nsightkit.load(path)
        busy = intervals.busy(trace)
        found = gaps.summary(trace).set_index("cause")
        assert found["total_ns"].sum() == busy["idle_ns"].sum(), path.name
        if "resnet50_num_workers_0" in path.name:
            # torch-tb-profiler attributes 33.4 % of these steps to the DataLoader; idle is what of it the GPU felt.
            assert 0.25 < found.loc["input-pipeline", "share_of_span"] < 0.34
        if trace.recorded("kernels") and trace.recorded("calls"):
            split = phases.summary(trace, match="(?i)forward|backward|optim|loss|data|softmax|matmul")
            assert split["gpu_ns"].sum() == busy["busy_ns"].sum(), path.name
