"""Memory of tensors on a CPU: closed formulas, a limit, and what autograd keeps."""

from __future__ import annotations

import gc
import itertools

import pytest

torch = pytest.importorskip("torch")

from nsightkit.analysis.memory import snapshot as analysis  # noqa: E402
from nsightkit.trace import snapshot as reader  # noqa: E402
from nsightkit.workloads.tensor_memory import TensorMemory  # noqa: E402

MIB = 2**20


def test_views_and_in_place_operators_allocate_nothing() -> None:
    with TensorMemory() as memory:
        x = torch.zeros(256, 1024)  # 1 MiB
        assert memory.allocated_bytes == MIB
        y = x.t()[3:].view(-1, 4) if x.t()[3:].is_contiguous() else x.t()[3:]
        x.add_(1).mul_(2)
        assert memory.allocated_bytes == memory.peak_bytes == MIB
        del x
        assert memory.allocated_bytes == MIB  # its view holds the storage
        del y
        assert memory.allocated_bytes == 0


def test_the_peak_of_a_chain() -> None:
    x = torch.ones(MIB // 4)
    with TensorMemory() as memory:
        y = x + 1
        y = y * 2  # both results live for a moment
        assert (memory.allocated_bytes, memory.peak_bytes) == (MIB, 2 * MIB)
        memory.reset_peak()
        y = y.sin()
        assert memory.peak_bytes == 2 * MIB
    memory.count([x])
    assert memory.allocated_bytes == 2 * MIB
    del y
    assert memory.allocated_bytes == MIB


def test_what_autograd_saves_is_what_its_hooks_say() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.Tanh())
    x = torch.randn(128, 64)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with TensorMemory() as memory:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(x)
        # Saved: the inputs of GELU and of the second layer, and the output of Tanh, which is `out` itself.
        assert memory.allocated_bytes == sum(saved.values()) == 4 * 128 * (256 + 256 + 64)
        out.sum().backward()
        gradients = sum(p.grad.nbytes for p in model.parameters())
        del out
        gc.collect()
        assert memory.allocated_bytes == gradients


def test_a_limit_is_met_as_on_a_full_gpu() -> None:
    with TensorMemory(limit_bytes=3 * MIB) as memory:
        kept = torch.zeros(2 * MIB // 4)
        with pytest.raises(torch.OutOfMemoryError, match=f"tried to allocate {2 * MIB} bytes"):
            torch.zeros(2 * MIB // 4)
        assert memory.allocated_bytes == 2 * MIB  # what did not fit is gone
        assert torch.zeros(MIB // 4).nbytes == MIB  # and what fits, fits
        del kept
        torch.zeros(3 * MIB // 4)


def test_the_limit_holds_in_the_backward_pass() -> None:
    x = torch.ones(MIB // 4, requires_grad=True)
    with TensorMemory(limit_bytes=3 * MIB) as memory:
        memory.count([x])
        y = x.sin().cos()  # 3 MiB with what is saved
        with pytest.raises(torch.OutOfMemoryError):
            y.sum().backward()
        del y
        assert memory.allocated_bytes == MIB


def test_the_history_is_a_snapshot() -> None:
    with TensorMemory(history=True) as memory:
        x = torch.zeros(256)
        y = x + 1
        del x
    snapshot = memory.snapshot()
    (events,) = snapshot["device_traces"]
    sums = [(e["action"], e["size"]) for e in events if e["action"] in ("alloc", "free_completed")]
    assert sums == [("alloc", 1024), ("alloc", 1024), ("free_completed", 1024)]
    assert sum(s["allocated_size"] for s in snapshot["segments"]) == memory.allocated_bytes == y.nbytes
    here = [frame for frame in events[0]["frames"] if frame["filename"] == __file__]
    assert here[0]["name"] == "test_the_history_is_a_snapshot"
    assert all(a["time_us"] <= b["time_us"] for a, b in itertools.pairwise(events))


def test_ranges_are_kept_beside_the_history() -> None:
    with TensorMemory(history=True) as memory:
        with torch.profiler.record_function("outer"):
            x = torch.zeros(256)
            with torch.profiler.record_function("inner"):
                del x
        torch.zeros(1)
    found = reader.from_object(memory.snapshot())
    ranges = analysis.ranges(found).set_index("name")
    actions = found.events["action"].tolist()
    outer, inner = ranges.loc["outer"], ranges.loc["inner"]
    assert actions[outer["from_event"] + 1 : inner["from_event"] + 1] == ["segment_alloc", "alloc"]
    freed = ["free_requested", "free_completed", "segment_free"]
    assert actions[inner["from_event"] + 1 : outer["to_event"] + 1] == freed
    assert analysis.ranges(reader.from_object(TensorMemory().snapshot() | {"device_traces": [[]]})).empty


def test_the_error_of_a_full_device_is_an_event() -> None:
    with TensorMemory(limit_bytes=MIB, history=True) as memory:
        kept = torch.zeros(MIB // 8)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(MIB // 2)
    oom = analysis.summary(reader.from_object(memory.snapshot()))["oom"]
    assert oom["requested_bytes"] == 2 * MIB
    assert oom["allocated_bytes"] == kept.nbytes
    assert oom["device_free_bytes"] == MIB - kept.nbytes
    assert oom["site"].endswith("test_the_error_of_a_full_device_is_an_event")
