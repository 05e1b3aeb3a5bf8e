"""Messages of allocators: which say that memory ran out, and how much was asked for."""

from __future__ import annotations

import pytest

from nsightkit.workloads.out_of_memory import is_out_of_memory, requested_bytes


def test_messages_of_allocators():
    torch = pytest.importorskip("torch")
    cuda = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB"
    assert requested_bytes(cuda) == 2.5 * 2**30
    assert requested_bytes("you tried to allocate 16777216 bytes. Error code 12") == 16_777_216
    assert requested_bytes("") is None
    assert is_out_of_memory(torch.OutOfMemoryError(cuda))
    assert is_out_of_memory(MemoryError())
    for message in ("can't allocate memory: you tried", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory"):
        assert is_out_of_memory(RuntimeError(message))
    for message in ("mat1 and mat2 shapes cannot be multiplied", "out of resource: shared memory, Required: 262144"):
        assert not is_out_of_memory(RuntimeError(message))
