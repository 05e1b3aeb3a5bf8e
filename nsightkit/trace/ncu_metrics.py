"""The Nsight Compute metrics we use: our name, NVIDIA's, its unit, what it means and on which chips it exists.

Every metric an analysis looks at stands in this table and nowhere else. Profiling guides pass on names that exist on
no chip, and ``ncu`` ends a run on the first one; these were checked with ``ncu --query-metrics --chips`` (2024.1) for
Volta, Turing, Ampere, Ada and Hopper, and are again by the tests wherever ``ncu`` is installed.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable

from nsightkit.errors import UsageError

__all__ = ["CHIPS", "METRICS", "STALLS", "Metric", "Stall", "base_unit", "by_label", "find", "names"]

#: Chips the names were checked for, oldest first: V100, T4, A100, RTX 30, RTX 40, H100 and H200.
CHIPS = ("gv100", "tu102", "ga100", "ga102", "ad102", "gh100")


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric.

    Parameters
    ----------
    name : str
        Ours, a column of ``launches`` in :class:`nsightkit.trace.ncu.Report`; ends in its unit.
    nvidia : tuple of str
        NVIDIA's names. The first that a report holds counts.
    unit : str
        Base unit, as :func:`base_unit` spells it.
    labels : tuple of str
        What the details page of ``ncu`` calls it, by version; with the unit they are unambiguous. Empty where the
        page calls several metrics the same (FMA, ALU: by cycles and by instructions).
    meaning : str
        What the number says.
    chips : tuple of str
        Where the first of NVIDIA's names exists.
    listed : bool
        Whether ``ncu --query-metrics`` lists it. Launch and device attributes are collected without being listed.
    """

    name: str
    nvidia: tuple[str, ...]
    unit: str
    labels: tuple[str, ...]
    meaning: str
    chips: tuple[str, ...] = CHIPS
    listed: bool = True


@dataclasses.dataclass(frozen=True)
class Stall:
    """One reason why a warp did not issue in a cycle, as NVIDIA's Kernel Profiling Guide defines it.

    Parameters
    ----------
    reason : str
        As NVIDIA's metric names spell it.
    label : str
        As the details page does.
    meaning : str
        What the warp waited for.
    next_step : str
        What to try when it dominates; empty where it is not a stall or there is nothing general to say.
    chips : tuple of str
        Where it exists.
    """

    reason: str
    label: str
    meaning: str
    next_step: str = ""
    chips: tuple[str, ...] = CHIPS

    @property
    def nvidia(self) -> str:
        """Warps in this state per issued instruction; all reasons sum to the latency between two instructions."""
        return f"smsp__average_warps_issue_stalled_{self.reason}_per_issue_active.ratio"

    @property
    def sampled(self) -> str:
        """Samples of the program counter that found a warp in this state, where reports hold them instead."""
        plural = "no_instructions" if self.reason == "no_instruction" else self.reason
        return f"smsp__pcsamp_warps_issue_stalled_{plural}"


#: The states a warp can be in when it does not issue, and the one in which it does.
STALLS: tuple[Stall, ...] = (
    Stall(
        "long_scoreboard",
        "Stall Long Scoreboard",
        "waits for an L1TEX operation: global, local, surface or texture memory, also when it hits in L1",
        "have more loads in flight (unroll, wider loads, asynchronous copies), raise the hit rates, or move reused "
        "data to shared memory",
    ),
    Stall(
        "short_scoreboard",
        "Stall Short Scoreboard",
        "waits for an MIO operation that is not L1TEX: shared memory, special functions, dynamic branches",
        "look for bank conflicts; use fewer or wider shared-memory accesses, and fewer special functions (exp, rsqrt)",
    ),
    Stall(
        "wait",
        "Stall Wait",
        "waits out the fixed latency of the instruction before; there is no barrier",
        "give each warp more independent instructions, or the scheduler more warps",
    ),
    Stall(
        "barrier",
        "Stall Barrier",
        "waits for its sibling warps at a barrier of the block (__syncthreads)",
        "split the work between the barriers evenly, use smaller blocks, or remove barriers",
    ),
    Stall(
        "math_pipe_throttle",
        "Stall Math Pipe Throttle",
        "waits for its execution pipe, which is busy",
        "mix in instructions of other pipes; this much use of one pipe is otherwise a success",
    ),
    Stall(
        "mio_throttle",
        "Stall MIO Throttle",
        "waits for room in the MIO instruction queue: shared memory, special functions, dynamic branches",
        "use fewer, wider shared-memory accesses and fewer special functions",
    ),
    Stall(
        "lg_throttle",
        "Stall LG Throttle",
        "waits for room in the L1 instruction queue for local and global memory",
        "combine narrow global loads into wide ones (128 bit), and remove register spills",
    ),
    Stall(
        "tex_throttle",
        "Stall Tex Throttle",
        "waits for room in the L1 instruction queue for texture operations",
        "issue fewer texture operations in a row",
    ),
    Stall(
        "branch_resolving",
        "Stall Branch Resolving",
        "waits until a branch's target is known",
        "use fewer branches: unroll loops, predicate short ones",
    ),
    Stall(
        "membar",
        "Stall Membar",
        "waits for a memory barrier (__threadfence)",
        "use fewer or narrower memory barriers",
    ),
    Stall(
        "drain",
        "Stall Drain",
        "waits after its end for its writes to memory",
        "write coalesced, and not everything at the very end of the kernel",
    ),
    Stall(
        "imc_miss",
        "Stall IMC Miss",
        "waits for a miss in the immediate-constant cache",
        "keep what indexes constant memory the same for all threads of a warp",
    ),
    Stall(
        "no_instruction",
        "Stall No Instruction",
        "waits for its next instruction to be fetched",
        "make the code smaller (less unrolling), or the kernel longer: short kernels pay this at their start",
    ),
    Stall("dispatch_stall", "Stall Dispatch Stall", "waits because the dispatcher holds back its instruction"),
    Stall("sleeping", "Stall Sleeping", "sleeps by its own wish (nanosleep)", "shorten the sleeps or the spinning"),
    Stall("misc", "Stall Misc", "waits for a reason of its own kind"),
    Stall(
        "gmma",
        "Stall GMMA",
        "waits for an asynchronous matrix instruction of its warpgroup (Hopper)",
        "use larger tiles or one more stage of the pipeline, so that matrix instructions are always queued",
        ("gh100",),
    ),
    Stall("not_selected", "Stall Not Selected", "was ready, and another warp issued: there are warps enough"),
    Stall("selected", "Selected", "issued an instruction: no stall"),
)

_FROM_AMPERE = CHIPS[2:]


def _unlisted(name: str, nvidia: str, unit: str, label: str, meaning: str) -> Metric:
    return Metric(name, (nvidia,), unit, (label,) if label else (), meaning, listed=False)


_SOL = ".avg.pct_of_peak_sustained_elapsed"
_ACTIVE = ".avg.pct_of_peak_sustained_active"

#: All metrics that have a name of ours.
METRICS: tuple[Metric, ...] = (
    Metric(
        "time_ns",
        ("gpu__time_duration.sum",),
        "ns",
        ("Duration",),
        "how long the kernel ran, at the clocks ncu set: with --clock-control base not those of production",
    ),
    Metric(
        "sm_pct",
        (f"sm__throughput{_SOL}",),
        "%",
        ("Compute (SM) Throughput", "Compute (SM) [%]", "SM [%]", "SOL SM"),
        "busiest unit of the SMs, in percent of what it can sustain, over the whole kernel",
    ),
    Metric(
        "memory_pct",
        (f"gpu__compute_memory_throughput{_SOL}",),
        "%",
        ("Memory Throughput", "Memory [%]", "SOL Memory"),
        "busiest part of the memory system, L1, L2 or DRAM: 80 % here is not 80 % of the DRAM's bandwidth",
    ),
    Metric(
        "dram_pct",
        (f"gpu__dram_throughput{_SOL}", f"dram__throughput{_SOL}"),
        "%",
        ("DRAM Throughput", "SOL DRAM"),
        "use of the DRAM's bandwidth",
    ),
    Metric(
        "l2_pct",
        (f"lts__throughput{_SOL}",),
        "%",
        ("L2 Cache Throughput", "SOL L2 Cache"),
        "busiest part of the L2 cache",
    ),
    Metric(
        "l1_pct",
        (f"l1tex__throughput{_ACTIVE}",),
        "%",
        ("L1/TEX Cache Throughput", "SOL L1/TEX Cache"),
        "busiest part of the L1 caches, which are shared memory too, over the cycles they were active",
    ),
    Metric(
        "sm_clock_hz",
        ("gpc__cycles_elapsed.avg.per_second", "sm__cycles_elapsed.avg.per_second"),
        "hz",
        ("SM Frequency",),
        "clock of the SMs while the kernel was profiled",
    ),
    Metric(
        "dram_clock_hz",
        ("dram__cycles_elapsed.avg.per_second",),
        "hz",
        ("DRAM Frequency", "Memory Frequency"),
        "clock of the DRAM while the kernel was profiled",
    ),
    Metric(
        "occupancy_pct",
        (f"sm__warps_active{_ACTIVE}",),
        "%",
        ("Achieved Occupancy",),
        "warps resident on an SM, in percent of what it can hold: a means, not an aim",
    ),
    _unlisted(
        "theoretical_occupancy_pct",
        "sm__maximum_warps_per_active_cycle_pct",
        "%",
        "Theoretical Occupancy",
        "the most warps the launch's resources allow on an SM, in percent of what it can hold",
    ),
    *(
        _unlisted(
            f"limit_{what}_blocks",
            f"launch__occupancy_limit_{what}",
            "block",
            label,
            f"blocks that fit on an SM at once by {of}; the smallest of the four limits is the limiter",
        )
        for what, label, of in (
            ("registers", "Block Limit Registers", "the registers they need"),
            ("shared_mem", "Block Limit Shared Mem", "the shared memory they need"),
            ("warps", "Block Limit Warps", "the warps they have"),
            ("blocks", "Block Limit SM", "the number of blocks the hardware allows"),
        )
    ),
    _unlisted("grid_blocks", "launch__grid_size", "", "Grid Size", "blocks of the launch"),
    _unlisted("block_threads", "launch__block_size", "", "Block Size", "threads of a block"),
    _unlisted(
        "waves",
        "launch__waves_per_multiprocessor",
        "",
        "Waves Per SM",
        "how often the launch fills all SMs; below 1 the grid is too small for the GPU",
    ),
    _unlisted(
        "registers_per_thread",
        "launch__registers_per_thread",
        "register/thread",
        "Registers Per Thread",
        "registers the compiler gave a thread",
    ),
    _unlisted(
        "static_shared_bytes",
        "launch__shared_mem_per_block_static",
        "byte/block",
        "Static Shared Memory Per Block",
        "shared memory the kernel declares",
    ),
    _unlisted(
        "dynamic_shared_bytes",
        "launch__shared_mem_per_block_dynamic",
        "byte/block",
        "Dynamic Shared Memory Per Block",
        "shared memory the launch asks for",
    ),
    Metric(
        "sm_count",
        ("device__attribute_multiprocessor_count", "launch__sm_count"),
        "",
        ("# SMs",),
        "SMs of the GPU",
        listed=False,
    ),
    Metric(
        "issue_pct",
        (f"smsp__issue_active{_ACTIVE}",),
        "%",
        ("One or More Eligible",),
        "cycles in which a scheduler issued an instruction; stalls cost time only where this is not near 100",
    ),
    Metric(
        "active_warps",
        ("smsp__warps_active.avg.per_cycle_active",),
        "warp",
        ("Active Warps Per Scheduler",),
        "warps a scheduler has to choose from",
    ),
    Metric(
        "eligible_warps",
        ("smsp__warps_eligible.avg.per_cycle_active",),
        "warp",
        ("Eligible Warps Per Scheduler",),
        "of these, warps that are ready to issue",
    ),
    Metric(
        "threads_per_instruction",
        ("smsp__thread_inst_executed_per_inst_executed.ratio",),
        "",
        ("Avg. Active Threads Per Warp",),
        "of the 32 threads of a warp, those that take part in an instruction: fewer where threads branch apart",
    ),
    Metric(
        "latency_cycles",
        ("smsp__average_warp_latency_per_inst_issued.ratio",),
        "cycle",
        ("Warp Cycles Per Issued Instruction",),
        "cycles between two instructions of a warp",
    ),
    *(
        Metric(f"{name}_pct", (f"{base}{_ACTIVE}",), "%", labels, meaning, chips)
        for name, base, labels, meaning, chips in (
            (
                "tensor",
                "sm__pipe_tensor_cycles_active",
                ("Tensor (All)",),
                "tensor cores, all types, over the cycles the SMs were active",
                CHIPS,
            ),
            (
                "tensor_16bit",
                "sm__pipe_tensor_op_hmma_cycles_active",
                (),
                "tensor cores, floating point; on Hopper with its asynchronous and 8-bit instructions",
                CHIPS,
            ),
            ("fma", "sm__pipe_fma_cycles_active", (), "FP32 multiply-add pipe", CHIPS),
            ("alu", "sm__pipe_alu_cycles_active", (), "integer and logic pipe", CHIPS),
            ("fp64", "sm__pipe_fp64_cycles_active", (), "FP64 pipe, which is narrow on most GPUs", CHIPS),
            ("xu", "sm__inst_executed_pipe_xu", ("XU",), "special functions and conversions", CHIPS),
            ("lsu", "sm__inst_executed_pipe_lsu", ("LSU",), "load and store instructions", CHIPS),
        )
    ),
    Metric(
        "tensor_elapsed_pct",
        (f"sm__pipe_tensor_cycles_active{_SOL}",),
        "%",
        ("SM: Pipe Tensor Cycles Active",),
        "tensor cores, all types, over the whole kernel; part of sm_pct's breakdown",
    ),
    Metric(
        "fma_elapsed_pct",
        (f"sm__pipe_fma_cycles_active{_SOL}",),
        "%",
        ("SM: Pipe Fma Cycles Active",),
        "FP32 multiply-add pipe, over the whole kernel",
    ),
    Metric(
        "alu_elapsed_pct",
        (f"sm__pipe_alu_cycles_active{_SOL}",),
        "%",
        ("SM: Pipe Alu Cycles Active",),
        "integer and logic pipe, over the whole kernel",
    ),
    Metric(
        "xu_elapsed_pct",
        (f"sm__inst_executed_pipe_xu{_SOL}",),
        "%",
        ("SM: Inst Executed Pipe Xu",),
        "special functions and conversions, over the whole kernel",
    ),
    Metric(
        "fp64_elapsed_pct",
        (f"sm__pipe_fp64_cycles_active{_SOL}",),
        "%",
        ("SM: Pipe Fp64 Cycles Active",),
        "FP64 pipe, over the whole kernel",
    ),
    Metric(
        "lsu_elapsed_pct",
        (f"sm__inst_executed_pipe_lsu{_SOL}",),
        "%",
        ("SM: Inst Executed Pipe Lsu",),
        "load and store instructions, over the whole kernel",
    ),
    Metric("dram_read_bytes", ("dram__bytes_read.sum",), "byte", (), "bytes read from DRAM"),
    Metric("dram_write_bytes", ("dram__bytes_write.sum",), "byte", (), "bytes written to DRAM"),
    Metric(
        "dram_bytes_per_s",
        ("dram__bytes.sum.per_second",),
        "byte/s",
        ("Memory Throughput",),
        "DRAM traffic by time",
    ),
    Metric(
        "l2_to_l1_bytes",
        ("l1tex__m_xbar2l1tex_read_bytes.sum",),
        "byte",
        (),
        "bytes that L1 read from L2",
    ),
    Metric("l1_hit_pct", ("l1tex__t_sector_hit_rate.pct",), "%", ("L1/TEX Hit Rate",), "hit rate of L1"),
    Metric(
        "global_load_hit_pct",
        ("l1tex__t_sector_pipe_lsu_mem_global_op_ld_hit_rate.pct",),
        "%",
        (),
        "rate at which sectors of global loads hit L1",
    ),
    Metric("l2_hit_pct", ("lts__t_sector_hit_rate.pct",), "%", ("L2 Hit Rate",), "hit rate of L2"),
    *(
        Metric(
            f"global_{word}_{what}",
            (f"l1tex__t_{what}_pipe_lsu_mem_global_op_{op}.sum",),
            "sector" if what == "sectors" else "",
            (),
            f"{'32-byte sectors' if what == 'sectors' else 'requests of warps'} of global {word}s; sectors per request "
            "are the measure of coalescing: 4 is ideal for 32-bit accesses, 16 for 128-bit ones",
        )
        for word, op in (("load", "ld"), ("store", "st"))
        for what in ("sectors", "requests")
    ),
    *(
        Metric(f"l2_{word}", (f"lts__t_requests_srcunit_tex{op}.sum",), "", (), f"{meaning}, from L1 to L2")
        for word, op, meaning in (
            ("requests", "", "requests of every kind"),
            ("reductions", "_op_red", "requests of atomic operations without a result"),
            ("atomics", "_op_atom_dot_alu", "requests of atomic operations with a result"),
            ("swaps", "_op_atom_dot_cas", "requests of atomic compare-and-swaps"),
        )
    ),
    *(
        Metric(
            f"global_{word}_bytes_per_sector",
            (f"smsp__sass_average_data_bytes_per_sector_mem_global_op_{op}.ratio",),
            "byte/sector",
            (f"Average Bytes Per Sector For Global {word.title()}s",),
            f"bytes that threads used of each 32-byte sector of global {word}s",
        )
        for word, op in (("load", "ld"), ("store", "st"))
    ),
    Metric(
        "local_loads",
        ("smsp__inst_executed_op_local_ld.sum", "smsp__sass_inst_executed_op_local_ld.sum"),
        "inst",
        (),
        "loads from local memory: registers that were spilled, or arrays indexed at run time",
    ),
    Metric(
        "local_stores",
        ("smsp__inst_executed_op_local_st.sum", "smsp__sass_inst_executed_op_local_st.sum"),
        "inst",
        (),
        "stores to local memory",
    ),
    Metric(
        "shared_wavefronts",
        ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
        "",
        (),
        "passes through shared memory",
    ),
    Metric(
        "bank_conflicts",
        ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
        "",
        (),
        "extra passes through shared memory; never quite zero, so compare with shared_wavefronts",
    ),
    Metric(
        "bf16_tensor_ops",
        ("sm__ops_path_tensor_src_bf16_dst_fp32.sum",),
        "",
        (),
        "operations the tensor cores did on bf16 with fp32 sums, counted",
        _FROM_AMPERE,
    ),
    Metric(
        "tf32_tensor_ops",
        ("sm__ops_path_tensor_src_tf32_dst_fp32.sum",),
        "",
        (),
        "operations the tensor cores did on tf32, counted",
        _FROM_AMPERE,
    ),
    *(
        Metric(
            f"stall_{stall.reason}",
            (stall.nvidia,),
            "inst",
            (stall.label,),
            f"warps per issued instruction: {stall.meaning}",
            stall.chips,
        )
        for stall in STALLS
    ),
)

#: Names that guides pass on and that no chip has; the replacement is one that exists.
_MYTHS = (
    (
        re.compile(r"smsp__warps_issue_stalled_(\w+?)_per_warp_active"),
        r"smsp__average_warps_issue_stalled_\1_per_issue_active.ratio",
    ),
    (
        re.compile(r"l1tex__t_bytes_equiv_l1sectormiss_pipe_lsu_mem_global_op_\w+"),
        "l1tex__m_xbar2l1tex_read_bytes.sum",
    ),
)


_NVIDIA = {name: name for metric in METRICS for name in metric.nvidia} | {m.name: m.nvidia[0] for m in METRICS}


def names() -> list[str]:
    """List our names, in the table's order.

    Returns
    -------
    list of str
    """
    return [metric.name for metric in METRICS]


def find(name: str, also: Iterable[str] = ()) -> str:
    """Turn a metric's name into NVIDIA's.

    Parameters
    ----------
    name : str
        Ours, or NVIDIA's with its suffix.
    also : iterable of str
        Other names of NVIDIA's that are allowed, such as those a report holds.

    Returns
    -------
    str
        NVIDIA's name.

    Raises
    ------
    UsageError
        There is no such metric. Names the likely ones.
    """
    known = _NVIDIA | {other: other for other in sorted(also)}
    if name in known:
        return known[name]
    for myth, instead in _MYTHS:
        if found := myth.match(name):
            raise UsageError(f"no metric {name!r} exists on any chip; use {found.expand(instead)}")
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f"no metric {name!r}{hint}")


@functools.lru_cache(maxsize=4096)
def by_label(label: str, unit: str, section: str = "") -> Metric | None:
    """Find the metric that the details page of ``ncu`` shows under a label.

    Parameters
    ----------
    label : str
    unit : str
        Base unit: two metrics are called "Memory Throughput".
    section : str, optional
        Where the label stands. It decides where the page has no units: throughputs of the section "Speed Of Light" are
        in percent.

    Returns
    -------
    Metric or None
    """
    found = [metric for metric in METRICS if label in metric.labels]
    if len(found) > 1 and not unit:
        return next((metric for metric in found if (metric.unit == "%") == ("Speed Of Light" in section)), None)
    return found[0] if len(found) == 1 else next((metric for metric in found if metric.unit == unit), None)


_PREFIXES = {"K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_TIMES = {"n": 1.0, "u": 1e3, "µ": 1e3, "μ": 1e3, "m": 1e6, "": 1e9}  # in nanoseconds
_TIME = re.compile(r"([nuµμm]?)(?:seconds?|sec|s)")
_SCALED = re.compile(
    r"([KkMGTP]?)((?i:bytes?|b|hz|cycles?|sectors?|inst|insts|instructions?|warps?|threads?|requests?|blocks?"
    r"|samples?|passes|pass|wavefronts?|registers?|branches|ops?|flops?))"
)
_WORDS = {"b": "byte", "bytes": "byte", "cycles": "cycle", "sectors": "sector", "warps": "warp", "threads": "thread"}


@functools.cache
def base_unit(unit: str) -> tuple[str, float]:
    """Give the base of a unit as any version of ``ncu`` writes it, and the factor to get there.

    ``ncu --csv`` scales each column to its own magnitude unless told ``--print-units base``, whatever its help
    says: one report's DRAM clock is in cycle/nsecond, another's in cycle/usecond.

    Parameters
    ----------
    unit : str
        Such as ``usecond``, ``us``, ``Gbyte/second``, ``cycle/nsecond``, ``Kbyte/block``; prefixes are decimal.

    Returns
    -------
    str
        ``ns``, ``byte``, ``byte/s``, ``hz``, ``%``, …; an unknown unit as it is.
    float
    """
    above, slash, below = unit.strip().partition("/")
    time, per, scaled = _TIME.fullmatch(above), _TIME.fullmatch(below), _SCALED.fullmatch(above)
    if time and not slash:
        return "ns", _TIMES[time[1]]
    word, factor = above, 1.0
    if scaled:
        word, factor = _WORDS.get(scaled[2].lower(), scaled[2].lower()), _PREFIXES.get(scaled[1], 1.0)
    if per:
        below, factor = "s", factor * 1e9 / _TIMES[per[1]]
    base = f"{word}{slash}{below}"
    return "hz" if base == "cycle/s" else base, factor
