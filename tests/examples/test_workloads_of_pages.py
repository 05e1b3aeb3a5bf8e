"""Workloads of single pages: what they compute, what they keep, and what they say of it."""

from __future__ import annotations

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from _lib import accumulation, leak, limiters, memory_steps  # noqa: E402

MODEL = {"batch": 2, "context": 16, "d_model": 32, "layers": 2, "d_ff": 64, "heads": 2, "vocabulary": 96}
LIMITERS = {"side": 32, "side_fp32": 48, "elements": 4096, "rows": 4, "programs": 8, "hops": 5, "table": 512}


# -- accumulation


def totals(**changes: object) -> pd.Series:
    """The last total of each sum."""
    with accumulation.run("cpu", **changes) as work:
        return pd.DataFrame(work.rows()).groupby("sum")["total"].last()


def test_sums_are_those_of_a_loop_in_the_accumulators_type():
    found = totals(addend=0.01, count=300)
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        total = torch.zeros((), dtype=dtype)
        for _ in range(300):
            total = total + torch.tensor(0.01, dtype=dtype)
        assert found[name] == float(total)


def test_blocks_lose_less_and_must_divide_the_count():
    assert totals(addend=1.0, count=300)["bf16"] == 256  # where half a spacing is the addend
    plain, blocks = totals(), totals(block=25)
    assert abs(blocks["bf16"] - 10) < abs(plain["bf16"] - 10)
    with pytest.raises(ValueError, match="do not divide"):
        accumulation.run("cpu", count=10, block=3)


# -- memory


def test_sizes_that_follow_from_the_model():
    with memory_steps.run("cpu", **MODEL) as work:
        assert work.samples()["optimizer_states_bytes"] == [0]  # they come with the first step
        work.step()
        samples = work.samples()
    weights = sum(parameter.nbytes for parameter in work.model.parameters())
    assert samples["weights_bytes"] == samples["gradients_bytes"] == [weights]
    assert samples["optimizer_states_bytes"] == [2 * weights]
    assert len(samples["loss"]) == 1
    assert "forward_peak_bytes" not in samples  # a CPU has no allocator that counts


def test_contexts_until_memory_runs_out(monkeypatch: pytest.MonkeyPatch):
    step = memory_steps.MemoryRun.step

    def fail(self: memory_steps.MemoryRun):
        if self.config.context == 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(self)

    monkeypatch.setattr(memory_steps.MemoryRun, "step", fail)
    with memory_steps.contexts("cpu", **(MODEL | {"context": [8, 16, 32, 64]})) as work:
        rows = list(work.rows())
    assert [(row["context"], row["status"]) for row in rows] == [(8, "ok"), (16, "ok"), (32, "oom")]
    with memory_steps.contexts("cpu", context=[8], width=3) as work, pytest.raises(TypeError, match="width"):
        list(work.rows())


# -- the leak


def test_a_kept_graph_is_kept_and_a_bare_number_is_not():
    for keep_graph in (True, False):
        with leak.run("cpu", **MODEL, keep_graph=keep_graph) as work:
            work.step()
            work.step()
            assert [entropy.requires_grad for entropy in work.entropies] == 2 * [keep_graph]
            assert len(work.samples()["loss"]) == 2


def test_the_graph_holds_eight_bytes_a_logit():
    seen: dict[int, int] = {}
    with leak.run("cpu", **MODEL, keep_graph=True) as work:
        logits = torch.randn(2, 16, 96, requires_grad=True)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            work._watch(work.model, None, logits)
    assert sum(seen.values()) == 8 * logits.numel()


def test_until_full_ends_with_the_error_or_after_three_steps(monkeypatch: pytest.MonkeyPatch):
    with leak.run("cpu", **MODEL, keep_graph=True, limit_bytes=10**9) as work:
        work.step()
        assert work.samples() == {"steps": [3]}
        step = leak.Watched.step

        def fail(self: leak.Watched):
            if len(self.entropies) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            step(self)

        monkeypatch.setattr(leak.Watched, "step", fail)
        work.step()
        assert work.samples() == {"steps": [2]}
        work.step()  # one batch, as steps that are timed and profiled later
        assert len(work.entropies) == 1
        assert work.samples() == {"steps": [2]}


# -- limiters


def test_each_limiter_computes_what_it_says():
    with limiters.run("cpu", **LIMITERS) as work:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watch:
            work.step()
        results = {name: operation() for name, operation in work.operations.items()}
    phases = sorted((e for e in watch.events() if e.name in limiters.CASES), key=lambda e: e.time_range.start)
    assert [event.name for event in phases] == list(results) == list(limiters.CASES)
    assert (results["product"].dtype, results["product_fp32"].dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(results["add"][::8], results["strided"][: 4096 // 8])  # the same numbers, from afar
    torch.testing.assert_close(results["softmax"].sum(-1), torch.ones(4))


def test_the_walk_follows_the_table():
    following = torch.randperm(16).to(torch.int32)
    held = torch.ones(3, 4)
    walked = limiters.walk(following, held, hops=4)
    for start in range(3):
        at = start
        for _ in range(4):
            at = int(following[at])
        assert float(walked[start]) == 4 * at
