"""For what a block was allocated: read from its call stack and its lifetime.

The stack names the phase that made a block: forward, backward, optimizer, set-up. What is freed before another phase
allocates is ``temporary``; what outlives its phase is an activation, a gradient, an optimizer state or a weight. What
backward made and ``zero_grad`` frees is a gradient. Some stacks name the use of a block, for any lifetime: ``logits``
(all that the loss makes), ``autocast copies``, ``KV cache``, ``communication``, ``workspaces``, ``inputs``. ``before
recording`` was there before the first event and has no stack; ``unknown`` is what no rule covers.

In a snapshot with Python frames only, a block without any frame counts as backward's, because autograd's threads have
none. Autocast's copies need C++ frames; without them they are among the activations.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.memory.blocks import events_of
from nsightkit.trace.model import memoised
from nsightkit.trace.snapshot import Snapshot

#: Signs of what a stack is for: each with an expression that finds it in "FILE\nFUNCTION" of any frame.
_SIGNS_ANYWHERE = {
    "forward": r"\n_?forward$|nn[/\\]modules[/\\]module\.py\n(_wrapped)?_call_impl$",
    "backward": r"torch::autograd::(Engine|Node|generated::\w+Backward|PyNode|AccumulateGrad)"
    r"|\n_engine_run_backward$|torch[/\\]autograd[/\\]__init__\.py\ngrad$|\.py\nbackward$",
    "optimizer": r"(^|[/\\])torch[/\\]optim[/\\].*\n(?!zero_grad|__init__)"
    r"|(?i:optim[^/\\\n]*\.py)\n(step|_single_tensor_\w+|_multi_tensor_\w+|_fused_\w+)$",
    "setup": r"\n(_apply|reset_parameters|to_empty|_load_from_state_dict|load_state_dict)$"
    r"|(^|[/\\])torch[/\\]nn[/\\](init|parameter)\.py\n|(^|[/\\])torch[/\\]nn[/\\]modules[/\\].*\n__init__$",
    "logits": r"torch[/\\]nn[/\\]functional\.py\n(cross_entropy|log_softmax|nll_loss)$"
    r"|::\w*(cross_entropy|log_softmax|nll_loss)",
    "communication": r"\nc10d::|::c10d::|ProcessGroup|Reducer::"
    r"|(distributed_c10d|_functional_collectives|_fsdp_collectives)\.py\n",
    "workspaces": r"CUDABlas(Lt)?Workspace|getCurrentCUDABlasHandle|gemm_and_bias|cudnn.*[wW]orkspace",
    "cast": r"at::autocast::cached_cast",
    "KV cache": r"(^|[/\\])cache_utils\w*\.py\n",
    "inputs": r"(^|[/\\])torch[/\\]utils[/\\]data[/\\]",
    "zero_grad": r"\nzero_grad$",
    "python": r"\.py\n|^<",
}
#: The same in the frame that allocated. Further out such names prove nothing: a trainer may run in its `__init__`.
_SIGNS_AT_SITE = {
    "optimizer": r"(?i:(^|[/\\_])(optim|optimizers?|adamw?)\.py)\n__init__$",
    "setup": r"\.py\n__init__$",
    "logits": r"\.py\n.*(cross_entropy|log_softmax|nll_loss)",
    "KV cache": r"\.py\n.*(?i:(^|_|\n)kv_?cache)|(?i:kv_?cache[^/\\\n]*\.py)\n",
    "inputs": r"\.py\n(_?(get|load|next|make|sample|random)_batch$|collate)",
}
#: Phases and what outlives them. The first that a stack names decides, as the innermost cause: a forward pass that is
#: recomputed in backward is backward's, and a closure's passes in an optimizer's step are forward and backward.
_KEPT_BY_PHASE = {
    "backward": "gradients",
    "forward": "activations",
    "optimizer": "optimizer states",
    "setup": "weights",
}
#: Uses that a stack names in any phase; the first match decides.
_NAMED_USES = ("communication", "workspaces", "KV cache", "inputs", "logits")
_Ints = npt.NDArray[np.int64]
_Texts = npt.NDArray[np.object_]


# ---------------------------------------------------------------- what stacks say


def _signs_of_stacks(snapshot: Snapshot) -> pd.DataFrame:
    """Find which stacks (rows) carry each sign (a column): ``forward``, ``zero_grad``, ``KV cache`` and the like.

    One more row at the end, for blocks without a stack (-1), carries none.
    """
    frame_texts = snapshot.frames["filename"] + "\n" + snapshot.frames["name"]
    signs = {}
    for sign, pattern in _SIGNS_ANYWHERE.items():
        is_match = frame_texts.map(re.compile(pattern).search).notna().to_numpy()
        # A stack is a run of `stack_frames`, never empty, and carries a sign if any of its frames does.
        is_in_stack = np.logical_or.reduceat(is_match[snapshot.stack_frames], snapshot.stack_bounds[:-1])
        signs[sign] = np.append(is_in_stack, False)
    site_texts = frame_texts.iloc[_site_frames(snapshot)]
    for sign, pattern in _SIGNS_AT_SITE.items():
        signs[sign][:-1] |= site_texts.map(re.compile(pattern).search).notna().to_numpy()
    signs["forward"] |= signs["logits"]  # the loss, also where no module computes it
    return pd.DataFrame(signs)


# ---------------------------------------------------------------- categories


def categorize(snapshot: Snapshot, device: int, table: pd.DataFrame) -> pd.Series:
    """Decide the category of each of the blocks that :func:`nsightkit.analysis.memory.blocks.held_blocks` lists.

    In `table`, ``first`` and ``free_requested`` are events: -1 is before the first one, ``len(events)`` is never.
    """
    events = events_of(snapshot, device)
    all_signs = _signs_of_stacks(snapshot)
    # Stack -1 takes the last row, without signs.
    signs = all_signs.iloc[table["stack"]].set_index(table.index)
    # A block that no event frees has -1 or the number of events here; both take the appended -1, no stack.
    freeing_stack = np.append(events["stack"], -1)[table["free_requested"]]
    is_freed_by_zero_grad = all_signs["zero_grad"].to_numpy()[freeing_stack]
    is_recorded = table["first"] >= 0
    has_no_stack = table["stack"] < 0
    has_native_frames = snapshot.frames["name"].str.contains("::", regex=False).any()

    # The first column that is True names the phase.
    phases = signs[list(_KEPT_BY_PHASE)]
    phase = phases.idxmax(axis=1).where(phases.any(axis=1), "")
    # In a snapshot of Python frames only, an empty stack means a thread of autograd.
    if not has_native_frames and (signs["python"] & is_recorded).any():
        phase[is_recorded & has_no_stack] = "backward"
    is_zeroed_gradient = (phase == "backward") & is_freed_by_zero_grad
    is_kept = _outlives_phase(table, events, phase) | is_zeroed_gradient
    # The first rule that is True decides.
    rules = signs[list(_NAMED_USES)].assign(kept=(phase != "") & is_kept, temporary=phase != "")
    rules["before recording"] = ~is_recorded & has_no_stack
    rules["unknown"] = True
    category = rules.idxmax(axis=1)
    category = category.mask(category == "kept", phase.map(_KEPT_BY_PHASE))
    # Autocast's copies are half as large as a weight; its other casts are not.
    is_weight = category.isin(["weights", "before recording"])
    halves = table["requested_bytes"][is_weight] / 2
    is_copy = signs["cast"] & table["requested_bytes"].isin(halves)
    decided: pd.Series = category.mask(is_copy, "autocast copies").astype(object)
    return decided


def _outlives_phase(table: pd.DataFrame, events: pd.DataFrame, phase: pd.Series) -> pd.Series:
    """Find which blocks outlive their phase (forward, backward, ...): they are freed only after another one allocates.

    Such a block is kept for later: an activation, a gradient, a weight. The others are temporary.

    What began before the first event outlives its phase: it survived until the recording began. Blocks that are freed
    only after an out-of-memory error would have stayed longer, so they outlive it too.
    """
    is_old = table["first"] < 0
    with_phase = table[(phase != "") & ~is_old]
    phase_in_order = phase[with_phase.index]
    is_phase_start = phase_in_order != phase_in_order.shift()
    # A phase ends where the next one allocates first; the cumulative sum is the number of that next one.
    phase_starts = np.append(with_phase["first"][is_phase_start], len(events))
    phase_end = phase_starts[is_phase_start.cumsum()]
    failures = np.append(np.flatnonzero(events["action"] == "oom"), len(events))
    next_failure = failures[np.searchsorted(failures, with_phase["first"])]
    outlives = with_phase["free_requested"] >= np.minimum(phase_end, next_failure)
    is_kept: pd.Series = is_old | outlives.reindex(table.index, fill_value=False)
    return is_kept


# ---------------------------------------------------------------- who allocated it

_LIBRARY_FILE = re.compile(r"(?:^|[/\\])(?:(?:site|dist)-packages[/\\]|lib[/\\]python\d)|^<|torchinductor_|^torch[/\\]")
_FOLDERS = re.compile(r".*[/\\]")
_PYTHON_FILE = re.compile(r"\.py$|^<")


def _frame_text(name: str, filename: str, line: int) -> str:
    """Write a frame as "train.py:12 step", or as the function of a C++ frame.

    Folders are left out, as they name people and machines.
    """
    if not _PYTHON_FILE.search(filename):
        return name.partition("(")[0][:120] or "no name"
    return f"{_FOLDERS.sub('', filename)}:{line} {name}"[:160]


@memoised
def _site_frames(snapshot: Snapshot) -> _Ints:
    """Give the row of each stack's most telling frame: of the user's own Python, else any Python, else an operator."""
    filenames = snapshot.frames["filename"]
    is_python = filenames.str.contains(_PYTHON_FILE)
    is_own_python = is_python & ~filenames.str.contains(_LIBRARY_FILE)
    is_operator = snapshot.frames["name"].str.startswith("at::_ops::")
    scores = np.select([is_own_python, is_python, is_operator], [3, 2, 1], 0)
    stack_lengths = np.diff(snapshot.stack_bounds)
    stack = np.repeat(np.arange(len(stack_lengths)), stack_lengths)
    frames = pd.DataFrame({"frame": snapshot.stack_frames, "score": scores[snapshot.stack_frames]})
    # Frames are innermost first, and idxmax takes the first of equal scores.
    best = frames.groupby(stack)["score"].idxmax()
    return frames["frame"].to_numpy()[best]


def sites_of(snapshot: Snapshot, stacks: _Ints) -> _Texts:
    """Name the frame that allocated, for each stack number; "no stack" for -1."""
    site_frames = _site_frames(snapshot)
    # Each stack is written once, and spread over all its occurrences.
    distinct, place = np.unique(stacks, return_inverse=True)
    frames = snapshot.frames
    names = [_frame_text(*frames.iloc[site_frames[stack]]) if stack >= 0 else "no stack" for stack in distinct]
    return np.array(names, object)[place]
