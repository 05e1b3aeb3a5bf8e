"""Count what a layer launches, operation by operation, without running it (pages 15, 17 and 18)."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsightkit.analysis.roofline.sol import Operation
from nsightkit.workloads import layer

_UNITS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
#: Operations that launch nothing, beside views.
_FREE = ("_unsafe_view", "empty", "new_empty")


class Counting(TorchDispatchMode):
    """Note operations that move data, each with its FLOPs and the bytes of what it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.prim.device.default:
            with self:  # in inference mode, operations arrive here that consist of others
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(_FREE):
            self.operations.append(_operation(name, args, kwargs, result))
        return result


class FusedAttention(TorchFunctionMode):
    """Count PyTorch's fused attention as one kernel, as on a GPU."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args
        out = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)  # as flash attention lays it out
        factor = 2 if kwargs["is_causal"] else 4  # causal attention needs half of the square
        flops = factor * q.numel() * k.shape[-2]
        self.counting.operations.append(Operation("attention", flops, _bytes([q, k, v, out]), _UNITS[q.dtype]))
        return out


def _operation(name: str, args: Any, kwargs: Any, result: Any) -> Operation:
    given = _tensors((args, kwargs))
    if name == "index_put_":  # of the tensor that is written to, only what is written moves
        return Operation(name, 0, 2 * _bytes([args[2]]), "fp32")
    read = given[1:] if name == "copy_" else given
    moved = _bytes({id(tensor): tensor for tensor in read}.values()) + _bytes(_tensors(result))
    if name in ("mm", "bmm"):
        return Operation(name, 2 * result.numel() * args[0].shape[-1], moved, _UNITS[result.dtype])
    # CUDA cores compute in fp32, also for bf16 tensors.
    return Operation(name, max((tensor.numel() for tensor in given), default=0), moved, "fp32")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensors: Any) -> int:
    """Bytes that tensors really have: an expanded dimension has one element."""
    total = 0
    for tensor in tensors:
        kept = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
        total += math.prod(kept, start=tensor.element_size())
    return total


def count(mode: str, rung: str, sizes: Mapping[str, Any]) -> list[Operation]:
    """Count what one layer of an eager rung launches.

    An operation counts with the bytes of the tensors it reads and writes, without any cache. Fused attention
    counts as one kernel, and with half of its square if it is causal.

    Parameters
    ----------
    mode, rung : str
        As in :data:`nsightkit.workloads.layer.RUNGS`; neither compiled nor in Triton.
    sizes : mapping
        ``batch, context, hidden, heads, d_ff``.

    Returns
    -------
    list of Operation
        In the order they are launched.
    """
    own = {name: sizes[name] for name in ("batch", "context", "hidden", "heads", "d_ff")}
    return list(_count(mode, rung, json.dumps(own)))


@functools.cache
def _count(mode: str, rung: str, sizes: str) -> tuple[Operation, ...]:
    implementation = layer.RUNGS[mode][rung]
    if implementation.compiled is not None or implementation.triton:
        raise ValueError(f"{rung} launches other operations than it is written with; ask for an eager rung")
    counting = Counting()
    work = layer.run("meta", mode=mode, rung=rung, layers=1, **json.loads(sizes))
    with work, torch.inference_mode(), counting, FusedAttention(counting):
        work.program()
    return tuple(counting.operations)
