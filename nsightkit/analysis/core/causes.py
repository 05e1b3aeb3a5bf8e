"""What can hold a run back: one record for each answer of the verdict, used by rules, words, figures and reports."""

from __future__ import annotations

import dataclasses

__all__ = ["BUSY", "CAUSES", "IDLE", "Cause"]


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause of idle time, or what fills busy time.

    Attributes
    ----------
    slug : str
        What JSON and the command line call it.
    name : str
        What its part of the time is called in a bar.
    sentence : str
        What it means, for a person: the first words of the verdict.
    colour : str
        Its colour in every figure.
    advice : str
        What to change first, in one sentence.
    change : str or None
        The change of the replay that takes it away (:mod:`nsightkit.analysis.replay.whatif`).
    """

    slug: str
    name: str
    sentence: str
    colour: str
    advice: str
    change: str | None = None


#: Causes of idle time, in the order in which gaps are judged.
IDLE = (
    Cause(
        "profiler",
        "idle: profiler",
        "The GPU waits for the profiler",
        "#0f8fa8",
        "profile less (fewer tables, no backtraces, a shorter window), and look again",
        "no-profiler",
    ),
    Cause(
        "start-up",
        "idle: start-up",
        "The GPU waits for work that happens once: loading code, compiling, capturing graphs",
        "#cf4446",
        "warm up before you measure, and capture a later window; load and compile ahead of time",
        "no-start-up",
    ),
    Cause(
        "recompilation",
        "idle: recompiling",
        "The GPU waits for a compiler, again after the program had settled",
        "#8a5a44",
        "keep shapes and guards stable: pad inputs, or compile with dynamic shapes (TORCH_LOGS=recompiles shows why)",
        "no-recompilation",
    ),
    Cause(
        "queued",
        "idle: queued",
        "The GPU has work in its queue and does not start it; the trace does not say why",
        "#748522",
        "find out what else holds the GPU or the stream: another process, or work launched before the capture",
    ),
    Cause(
        "input-pipeline",
        "idle: waiting for data",
        "The GPU waits for data",
        "#d9690f",
        "have the next batch ready in time: more loader workers, prefetching, or cheaper decoding",
        "no-input-wait",
    ),
    Cause(
        "synchronization",
        "idle: after a wait for the GPU",
        "The CPU waits for the GPU instead of giving it more work",
        "#2f7fc1",
        "do not wait for the GPU in each step: read values back rarely, or a step later",
        "no-sync",
    ),
    Cause(
        "memory-transfer",
        "copies that nothing overlaps",
        "Kernels wait for copies",
        "#17936b",
        "copy the next batch on a stream of its own while this one computes",
        "overlap-copies",
    ),
    Cause(
        "launch-overhead",
        "idle: waiting for launches",
        "The GPU waits for the next launch",
        "#b565a7",
        "launch less: torch.compile, fused operators, or CUDA graphs",
        "free-launches",
    ),
    Cause(
        "cpu-work",
        "idle: other CPU work",
        "The GPU waits for other work on the CPU",
        "#a87a10",
        "move this work off the thread that launches, or make it shorter",
        "no-cpu-work",
    ),
    Cause(
        "unknown",
        "idle: unknown",
        "The GPU is idle, and the trace does not say why",
        "#7d8590",
        "name what the launching thread does with NVTX ranges, and record OS calls",
    ),
)
#: What fills busy time.
BUSY = (
    Cause(
        "compute-bound",
        "busy: arithmetic",
        "The GPU is busy with arithmetic",
        "#2a6cb0",
        "do less or cheaper arithmetic",
    ),
    Cause(
        "memory-bound",
        "busy: memory",
        "The GPU is busy moving data in its memory",
        "#5f8596",
        "move fewer bytes: fuse operators, or use narrower types",
    ),
    Cause(
        "not-enough-data",
        "busy: other kernels",
        "The trace does not say what holds the run back",
        "#646c77",
        "let counters say what bounds the kernels named above",
    ),
    Cause(
        "communication",
        "busy: communication",
        "The GPUs are busy exchanging data",
        "#d0527f",
        "overlap collectives with the backward pass, or send less: narrower types, rarer reductions",
        "overlap-communication",
    ),
    Cause(
        "imbalance",
        "waiting for slower GPUs",
        "GPUs wait for slower ones",
        "#7a6fd0",
        "give the devices equal work: batches of equal cost, layers split by time",
        "equal-ranks",
    ),
)
CAUSES = {cause.slug: cause for cause in (*IDLE, *BUSY)}
