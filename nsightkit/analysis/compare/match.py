"""Which kernel of one trace is which of another: by name, by a name without what versions change, by operator.

A name changes with the compiler (``Kernel<(int)4>`` or ``Kernel<4>``), with the card (``ampere_sgemm_128x64_tn``,
``volta_sgemm_32x128_tn``), with a library's choice of tiles, and with the order in which a fusing compiler numbers
what it makes (``triton_poi_fused_add_3``). So kernels are paired in rounds, each looser than the one before, and a
round sees only what the stricter ones left:

1. ``name``: the demangled name;
2. ``normalised``: the name without what demanglers spell differently; then without types, sizes and arguments; then
   without card, tiles, instruction shapes, versions and numbers (:func:`spellings`);
3. ``operator``: launched by the same framework operator, and of the same category;
4. ``appeared`` and ``disappeared``: the rest.

A round may pair several kernels with several. Each kernel is in exactly one row, so sums over rows are those of the
trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

__all__ = ["HOW", "Kernel", "Pairing", "in_rounds", "pair", "plain_range", "spellings"]

#: How the kernels of a row belong together, from the strictest to not at all.
HOW = ("name", "normalised", "operator", "appeared", "disappeared")


class Kernel(NamedTuple):
    """What is known of all launches of one name.

    Parameters
    ----------
    name, category : str
    operator : str, optional
        What launched most of its time, where that was recorded.
    """

    name: str
    category: str
    operator: str | None = None


class Pairing(NamedTuple):
    """Things that belong together.

    Parameters
    ----------
    how : str
        One of :data:`HOW`.
    before, after : tuple of int
        Positions in the two lists; one may be empty.
    """

    how: str
    before: tuple[int, ...]
    after: tuple[int, ...]


def pair(before: Sequence[Kernel], after: Sequence[Kernel]) -> list[Pairing]:
    """Pair the kernels of two traces.

    Parameters
    ----------
    before, after : sequence of Kernel
        Each name once.

    Returns
    -------
    list of Pairing
        Every position of either list is in exactly one.
    """
    spelt = {kernel.name: spellings(kernel.name) for kernel in (*before, *after)}
    rounds: list[tuple[str, Callable[[Kernel], Hashable]]] = [
        ("name", lambda kernel: kernel.name),
        ("normalised", lambda kernel: spelt[kernel.name][0]),
        ("normalised", lambda kernel: spelt[kernel.name][1]),
        ("normalised", lambda kernel: spelt[kernel.name][2]),
        ("operator", _launcher),
    ]
    return in_rounds(before, after, rounds)


def _launcher(kernel: Kernel) -> Hashable:
    if not kernel.operator:
        return None
    return plain_range(kernel.operator), kernel.category


_Thing = TypeVar("_Thing")
#: The things of a side that are still without a partner, by the key of a round: their positions.
_Held = dict[Hashable, list[int]]


def in_rounds(
    before: Sequence[_Thing], after: Sequence[_Thing], rounds: Sequence[tuple[str, Callable[[_Thing], Hashable]]]
) -> list[Pairing]:
    """Pair what has the same key, in rounds: each sees only what the ones before it left.

    Parameters
    ----------
    before, after : sequence
    rounds : sequence of tuple
        How pairs of that round are called, and the key; what has no key (None) waits for the next round.

    Returns
    -------
    list of Pairing
        Every position of either list is in exactly one. What has no partner has ``disappeared`` or ``appeared``.
    """
    pairings: list[Pairing] = []
    left_before, left_after = list(range(len(before))), list(range(len(after)))
    for how, key in rounds:
        were = _by_key(before, left_before, key)
        are = _by_key(after, left_after, key)
        both = [label for label in were if label is not None and label in are]
        pairings += [Pairing(how, tuple(were[label]), tuple(are[label])) for label in both]
        left_before = _without(were, both)
        left_after = _without(are, both)
    pairings += [Pairing("disappeared", (position,), ()) for position in left_before]
    pairings += [Pairing("appeared", (), (position,)) for position in left_after]
    return pairings


def _by_key(things: Sequence[_Thing], positions: Sequence[int], key: Callable[[_Thing], Hashable]) -> _Held:
    held: _Held = {}
    for position in positions:
        held.setdefault(key(things[position]), []).append(position)
    return held


def _without(held: _Held, paired: Sequence[Hashable]) -> list[int]:
    """Positions that are left, in their order by key."""
    gone = set(paired)
    left: list[int] = []
    for label, positions in held.items():
        if label not in gone:
            left += positions
    return left


# ---------------------------------------------------------------- names

_UNNAMED = re.compile(r"\(anonymous namespace\)|<unnamed>|\{anonymous\}|_GLOBAL__N_\w*")
_CAST = re.compile(r"\((?:unsigned )?(?:int|long|bool|char|short)\)(?=-?\w)")
_LAMBDA = re.compile(r"\[lambda\(.*?\)[^\]]*\]|\{lambda\(.*?\)[^}]*\}")
_SUFFIX = re.compile(r"\b(\d+)(?:ull?|ll?)\b", re.IGNORECASE)
_RETURNED = re.compile(r"^(?:(?:void|__global__|static)\s+|std::enable_if<.*?>::type\s+)+")
_WORD = re.compile(r"[A-Za-z_]\w*")
#: Words that say for which types and with which machinery a template was compiled, not what it does.
_MACHINERY = re.compile(
    r"^(void|int|unsigned|signed|long|short|bool|char|float|double|half|__half|__nv_bfloat16|bfloat16|true|false|const"
    r"|u?int\d+_t|c10|at|aten|native|cuda|detail|std|thrust|lambda|operator|unnamed|instance|type|array"
    r"|\w*offsetcalculator|\w*withoutcast|\w*withcast|memory|tensor(iterator\w*|info|accessor\w*)?|params"
    r"|genericpackedtensoraccessor|\w*ptrtraits|gpu_kernel_impl(_nocast)?|enable_if|\w+::params)$"
)
_FUSED = re.compile(r"^(triton_\w+?_fused)(?:_(?!\d)(\w+?))?(?:_\d+)*$")
#: Rewritten in turn in each word: fusing compilers' numbers, cards, tiles, instruction shapes, versions.
_CHOICES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"^(maxwell|pascal|volta|turing|ampere|ada|hopper|blackwell)_", ""),
        (r"^(vectorized|unrolled|legacy)_(?=elementwise)", ""),
        (r"^nvjet_(sm\d+_)?([a-z]+)_.*?(_bias\w*?)?_([nt]{2,3})$", r"nvjet_\2\3_\4"),
        (r"(?<![a-z])sm\d+[a-z]?_", ""),
        (r"^cutlass(\d+x)?_(\d+_)?((wmma_)?tensorop|simt)_", ""),
        (r"_?(tilesize|warpsize|tensor|tile)?(?<![a-z\d])\d+x\d+(x\d+)*t?(?![a-z\d])", ""),
        (r"_?(tilesize|warpsize|tensor|tile)\d+x\d+(x\d+)*|_tile\d+t", ""),
        (r"(?<=[a-z])(\d{3,6}|\d+x\d+x\d+)gemm", "gemm"),
        (r"_(sliced|stages?|align|ldg)_?\d*(x\d+)?(?=_|$)", ""),
        (r"(?<=omp_offloading_)[\da-f]+_[\da-f]+_|_f\d+l\d+_\d+$", ""),  # OpenMP: a file and a line of it
        (r"_f\d+_c\d+_r\d+_g\d+|_v\d+(?=_|$)|(?<=[a-z])\d+$|_\d+(?=_|$)", ""),
        (r"__+", "_"),
        (r"^_+|_+$", ""),
    )
)


def spellings(name: str) -> tuple[str, str, str]:
    """Write a kernel's name without more and more of what changes while the kernel stays the same.

    Parameters
    ----------
    name : str
        Demangled.

    Returns
    -------
    tuple of str
        Without what demanglers spell differently; then also without types, sizes and arguments; then only the family:
        no card, no tiles, no versions, no numbers.

    Examples
    --------
    >>> spellings("volta_sgemm_128x32_nt")[2] == spellings("ampere_sgemm_64x64_nt")[2]
    True
    >>> spellings("volta_sgemm_128x32_nt")[2] == spellings("volta_sgemm_128x32_nn")[2]
    False
    >>> spellings("triton_poi_fused_add_3")[1] == spellings("triton_poi_fused_add_17")[1]
    True
    """
    spelt = _LAMBDA.sub("lambda", _UNNAMED.sub("unnamed", name))
    spelt = _RETURNED.sub("", spelt)
    spelt = _SUFFIX.sub(r"\1", _CAST.sub("", spelt))
    words = _telling(spelt)
    family = [_family(word) for word in words]
    if len(family) > 1 and family[0] in ("kernel", "device_kernel", "entry"):
        del family[0]  # a wrapper's argument says what it runs
    return re.sub(r"\s+", "", spelt), " ".join(words), " ".join(dict.fromkeys(family)) or spelt


def _family(word: str) -> str:
    for pattern, by in _CHOICES:
        word = pattern.sub(by, word)
    return word


def _telling(spelt: str) -> list[str]:
    """Give the function's own name, and the words of its template arguments that say what it does."""
    head, _, rest = spelt.partition("<")
    named = _WORD.findall(head.partition("(")[0])
    function = named[-1].lower() if named else spelt
    if fused := _FUSED.match(function):
        function = "_".join(filter(None, fused.groups()))
    words = [function]
    for word in _WORD.findall(rest[: _closing(rest)]):
        if not _MACHINERY.match(word.lower()):
            words.append(word.lower())
    return list(dict.fromkeys(words))


def _closing(rest: str) -> int:
    """Where template arguments end; what follows are the call's arguments."""
    depth = 1
    for position, sign in enumerate(rest):
        if sign == "<":
            depth += 1
        elif sign == ">" and rest[position - 1 : position] != "-":
            depth -= 1
        if not depth:
            return position
    return len(rest)


_ITERATOR = re.compile(r"#_(Single|Multi)Process(ing)?DataLoaderIter\b")
_NUMBERS = re.compile(r"[#\s]*\d+")


def plain_range(name: str) -> str:
    """Write a range's name without its numbers, and without how many processes a data loader has.

    Parameters
    ----------
    name : str

    Examples
    --------
    >>> plain_range("ProfilerStep#12")
    'ProfilerStep#'
    >>> plain_range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    'enumerate(DataLoader).__next__'
    """
    return _NUMBERS.sub("#", _ITERATOR.sub("", name))
