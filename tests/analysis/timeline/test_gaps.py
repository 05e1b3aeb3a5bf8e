"""Causes of idle time: planted truths, hand-laid cases for each rule, and decoys that must not fool it."""

import contextlib
import sqlite3

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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", [None, "starved", "sync", "tiny", "pageable"])
def test_planted_training(tmp_path, fault, seed):
    truth = training(tmp_path / "t.sqlite", fault, seed=seed)
    trace = nsightkit.load(tmp_path / "t.sqlite")
    busy = intervals.busy(trace).iloc[0]
    assert (busy["span_ns"], busy["busy_ns"], busy["idle_ns"]) == (truth["span_ns"], truth["busy_ns"], truth["idle_ns"])
    found = gaps.summary(trace).set_index("cause")["total_ns"].to_dict()
    assert sum(found.values()) == truth["idle_ns"]
    for cause, planted in truth["gaps"].items():
        assert found[cause] == pytest.approx(planted, rel=0.02)


class Case:
    """Two kernels of one microsecond around a gap, and what the CPU did in between."""

    def __init__(self, gap=1000 * US, launch_before_end=3 * US, device=0):
        self.out = Export(gpus=2)
        self.dry, self.next = 100 * US, 100 * US + gap
        self.begun = self.next - launch_before_end
        first = self.out.call("cudaLaunchKernel_v7000", MAIN, 90 * US, 93 * US)
        self.out.kernel("a", 95 * US, self.dry, first, PROCESS, device=device)
        self.device = device

    def finish(self, tmp_path, thread=MAIN, call="cudaLaunchKernel_v7000", **options):
        correlation = self.out.call(call, thread, self.begun, self.begun + 2 * US)
        self.out.kernel("b", self.next, self.next + 1 * US, correlation, PROCESS, device=self.device)
        return self.one(tmp_path, **options)

    def one(self, tmp_path, **options):
        trace = nsightkit.load(self.out.write(tmp_path / "case.sqlite", shuffle=3))
        found = gaps.find(trace, **options)
        return found[found["device"] == self.device].iloc[0]


def test_profiler_overhead(tmp_path):
    case = Case()
    case.out.overhead("CUPTI buffer flush", MAIN, case.dry + 50 * US, case.dry + 700 * US)
    case.out.os_call("poll", MAIN, case.dry, case.begun)
    found = case.finish(tmp_path)
    assert found["cause"] == "profiler"
    assert found["evidence"]["name"] == "CUPTI buffer flush"


def test_overhead_of_another_thread_counts_and_that_of_another_process_does_not(tmp_path):
    # The profiler's worker threads flush its buffers: its work counts on whatever thread of the process.
    case = Case()
    case.out.overhead("flush", OTHER, case.dry, case.dry + 500 * US)
    case.out.range("tokenize", MAIN, case.dry + 10 * US, case.begun - 10 * US)
    assert case.finish(tmp_path)["cause"] == "profiler"
    case = Case()
    case.out.overhead("flush", OTHER, case.dry, case.dry + 400 * US)
    case.out.overhead("flush", Export.thread(99, 99), case.dry, case.next)
    case.out.range("tokenize", MAIN, case.dry + 10 * US, case.begun - 10 * US)
    assert case.finish(tmp_path)["cause"] == "cpu-work"


@pytest.mark.parametrize("name", ["Runtime Triggered Module Loading", "Lazy Function Loading", "Driver Compiler"])
def test_what_the_driver_loads_is_start_up(tmp_path, name):
    case = Case()
    case.out.overhead(name, MAIN, case.dry + 50 * US, case.dry + 700 * US)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("start-up", name)


def test_what_the_driver_loads_on_another_thread_is_not_start_up(tmp_path):
    case = Case()
    case.out.overhead("Lazy Function Loading", OTHER, case.dry, case.next)
    case.out.range("tokenize", MAIN, case.dry + 10 * US, case.begun - 10 * US)
    assert case.finish(tmp_path)["cause"] == "cpu-work"


def test_a_full_command_buffer_is_not_the_profilers(tmp_path):
    case = Case()
    case.out.overhead("Command Buffer Full", MAIN, case.dry, case.next)
    case.out.range("tokenize", MAIN, case.dry + 10 * US, case.begun - 10 * US)
    assert case.finish(tmp_path)["cause"] == "cpu-work"


@pytest.mark.parametrize(
    "name",
    [
        "dataload",
        "data_loading",
        "DataLoader",
        "next_batch",
        "get_batch",
        "load data",
        "batch_wait",
        "data wait",
        "load the next batch",
        "fetch data from disk",
        "prefetch_batch",
        "## wait_for_batch ##",
        "getNextBatch",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    ],
)
def test_data_loading_by_name(tmp_path, name):
    case = Case()
    case.out.range(name, MAIN, case.dry - 20 * US, case.begun - 100 * US)
    found = case.finish(tmp_path)
    assert found["cause"] == "input-pipeline"
    assert found["evidence"]["name"] == name
    assert found["evidence"]["launch"]["name"] == "cudaLaunchKernel"
    assert found["evidence"]["ended_by"] == "b"


def test_data_loading_names_are_configurable(tmp_path):
    case = Case()
    case.out.range("fütterung", MAIN, case.dry, case.begun)
    assert case.finish(tmp_path, data_loading="fütter")["cause"] == "input-pipeline"


@pytest.mark.parametrize(
    "name",
    [
        "load_state_dict",
        "metadata",
        "update",
        "dispatch batchnorm",
        "prefetch",
        "prefetch_layers_[4, 5]",
        "get_input_embeddings",
        "get_batch_size",
        "## sparse_data_dist ##",
        "upload_data",
    ],
)
def test_names_that_only_look_like_data_loading(tmp_path, name):
    case = Case()
    case.out.range(name, MAIN, case.dry + US, case.begun - US)
    assert case.finish(tmp_path)["cause"] == "cpu-work"


def test_os_waits(tmp_path):
    case = Case()
    case.out.os_call("pthread_cond_timedwait", MAIN, case.dry + 10 * US, case.dry + 600 * US)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["kind"]) == ("input-pipeline", "os_call")


def test_a_sleep_is_work_of_the_programs_own_choice(tmp_path):
    case = Case()
    case.out.os_call("clock_nanosleep", MAIN, case.dry + 10 * US, case.dry + 900 * US)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("cpu-work", "clock_nanosleep")


def test_a_wait_in_a_range_that_is_named_for_something_else_belongs_to_it(tmp_path):
    for name, cause in (("ensure_layer_3_weights", "cpu-work"), ("step 3", "input-pipeline")):
        case = Case()
        # Its last launch is its own, so it is not work without launches.
        case.out.range(name, MAIN, case.dry + 5 * US, case.begun + 20 * US)
        case.out.os_call("pthread_cond_wait", MAIN, case.dry + 10 * US, case.dry + 600 * US)
        found = case.finish(tmp_path)
        assert found["cause"] == cause
        assert found["evidence"]["name"] == (name if cause == "cpu-work" else "pthread_cond_wait")


def test_os_waits_short_of_half_are_not_enough(tmp_path):
    case = Case()
    case.out.os_call("poll", MAIN, case.dry + 10 * US, case.dry + 400 * US)
    assert case.finish(tmp_path)["cause"] == "unknown"


def test_os_wait_inside_a_cuda_call_is_the_drivers(tmp_path):
    case = Case()
    case.out.synchronize("cudaStreamSynchronize", MAIN, case.dry - 5 * US, case.dry + 900 * US)
    case.out.os_call("poll", MAIN, case.dry - 4 * US, case.dry + 890 * US)
    assert case.finish(tmp_path)["cause"] == "synchronization"


def test_synchronization_includes_the_time_until_the_next_launch(tmp_path):
    # It counts for as much as the wait held back: half of the gap, or the work of the CPU is the cause.
    case = Case(gap=100 * US)
    case.out.synchronize("cudaDeviceSynchronize", MAIN, case.dry - 45 * US, case.dry + 5 * US)
    case.out.range("logging", MAIN, case.dry + 10 * US, case.begun - 10 * US)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("synchronization", "cudaDeviceSynchronize")
    assert found["end_ns"] - found["start_ns"] == 100 * US


def test_a_synchronization_before_longer_work_of_the_cpu_is_not_its_cause(tmp_path):
    case = Case(gap=100 * US)
    case.out.synchronize("cudaDeviceSynchronize", MAIN, case.dry - 44 * US, case.dry + 5 * US)
    case.out.range("logging", MAIN, case.dry + 10 * US, case.begun - 10 * US)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("cpu-work", "logging")


@pytest.mark.parametrize(("name", "cause"), [("fgets", "input-pipeline"), ("getc", "cpu-work")])
def test_reading_a_file_is_waiting_for_data_and_a_person_at_a_terminal_is_not(tmp_path, name, cause):
    case = Case()
    case.out.os_call(name, MAIN, case.dry + 5 * US, case.begun - 5 * US)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == (cause, name)


def test_waits_one_after_the_other_count_together(tmp_path):
    for between, cause in ((False, "synchronization"), (True, "cpu-work")):
        case = Case(gap=100 * US)
        case.out.synchronize("cudaEventSynchronize", MAIN, case.dry - 60 * US, case.dry - 20 * US)
        if between:
            case.out.call("cudaLaunchKernel_v7000", MAIN, case.dry - 18 * US, case.dry - 16 * US)
        case.out.synchronize("cudaStreamSynchronize", MAIN, case.dry - 10 * US, case.dry + 2 * US)
        case.out.range("logging", MAIN, case.dry + 10 * US, case.begun - 10 * US)
        # 40 µs and 12: alone, neither is half of the gap.
        assert case.finish(tmp_path)["cause"] == cause


def test_a_blocking_call_that_returns_as_the_device_runs_dry_was_waiting_for_it(tmp_path):
    # It must have waited half as long as the gap lasts: without it the launch would have come that much earlier.
    case = Case(gap=90 * US)
    case.out.synchronize("cudaStreamSynchronize", MAIN, case.dry - 50 * US, case.dry)
    assert case.finish(tmp_path)["cause"] == "synchronization"


def test_a_blocking_call_that_begins_as_the_device_runs_dry_waits_for_nothing(tmp_path):
    case = Case()
    case.out.synchronize("cudaStreamSynchronize", MAIN, case.dry, case.dry + 2 * US)
    case.out.range("augment", MAIN, case.dry + 3 * US, case.begun)
    assert case.finish(tmp_path)["cause"] == "cpu-work"


def test_waiting_for_data_after_a_synchronization_is_waiting_for_data(tmp_path):
    case = Case()
    case.out.synchronize("cudaStreamSynchronize", MAIN, case.dry - 50 * US, case.dry + 5 * US)
    case.out.range("dataload", MAIN, case.dry + 10 * US, case.begun - 10 * US)
    assert case.finish(tmp_path)["cause"] == "input-pipeline"


def test_blocking_copy(tmp_path):
    # As with every wait, half of the gap must have been waited.
    case = Case(gap=110 * US)
    case.out.call("cudaMemcpy_v3020", MAIN, case.dry - 50 * US, case.dry + 5 * US)
    assert case.finish(tmp_path)["cause"] == "synchronization"


def test_synchronization_that_ended_before_the_device_ran_dry_is_innocent(tmp_path):
    case = Case()
    case.out.synchronize("cudaStreamSynchronize", MAIN, case.dry - 50 * US, case.dry - 2 * US)
    case.out.range("augment", MAIN, case.dry, case.begun)
    assert case.finish(tmp_path)["cause"] == "cpu-work"


def test_staging_pageable_memory(tmp_path):
    case = Case()
    case.begun = case.dry - 3 * US
    correlation = case.out.call("cudaMemcpyAsync_v3020", MAIN, case.begun, case.next + US)
    case.out.copy("HtoD", case.next, case.next + 9 * US, correlation, PROCESS, 1 << 20, host="pageable")
    found = case.one(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("memory-transfer", "cudaMemcpyAsync")


def test_waiting_for_a_copy_on_another_device(tmp_path):
    case = Case()
    case.begun = case.dry - 3 * US
    peer = case.out.call("cudaMemcpyPeerAsync", MAIN, case.dry - 9 * US, case.dry - 8 * US)
    case.out.copy("DtoD", case.dry - 5 * US, case.next - 2 * US, peer, PROCESS, 1 << 30, device=1)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["kind"]) == ("memory-transfer", "copy")


def test_consecutive_launches(tmp_path):
    found = Case(gap=40 * US).finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("launch-overhead", "cudaLaunchKernel")


@pytest.mark.parametrize(("gap", "cause"), [(1100 * US, "start-up"), (1000 * US, "launch-overhead")])
def test_a_launch_call_that_takes_the_whole_gap(tmp_path, gap, cause):
    # Ten times the median of its name and 1 ms: something was loaded or set up. Shorter ones are launches.
    case = Case(gap=gap)
    for number in range(5):
        case.out.call("cudaLaunchKernel_v7000", MAIN, (10 * number + 1) * US, (10 * number + 4) * US)
    correlation = case.out.call("cudaLaunchKernel_v7000", MAIN, case.dry + 20 * US, case.next - 2 * US)
    case.out.kernel("b", case.next, case.next + US, correlation, PROCESS)
    assert case.one(tmp_path)["cause"] == cause


def test_long_launch_calls_that_are_the_rule_are_not_start_up(tmp_path):
    case = Case(gap=3000 * US)
    for number in range(5):
        case.out.call("cudaLaunchKernel_v7000", OTHER, (2000 * number + 10_000) * US, (2000 * number + 11_900) * US)
    correlation = case.out.call("cudaLaunchKernel_v7000", MAIN, case.dry + 20 * US, case.next - 2 * US)
    case.out.kernel("b", case.next, case.next + US, correlation, PROCESS)
    assert case.one(tmp_path)["cause"] == "launch-overhead"


def test_a_launch_call_that_waits_in_a_full_queue_is_not_start_up(tmp_path):
    case = Case(gap=4 * US)
    for number in range(5):
        case.out.call("cudaLaunchKernel_v7000", MAIN, (10 * number + 1) * US, (10 * number + 4) * US)
    correlation = case.out.call("cudaLaunchKernel_v7000", MAIN, 95 * US, case.next + 1900 * US)
    case.out.kernel("b", case.next, case.next + 5000 * US, correlation, PROCESS)
    assert case.one(tmp_path)["cause"] == "launch-overhead"


def test_a_first_launch_that_was_hidden_in_part_is_start_up_for_the_rest(tmp_path):
    case = Case(gap=2000 * US)
    for number in range(5):
        case.out.call("cudaLaunchKernel_v7000", MAIN, (10 * number + 1) * US, (10 * number + 4) * US)
    # 10 ms under work of the device, then 2 ms without.
    case.out.kernel("long", case.dry - 10_000 * US, case.dry, next(case.out.correlations), PROCESS)
    correlation = case.out.call("cudaLaunchKernel_v7000", MAIN, case.dry - 9_990 * US, case.next - 2 * US)
    case.out.kernel("b", case.next, case.next + US, correlation, PROCESS)
    assert case.one(tmp_path)["cause"] == "start-up"


def test_two_first_calls_of_four_are_start_up(tmp_path):
    case = Case(gap=5000 * US)
    for number, lasting in enumerate((1500, 3400, 1, 1)):
        start = case.dry + (10 + 1501 * min(number, 1) + 3401 * (number > 1) + 5 * number) * US
        case.out.call("cudaFree_v3020", MAIN, start, start + lasting * US)
    assert case.finish(tmp_path)["cause"] == "start-up"
    trace = nsightkit.load(tmp_path / "case.sqlite")
    start, end = Threads(trace).one_offs(int(trace["calls"]["thread"].iloc[0]))
    assert (end - start).sum() == 4900 * US


@pytest.mark.parametrize(("rounds", "cause"), [(3, "start-up"), (10, "cpu-work")])
def test_what_takes_long_in_every_round_is_not_start_up(tmp_path, rounds, cause):
    """Ten rounds: in some of them one call of eleven that free takes 5 ms, and in the first one 100 ms."""
    out, now = Export(), 1_000 * US
    for number in range(10):
        launch = out.call("hipLaunchKernel", MAIN, now, now + 5 * US)
        out.kernel("k", now + 8 * US, now + 108 * US, launch, PROCESS)
        now += 120 * US
        for each in range(11):
            lasting = (100_000 if number == 0 else 5_000) if each == 10 and number < rounds else 2
            out.call("hipFree", MAIN, now, now + lasting * US)
            now += (lasting + 1) * US
    trace = nsightkit.load(out.write(tmp_path / "case.sqlite"))
    found = gaps.causes(trace)
    long = found[found["end_ns"] - found["start_ns"] > 1_000 * US]
    assert long["cause"].tolist()[0] == "start-up"  # ten times what it takes in the other rounds
    assert set(long["cause"].iloc[1:]) == {cause}
    assert set(long["name"]) == {"hipFree"}


@pytest.mark.parametrize(("freed", "cause"), [(60, "synchronization"), (10, "cpu-work"), (None, "synchronization")])
def test_memory_is_freed_when_the_device_is_idle_whatever_went_before(tmp_path, freed, cause):
    """Without the wait the thread would wait to free: what it does from there on comes no sooner."""
    case = Case(gap=100 * US)
    case.out.call("cudaMemcpy2D_v3020", MAIN, case.dry - 95 * US, case.dry + 2 * US)
    if freed is not None:
        case.out.call("cudaFree_v3020", MAIN, case.dry + freed * US, case.dry + (freed + 5) * US)
    case.out.call("cudaMallocPitch_v3020", MAIN, case.dry + 66 * US, case.begun - 10 * US)
    case.out.call("cudaMalloc_v3020", MAIN, case.dry + 20 * US, case.dry + 59 * US)
    assert case.finish(tmp_path)["cause"] == cause


def test_what_a_call_that_frees_does_on_an_idle_device_is_its_own_work(tmp_path):
    case = Case(gap=100 * US)
    case.out.call("cudaFree_v3020", MAIN, case.dry - 500 * US, case.dry + 60 * US)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("cpu-work", "cudaFree")


def test_capturing_a_graph_is_start_up(tmp_path):
    case = Case(gap=400 * US)
    case.out.call("cudaStreamBeginCapture_v10000", MAIN, case.dry + 10 * US, case.dry + 11 * US)
    for number in range(10):
        at = case.dry + (20 + 20 * number) * US
        case.out.call("cudaLaunchKernel_v7000", MAIN, at, at + US)
    case.out.call("cudaStreamEndCapture_v10000", MAIN, case.dry + 220 * US, case.dry + 230 * US)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("start-up", "cudaStreamBeginCapture")


@pytest.mark.parametrize("name", ["inductor_compile (dynamo_timed)", "triton.compile", "Nvrtc::CompileProgram"])
def test_compiling_is_start_up(tmp_path, name):
    case = Case()
    case.out.range(name, MAIN, case.dry + 10 * US, case.begun - 10 * US)
    assert case.finish(tmp_path)["cause"] == "start-up"


def test_waiting_for_code_that_other_threads_compile_is_start_up(tmp_path):
    """As JAX compiles: on a pool of threads, and loads the code when it is ready."""
    for loads, cause in ((True, "start-up"), (False, "input-pipeline")):
        case = Case(gap=20_000 * US)
        case.out.os_call("futex", MAIN, case.dry + 100 * US, case.begun - 500 * US)
        call = "cuModuleLoadFatBinary" if loads else "cuCtxSetCurrent"
        case.out.call(call, MAIN, case.begun - 480 * US, case.begun - 100 * US)
        found = case.finish(tmp_path)
        assert (found["cause"], found["evidence"]["name"]) == (cause, "futex")


def test_a_page_that_moves_is_judged_by_the_next_launch(tmp_path):
    """Nobody launches a page of managed memory: the thread that touched it is the one that launches next."""
    case = Case(gap=200 * US)
    case.out.range("look at the result", MAIN, case.dry + 10 * US, case.begun - 5 * US)
    case.out.copy("DtoH", case.dry + 150 * US, case.dry + 152 * US, 0, PROCESS, 4096)
    case.finish(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "case.sqlite")) as file, file:
        file.execute("UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET copyKind = 12")
    found = gaps.find(nsightkit.load(tmp_path / "case.sqlite", cache=False)).iloc[0]
    assert (found["cause"], found["evidence"]["name"]) == ("cpu-work", "look at the result")
    assert found["evidence"]["ended_by"] == "memcpy unified DtoH"


def test_setting_up_a_communicator_is_start_up(tmp_path):
    case = Case(gap=20_000 * US)
    case.out.range("ncclCommInitRank", MAIN, case.dry - 50 * US, case.next + 50 * US)
    for number in range(10):
        case.out.call("cudaHostAlloc_v3020", MAIN, case.dry + 1_900 * number * US, case.dry + 1_900 * (number + 1) * US)
    assert case.finish(tmp_path)["cause"] == "start-up"


@pytest.mark.parametrize("name", ["Torch-Compiled Region: 0/0", "CompiledFunction", "## Call CompiledFxGraph f7 ##"])
def test_running_what_was_compiled_is_not_compiling(tmp_path, name):
    case = Case()
    case.out.range(name, MAIN, case.dry + 10 * US, case.begun - 10 * US)
    assert case.finish(tmp_path)["cause"] == "cpu-work"


def test_cpu_work_is_named_by_its_innermost_range(tmp_path):
    case = Case()
    case.out.range("step", MAIN, 0, case.next + 50 * US)
    case.out.range("evaluate", MAIN, case.dry + 2 * US, case.begun - 2 * US)
    case.out.range("bleu", MAIN, case.dry + 3 * US, case.begun - 3 * US)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("cpu-work", "bleu")


def test_short_cpu_work_between_launches_is_named_too(tmp_path):
    case = Case(gap=60 * US)
    case.out.range("python_hook", MAIN, case.dry + US, case.begun - US)
    assert case.finish(tmp_path)["cause"] == "cpu-work"


def test_framework_operators_between_launches_are_dispatch(tmp_path):
    case = Case(gap=60 * US)
    case.out.range("aten::empty, op_id = 7", MAIN, case.dry + US, case.begun - US)
    assert case.finish(tmp_path)["cause"] == "launch-overhead"


def test_calls_that_launch_nothing(tmp_path):
    case = Case()
    case.out.call("cuModuleLoadData", MAIN, case.dry + 5 * US, case.begun - 5 * US)
    found = case.finish(tmp_path)
    # Loading code happens once; a call that launches nothing and can happen again is work.
    assert (found["cause"], found["evidence"]["name"]) == ("start-up", "cuModuleLoadData")
    case = Case()
    case.out.call("cudaHostRegister", MAIN, case.dry + 5 * US, case.begun - 5 * US)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("cpu-work", "cudaHostRegister")


def test_a_long_silence_is_unknown(tmp_path):
    assert Case(gap=5000 * US).finish(tmp_path)["cause"] == "unknown"


def test_an_operation_without_its_launch_is_unknown(tmp_path):
    case = Case()
    case.out.kernel("orphan", case.next, case.next + US, 9_999_999, PROCESS)
    found = case.one(tmp_path)
    assert found["cause"] == "unknown"
    assert "launch" not in found["evidence"]


def test_the_same_correlation_id_in_another_process_is_not_the_launch(tmp_path):
    case = Case()
    stranger = Export.thread(99, 99)
    correlation = next(case.out.correlations)
    case.out.call("cudaLaunchKernel_v7000", stranger, case.dry, case.dry + 2 * US, correlation)
    case.out.range("dataload", stranger, case.dry, case.next)
    case.out.range("checkpoint", MAIN, case.dry + US, case.begun - US)
    case.out.call("cudaLaunchKernel_v7000", MAIN, case.begun, case.begun + US, correlation)
    case.out.kernel("b", case.next, case.next + US, correlation, PROCESS)
    assert case.one(tmp_path)["cause"] == "cpu-work"


def test_a_queued_operation_starts_late_for_no_recorded_reason(tmp_path):
    # What lies in the queue of an idle device waits for something that the trace does not show: `queued` says so.
    case = Case()
    case.begun = case.dry - 30 * US
    case.out.range("logging", MAIN, case.dry, case.next)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("queued", "cudaLaunchKernel")


@pytest.mark.parametrize(
    ("gap", "lay", "cause"), [(100, 50, "queued"), (100, 49, "launch-overhead"), (40, 20, "launch-overhead")]
)
def test_a_queued_operation_lay_there_for_half_of_the_gap(tmp_path, gap, lay, cause):
    case = Case(gap=gap * US)
    case.begun = case.next - (lay + 2) * US  # and the call takes two
    assert case.finish(tmp_path)["cause"] == cause


def test_a_queued_operation_that_waited_for_another_device_is_not_queued(tmp_path):
    """For a kernel there that ran through half of the gap."""
    for lasting, cause in ((600, "unknown"), (400, "queued")):
        case = Case()
        case.begun = case.dry - 3 * US
        there = case.out.call("cudaLaunchKernel_v7000", OTHER, case.dry - 9 * US, case.dry - 8 * US)
        case.out.kernel("stage 1", case.next - (2 + lasting) * US, case.next - 2 * US, there, PROCESS, device=1)
        found = case.finish(tmp_path)
        assert found["cause"] == cause
        assert found["evidence"]["name"] == ("stage 1" if cause == "unknown" else "cudaLaunchKernel")


def test_a_full_queue_costs_its_microseconds(tmp_path):
    case = Case(gap=2 * US)
    case.begun = case.dry - 30 * US
    assert case.finish(tmp_path)["cause"] == "launch-overhead"


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
            (Threads.one_offs, [(600, 620), (1_000, 2_500), (2_600, 2_700)]),
            # Of the other thread only while the device was idle: it ran from 4 to 9, 24 to 29, 44 to 49 µs.
            (Threads.profiler_time, [(10, 30), (30, 44), (49, 50)]),
        ],
    )
    def test_exactly(self, trace, what, found):
        start, end = what(Threads(trace), MAIN & (2**48 - 1))
        together = intervals.merge([a * US for a, _ in found], [b * US for _, b in found])
        assert [start.tolist(), end.tolist()] == [t.tolist() for t in together]

    def test_what_stays_if_launches_are_free(self, trace):
        start, end = Threads(trace).dispatch_free(MAIN & (2**48 - 1))
        parts = [(200, 320), (330, 340), (400, 500), (600, 620), (1_000, 2_500), (2_600, 2_700)]
        # Between the malloc and the launch of 1.5 ms lie 540 µs: too long for dispatch, as is what follows the last.
        parts += [(460, 1_000), (2_700, 9_000)]
        together = intervals.merge([a * US for a, _ in parts], [b * US for _, b in parts])
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
        case = Case(gap=60 * US)
        case.out.os_call("pthread_cond_wait", OTHER, 1 * US, case.begun - 5 * US)
        assert case.finish(tmp_path, thread=OTHER)["cause"] == "launch-overhead"

    def test_what_the_main_thread_did_before_handing_over(self, tmp_path):
        # Its wait of 10 µs must be half of the gap, as on one thread.
        case = Case(gap=20 * US)
        case.out.synchronize("cudaStreamSynchronize", MAIN, case.dry - 6 * US, case.dry + 4 * US)
        case.out.os_call("pthread_cond_wait", OTHER, 1 * US, case.begun - 5 * US)
        found = case.finish(tmp_path, thread=OTHER)
        assert (found["cause"], found["evidence"]["name"]) == ("synchronization", "cudaStreamSynchronize")

    def test_main_waiting_for_autograd_is_not_waiting_for_data(self, tmp_path):
        case = Case(gap=200 * US)
        case.out.os_call("pthread_cond_wait", MAIN, case.dry - 80 * US, case.begun - 5 * US)
        case.out.call("cudaEventRecord_v3020", OTHER, case.dry + 150 * US, case.dry + 152 * US)
        last = case.out.call("cudaLaunchKernel_v7000", OTHER, case.dry - 20 * US, case.dry - 18 * US)
        case.out.kernel("backward", case.dry - 2 * US, case.dry, last, PROCESS)
        assert case.finish(tmp_path)["cause"] == "launch-overhead"

    def test_data_loading_after_the_backward_pass_is_data_loading(self, tmp_path):
        case = Case()
        last = case.out.call("cudaLaunchKernel_v7000", OTHER, case.dry - 20 * US, case.dry - 18 * US)
        case.out.kernel("backward", case.dry - 2 * US, case.dry, last, PROCESS)
        case.out.os_call("pthread_cond_wait", OTHER, case.dry - 10 * US, case.next + 500 * US)
        case.out.range("dataload", MAIN, case.dry + 20 * US, case.begun - 20 * US)
        found = case.finish(tmp_path)
        assert (found["cause"], found["evidence"]["name"]) == ("input-pipeline", "dataload")

    def test_a_worker_idling_after_its_work_is_no_cause(self, tmp_path):
        case = Case()
        last = case.out.call("cudaLaunchKernel_v7000", OTHER, case.dry - 20 * US, case.dry - 18 * US)
        case.out.kernel("backward", case.dry - 2 * US, case.dry, last, PROCESS)
        case.out.os_call("pthread_cond_wait", OTHER, case.dry - 10 * US, case.next + 500 * US)
        case.out.range("metrics", MAIN, case.dry + 20 * US, case.begun - 20 * US)
        assert case.finish(tmp_path)["cause"] == "cpu-work"


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
    assert intervals.busy(trace)["idle_ns"].tolist() == [0]


def test_thresholds_and_selection(tmp_path):
    truth = training(tmp_path / "t.sqlite", "starved")
    trace = nsightkit.load(tmp_path / "t.sqlite")
    long = gaps.find(trace, min_ns=1_000_000)
    assert set(long["cause"]) == {"input-pipeline"}
    assert (long["duration_ns"] >= 1_000_000).all()
    assert gaps.find(trace)["duration_ns"].sum() == truth["idle_ns"]


def test_a_bad_pattern_is_the_users_fault(tmp_path):
    training(tmp_path / "t.sqlite", None, steps=1)
    with pytest.raises(nsightkit.UsageError, match="regular expression"):
        gaps.summary(nsightkit.load(tmp_path / "t.sqlite"), data_loading="(")


class TestRealTraces:
    def test_resnet_before_and_after(self, shared_traces):
        before = nsightkit.load(next(shared_traces.glob("kineto/resnet50_num_workers_0*")))
        after = nsightkit.load(next(shared_traces.glob("kineto/resnet50_num_workers_4*")))
        first = gaps.summary(before).set_index("cause")
        second = gaps.summary(after).set_index("cause")
        assert first.index[0] == "input-pipeline"
        # torch-tb-profiler attributes 33.4 % of these steps to the DataLoader; idle is what of it the GPU felt.
        assert 0.25 < first.loc["input-pipeline", "share_of_span"] < 0.34
        assert second.index[0] != "input-pipeline"
        assert "input-pipeline" not in second.index or second.loc["input-pipeline", "share_of_span"] < 0.01

    def test_graph_replays_and_copies_are_not_idle(self, shared_traces):
        trace = nsightkit.load(shared_traces / "cs336-zx3xyy" / "result_2_7B_compile_ro.sqlite")
        assert gaps.summary(trace)["total_ns"].sum() < 500 * US
        assert intervals.busy(trace)["busy_ns"].tolist() == [7_811_219_965]

    def test_causes_sum_to_idle_and_phases_to_busy_on_all(self, shared_traces):
        for path in sorted([*shared_traces.glob("*/*.sqlite"), *shared_traces.glob("*/*.json.gz")]):
            trace = nsightkit.load(path)
            busy = intervals.busy(trace)
            assert gaps.summary(trace)["total_ns"].sum() == busy["idle_ns"].sum(), path.name
            if trace.recorded("kernels") and trace.recorded("calls"):
                found = phases.summary(trace, match="(?i)forward|backward|optim|loss|data|softmax|matmul")
                assert found["gpu_ns"].sum() == busy["busy_ns"].sum(), path.name


def test_the_wait_of_an_earlier_blocking_copy_is_not_spent_again(tmp_path):
    # Each copy waits, and gives the device work: what the one before waited for is not what this gap waits for.
    case = Case(gap=100 * US)
    case.out.call("cudaMemcpy", MAIN, case.dry - 60 * US, case.dry - 12 * US)
    case.out.call("cudaMemcpy", MAIN, case.dry - 11 * US, case.dry + 2 * US)
    case.out.range("random numbers", MAIN, case.dry + 10 * US, case.begun - 10 * US)
    assert case.finish(tmp_path)["cause"] == "cpu-work"


def test_work_is_named_by_the_innermost_range_that_covers_half_of_the_gap(tmp_path):
    case = Case(gap=100 * US)
    case.out.range("copy a layer", MAIN, case.dry + 5 * US, case.begun - 5 * US)
    case.out.range("copy w3", MAIN, case.dry + 40 * US, case.dry + 60 * US)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("cpu-work", "copy a layer")


def test_a_first_launch_is_start_up_where_most_launches_are_first_ones(tmp_path):
    case = Case(gap=3000 * US)
    for number in range(7):
        begun, new = 10_000 * US + number * 5000 * US, number < 4
        correlation = case.out.call("cudaLaunchKernel_v7000", MAIN, begun, begun + (2900 if new else 3) * US)
        name = f"other {number if new else 0}"
        case.out.kernel(name, begun + 2910 * US, begun + 2911 * US, correlation, PROCESS)
    correlation = case.out.call("cudaLaunchKernel_v7000", MAIN, case.dry + 20 * US, case.next - 2 * US)
    case.out.kernel("b", case.next, case.next + US, correlation, PROCESS)
    assert case.one(tmp_path)["cause"] == "start-up"


def test_a_call_that_is_cheap_otherwise_is_work_where_it_takes_long(tmp_path):
    case = Case(gap=900 * US)
    case.out.call("cudaGetDeviceProperties_v12000", MAIN, case.dry + 50 * US, case.dry + 800 * US)
    found = case.finish(tmp_path)
    assert (found["cause"], found["evidence"]["name"]) == ("cpu-work", "cudaGetDeviceProperties")


class TestSamples:
    """Samples of a thread, 0.5 ms apart, in a gap of five that nothing else explains."""

    def case(self, *frames, thread=MAIN, count=10, state=1):
        case = Case(gap=5000 * US)
        for number in range(count):
            case.out.sample(thread, case.dry + number * 500 * US, *frames, state=state)
        return case

    def test_they_name_the_work(self, tmp_path):
        case = self.case(("rand_normal", "/home/me/darknet"), ("main", "/home/me/darknet"), count=6)
        case.out.sample(MAIN, case.dry + 3000 * US, ("sin", "/lib/libm.so.6"))
        found = case.finish(tmp_path)
        evidence = found["evidence"]
        assert (found["cause"], evidence["kind"], evidence["name"]) == ("cpu-work", "sample", "rand_normal")
        assert (evidence["start_ns"], evidence["end_ns"]) == (10 * US, 510 * US)

    @pytest.mark.parametrize(
        ("planted", "cause"),
        [
            ({"count": 4}, "unknown"),
            ({"thread": OTHER}, "unknown"),
            ({"state": 2}, "unknown"),
            ({"count": 1}, "unknown"),
        ],
        ids=["too few", "another thread", "not running", "one of unknown length"],
    )
    def test_what_they_do_not_cover_is_unknown(self, tmp_path, planted, cause):
        assert self.case(("work", "a.out"), **planted).finish(tmp_path)["cause"] == cause

    def test_without_a_name_they_say_nothing(self, tmp_path):
        assert self.case().finish(tmp_path)["cause"] == "unknown"

    def test_no_earlier_rule_gives_way(self, tmp_path):
        case = self.case(("spin", "libcuda.so"))
        case.out.synchronize("cudaStreamSynchronize", MAIN, 94 * US, case.begun - US)
        assert case.finish(tmp_path)["cause"] == "synchronization"
        case = self.case(("parse", "a.out"))
        case.out.os_call("poll", MAIN, case.dry, case.begun)
        assert case.finish(tmp_path)["cause"] == "input-pipeline"
        case = self.case(("parse", "a.out"))
        case.out.range("tokenize", MAIN, case.dry, case.begun - US)
        assert case.finish(tmp_path)["evidence"]["name"] == "tokenize"

    def test_a_thread_that_runs_in_a_cuda_call_waits_for_the_gpu(self, tmp_path):
        case = self.case(("spin", "libcuda.so"))
        for number in range(10):  # calls that enqueue, not longer than the samples are apart
            begun = case.dry + number * 500 * US - 200 * US
            case.out.call("cudaEventQuery_v3020", MAIN, begun, begun + 210 * US)
        assert case.finish(tmp_path)["cause"] != "cpu-work"

    def test_the_launching_thread_is_asked_whatever_else_was_sampled(self, tmp_path):
        case = self.case(("work", "a.out"), thread=OTHER)
        for number in range(10):
            case.out.sample(MAIN, case.dry + number * 500 * US + 7, ("mine", "a.out"))
        assert case.finish(tmp_path)["evidence"]["name"] == "mine"
