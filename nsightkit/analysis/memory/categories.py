"""For what a block was allocated: read from its call stack and its lifetime.

The stack says which phase made a block: forward, backward, optimizer, set-up. What is freed within the run of events of
its own phase is ``temporary``, but not what a forward pass keeps from layer to layer; what outlives it is an
activation, a gradient, an optimizer state or a weight; a gradient is also what ``AccumulateGrad`` allocates, and what
``zero_grad`` frees of backward's blocks. Some stacks name what they make, whatever its lifetime: ``logits`` (what the
loss makes), ``autocast copies``, ``KV cache``, ``communication``, ``workspaces``, ``inputs``. ``before recording`` is
what was there before the first event and has no stack; ``unknown`` is what no rule covers. In a snapshot with Python
frames only, a block without any frame counts as backward's, because autograd's threads have none, and sizes and counts
say which activations are really autocast's copies of weights, as they say it of its casts; cuBLAS's workspace is known
by its size.
"""

from __future__ import annotations

import re
from enum import IntFlag

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.memory.blocks import events_of, total_by_event
from nsightkit.trace.snapshot import Snapshot

__all__ = ["CATEGORIES", "categorize", "frame_text", "is_python", "sites_of"]

#: What a block can be; the order in which figures stack them.
CATEGORIES = (
    "weights",
    "optimizer states",
    "gradients",
    "activations",
    "logits",
    "autocast copies",
    "KV cache",
    "communication",
    "workspaces",
    "inputs",
    "temporary",
    "before recording",
    "unknown",
)
# aten/src/ATen/cuda/CublasHandlePool.cpp: the default, CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8, and that of Hopper.
_CUBLAS_BYTES, _CUBLAS_HOPPER_BYTES = 8_519_680, 32 << 20
#: What is still there when its own line has allocated so many more is kept.
_LAYERS = 2
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_Texts = npt.NDArray[np.object_]


class Sign(IntFlag):
    """What a frame says of the block that is allocated below it."""

    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 4
    SETUP = 8
    LOSS = 16
    COMMUNICATION = 32
    WORKSPACE = 64
    AUTOCAST = 128
    CACHE = 256
    INPUT = 512
    PYTHON = 1024
    ACCUMULATE = 2048
    ZERO_GRAD = 4096
    PRODUCT = 8192


#: A sign, a pattern of the function's name, and one of the file's: both must be in the frame.
_Pattern = tuple[Sign, str, str]

#: What a frame says, wherever it is in the stack.
_SIGNS: tuple[_Pattern, ...] = (
    (Sign.FORWARD, r"^forward$|^_forward$", r""),
    (Sign.FORWARD, r"^(_call_impl|_wrapped_call_impl)$", r"nn[/\\]modules[/\\]module\.py$"),
    (Sign.BACKWARD, r"torch::autograd::(Engine|Node|generated::\w+Backward|PyNode|AccumulateGrad)", r""),
    (Sign.ACCUMULATE, r"torch::autograd::AccumulateGrad", r""),
    (Sign.ZERO_GRAD, r"^zero_grad$", r""),
    (Sign.BACKWARD, r"^_engine_run_backward$", r""),
    (Sign.BACKWARD, r"^grad$", r"torch[/\\]autograd[/\\]__init__\.py$"),
    (Sign.BACKWARD, r"^backward$", r"\.py$"),
    (Sign.OPTIMIZER, r"^(?!zero_grad|__init__)", r"(?:^|[/\\])torch[/\\]optim[/\\]"),
    (Sign.OPTIMIZER, r"^(step|_single_tensor_\w+|_multi_tensor_\w+|_fused_\w+)$", r"(?i)optim[^/\\]*\.py$"),
    (Sign.SETUP, r"^(_apply|reset_parameters|to_empty|_load_from_state_dict|load_state_dict)$", r""),
    (Sign.SETUP, r"", r"(?:^|[/\\])torch[/\\]nn[/\\](init|parameter)\.py$"),
    (Sign.SETUP, r"^__init__$", r"(?:^|[/\\])torch[/\\]nn[/\\]modules[/\\]"),
    (Sign.LOSS, r"^(cross_entropy|log_softmax|nll_loss)$", r"torch[/\\]nn[/\\]functional\.py$"),
    (Sign.LOSS, r"::\w*(cross_entropy|log_softmax|nll_loss)", r""),
    (Sign.COMMUNICATION, r"^c10d::|::c10d::|ProcessGroup|Reducer::", r""),
    (Sign.COMMUNICATION, r"", r"distributed_c10d\.py$|_functional_collectives\.py$|_fsdp_collectives\.py$"),
    (Sign.WORKSPACE, r"CUDABlas(Lt)?Workspace|getCurrentCUDABlasHandle|gemm_and_bias|cudnn.*[wW]orkspace", r""),
    (Sign.AUTOCAST, r"at::autocast::cached_cast", r""),
    (Sign.CACHE, r"", r"(?:^|[/\\])cache_utils\w*\.py$"),
    (Sign.INPUT, r"", r"(?:^|[/\\])torch[/\\]utils[/\\]data[/\\]"),
    (Sign.PYTHON, r"", r"\.py$|^<"),
)
#: The same of the frame that allocated. Further out such names say nothing: a trainer's `__init__` may run everything.
_SITE_SIGNS: tuple[_Pattern, ...] = (
    (Sign.SETUP, r"^__init__$", r"\.py$"),
    (Sign.LOSS, r"cross_entropy|log_softmax|nll_loss", r"\.py$"),
    (Sign.CACHE, r"(?i)(^|_)kv_?cache", r"\.py$"),
    (Sign.CACHE, r"", r"(?i)(^|[/\\])[^/\\]*kv_?cache[^/\\]*\.py$"),
    (Sign.INPUT, r"^_?(get|load|next|make|sample|random)_batch$|^collate", r"\.py$"),
)
#: The same of the innermost frame.
_INNERMOST_SIGNS: tuple[_Pattern, ...] = (
    (Sign.PRODUCT, r"", r"torch[/\\]nn[/\\]modules[/\\](linear|conv)\.py$"),
    (Sign.PRODUCT, r"^(linear|einsum|conv\w*|b?matmul|b?mm)$", r"torch[/\\](nn[/\\])?functional\.py$"),
)
#: What outlives its phase, by the signs that say the phase. The first that holds decides, as the innermost cause does:
#: a forward pass recomputed in backward is backward's, a closure's passes in an optimizer's step are forward and
#: backward.
_FORWARD_PASS = Sign.FORWARD | Sign.LOSS
_KEPT_BY_PHASE = {
    Sign.BACKWARD: "gradients",
    _FORWARD_PASS: "activations",
    Sign.OPTIMIZER: "optimizer states",
    Sign.SETUP: "weights",
}
#: What a stack says whatever its phase; the last that holds decides.
_NAMED = {
    Sign.LOSS: "logits",
    Sign.INPUT: "inputs",
    Sign.CACHE: "KV cache",
    Sign.WORKSPACE: "workspaces",
    Sign.COMMUNICATION: "communication",
}
#: Names of recorded ranges that say a phase; the last that holds decides.
_ANNOTATED = {_FORWARD_PASS: "(?i)forward", Sign.OPTIMIZER: "(?i)optimizer", Sign.BACKWARD: "(?i)backward"}


# ---------------------------------------------------------------- what stacks say


def _signs_of_frames(snapshot: Snapshot, patterns: tuple[_Pattern, ...]) -> _Ints:
    compiled = [(sign, re.compile(name), re.compile(file)) for sign, name, file in patterns]
    signs = np.zeros(len(snapshot.frames), np.int64)
    for row, (function, filename) in enumerate(zip(snapshot.frames["name"], snapshot.frames["filename"], strict=True)):
        for sign, name, file in compiled:
            if name.search(function) and file.search(filename):
                signs[row] |= sign
    return signs


def _signs_of_stacks(snapshot: Snapshot) -> _Ints:
    """Say what the frames of each stack tell; one more at the end, for blocks without a stack, tells nothing."""
    heads = snapshot.stack_bounds[:-1]
    anywhere = _signs_of_frames(snapshot, _SIGNS)[snapshot.stack_frames]
    at_site = _signs_of_frames(snapshot, _SITE_SIGNS)[_site_frames(snapshot)]
    innermost = _signs_of_frames(snapshot, _INNERMOST_SIGNS)[snapshot.stack_frames[heads]]
    return np.append(np.bitwise_or.reduceat(anywhere, heads) | at_site | innermost, 0)


def _annotated_phases(snapshot: Snapshot, device: int, first: _Ints) -> _Ints:
    """Say which phase's recorded range an event lies in, where PyTorch recorded such ranges."""
    phases = np.zeros(len(first), np.int64)
    events = events_of(snapshot, device)
    marks = snapshot.annotations[snapshot.annotations["device"] == device]
    if not snapshot.timed or marks.empty or events.empty:
        return phases
    time = events["time_ns"].to_numpy()[np.maximum(first, 0)]
    for phase, pattern in _ANNOTATED.items():
        chosen = marks[marks["name"].str.contains(pattern, regex=True)].sort_values("time_ns", kind="stable")
        depth = np.cumsum(np.where(chosen["stage"].str.upper() == "START", 1, -1))
        place = np.searchsorted(chosen["time_ns"].to_numpy(), time, side="right")
        is_inside = np.append(0, depth)[place] > 0
        phases[is_inside & (first >= 0)] = phase
    return phases


# ---------------------------------------------------------------- categories


def categorize(snapshot: Snapshot, device: int, table: pd.DataFrame) -> _Texts:
    """Decide the category of each of the blocks that :func:`nsightkit.analysis.memory.blocks.held_blocks` lists."""
    events = events_of(snapshot, device)
    first = table["first"].to_numpy()
    freed = table["free_requested"].to_numpy()
    stack = table["stack"].to_numpy()
    signs_of_stacks = _signs_of_stacks(snapshot)
    signs = signs_of_stacks[stack]
    freeing = np.append(signs_of_stacks[events["stack"].to_numpy()], 0)[freed]
    is_recorded = first >= 0
    is_native = bool(snapshot.frames["name"].str.contains("::").any())
    is_python_only = not is_native and bool((signs[is_recorded] & Sign.PYTHON).any())

    phase = _annotated_phases(snapshot, device, first)
    for wanted in reversed(_KEPT_BY_PHASE):
        phase[(signs & wanted) > 0] = wanted
    if is_python_only:
        # Autograd's threads have no Python frames: a block with none at all was made by them. Where C++ frames were
        # recorded, the stack would say so itself.
        phase[is_recorded & (stack < 0) & (phase == 0)] = Sign.BACKWARD
    is_kept = _is_kept(table, events, phase)
    # A gradient may come and go while nothing but backward allocates. A hook with Python frames that runs inside of
    # AccumulateGrad makes what it likes.
    is_accumulated = (signs & (Sign.ACCUMULATE | Sign.PYTHON)) == Sign.ACCUMULATE
    is_kept |= (phase == Sign.BACKWARD) & (is_accumulated | ((freeing & Sign.ZERO_GRAD) > 0))

    category = np.full(len(table), "unknown", object)
    category[~is_recorded & (stack < 0)] = "before recording"
    # Of a function that is not a module's.
    category[is_recorded & (phase == 0) & ((freeing & Sign.BACKWARD) > 0)] = "activations"
    for wanted, name in _KEPT_BY_PHASE.items():
        category[(phase == wanted) & is_kept] = name
    category[(phase > 0) & ~is_kept] = "temporary"
    for sign, name in _NAMED.items():
        category[(signs & sign) > 0] = name
    if is_native:
        casts = (signs & Sign.AUTOCAST) > 0
    else:
        casts = (category == "activations") & is_python_only
    category[_is_copy_of_weight(table, category, casts, is_native)] = "autocast copies"
    if not is_native:
        category[_is_workspace(table, category, signs, len(events))] = "workspaces"
    return category


def _is_kept(table: pd.DataFrame, events: pd.DataFrame, phase: _Ints) -> _Bools:
    """Check what is freed only after allocations of another phase have begun, or have failed.

    What began before the first event outlives its phase: it survived until the recording began. Blocks that are freed
    only after an out-of-memory error would have stayed longer, so they outlive it too.
    """
    first = table["first"].to_numpy()
    freed = table["free_requested"].to_numpy()
    is_kept = first < 0
    known = np.flatnonzero((phase > 0) & (first >= 0))
    order = known[np.argsort(first[known], kind="stable")]
    is_new_run = np.append(True, np.diff(phase[order]) != 0)[: len(order)]
    run_begins = first[order][is_new_run]
    run_ends = np.append(run_begins[1:], len(events))
    phase_end = run_ends[np.cumsum(is_new_run) - 1]
    failures = np.append(np.flatnonzero(events["action"] == "oom"), len(events))
    failure = failures[np.searchsorted(failures, first[order])]
    is_kept[order] = freed[order] >= np.minimum(phase_end, failure)
    # A forward pass that no backward follows keeps its activations all the same, where autograd is on: a layer's are
    # still there when two more layers have made theirs.
    two_layers_on = table.groupby("stack")["first"].shift(-_LAYERS).to_numpy()
    return np.asarray(is_kept | ((phase == _FORWARD_PASS) & (table["stack"].to_numpy() >= 0) & (freed > two_layers_on)))


def _is_copy_of_weight(table: pd.DataFrame, category: _Texts, casts: _Bools, is_native: bool) -> _Bools:
    """Find autocast's copies of weights among the blocks that may be, or with C++ frames certainly are, its casts.

    A copy is half as large as its weight. Casts of activations are not more of them at once than there are weights of
    that size. Where no C++ frame names casts, as many copies are there at once as there are weights; what was there
    before the first event may be weights with their gradients and two states of an optimizer.
    """
    is_weight = np.isin(category, ["weights", "before recording"])
    halves = (table["requested_bytes"][is_weight] / 2).value_counts()
    is_copy = np.zeros(len(table), bool)
    for size, blocks in table[casts].assign(number=1).groupby("requested_bytes"):
        weights = halves.get(size, 0)
        at_once = total_by_event(int(blocks["free_requested"].max()), blocks, "number", "free_requested").max()
        if is_native:
            is_copy[blocks.index] = at_once <= weights
        else:
            is_copy[blocks.index] = weights in (at_once, 2 * at_once, 3 * at_once, 4 * at_once)
    return is_copy


def _is_workspace(table: pd.DataFrame, category: _Texts, signs: _Ints, count: int) -> _Bools:
    """Find cuBLAS's workspaces: its handle makes one in its first product on a stream, and keeps it.

    An activation that happens to have its size seldom is the only one that stays.
    """
    size = table["requested_bytes"]
    is_default = (size == _CUBLAS_BYTES) | ((size == _CUBLAS_HOPPER_BYTES) & ((signs & Sign.PRODUCT) > 0))
    stays = table[is_default & (category == "activations") & (table["free_requested"] == count)]
    sole = stays[~stays.duplicated("stream", keep=False)]
    return np.asarray(table.index.isin(sole.index))


# ---------------------------------------------------------------- who allocated it

_LIBRARY = re.compile(r"(?:^|[/\\])(?:(?:site|dist)-packages[/\\]|lib[/\\]python\d)|^<|torchinductor_|^torch[/\\]")
_FOLDERS = re.compile(r".*[/\\]")


def is_python(filename: str) -> bool:
    """Tell a frame of Python from one of C++."""
    return filename.endswith(".py") or filename.startswith("<")


def frame_text(name: str, filename: str, line: int) -> str:
    """Write a frame without its folders: they name people and machines."""
    if not is_python(filename):
        return name.partition("(")[0][:120] or "no name"
    return f"{_FOLDERS.sub('', filename)}:{line} {name}"[:160]


def _score(name: str, filename: str) -> int:
    """Rank frames by how telling they are: the user's own Python, any Python, a C++ operator."""
    if is_python(filename):
        return 2 if _LIBRARY.search(filename) else 3
    return int(name.startswith("at::_ops::"))


def _site_frames(snapshot: Snapshot) -> _Ints:
    """Give each stack's most telling frame; of equals the innermost."""
    frames: _Ints = snapshot.derived("site frames", lambda: _find_site_frames(snapshot))
    return frames


def _find_site_frames(snapshot: Snapshot) -> _Ints:
    scores = [_score(*frame) for frame in zip(snapshot.frames["name"], snapshot.frames["filename"], strict=True)]
    score = np.array(scores, np.int64)[snapshot.stack_frames]
    size = np.int64(max(len(score), 1))
    # Scores first, then places from the end, as one number: of equal scores the first, the innermost, wins.
    ranks = score * size + np.arange(len(score))[::-1]
    best = np.maximum.reduceat(ranks, snapshot.stack_bounds[:-1])
    return np.asarray(snapshot.stack_frames[size - 1 - best % size], np.int64)


def sites_of(snapshot: Snapshot, stacks: _Ints) -> _Texts:
    """Name the frame that allocated, for each stack number."""
    frames = _site_frames(snapshot)
    numbers, place = np.unique(stacks, return_inverse=True)
    names = []
    for number in numbers:
        names.append("no stack" if number < 0 else frame_text(*snapshot.frames.iloc[frames[number]]))
    return np.array(names, object)[place]
