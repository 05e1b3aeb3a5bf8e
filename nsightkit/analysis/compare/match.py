"""Which kernel of one trace is which of another: by name, by a name without what versions change, by what launched it.

A name changes with the compiler (``Kernel<(int)4>`` or ``Kernel<4>``), with the card (``ampere_sgemm_128x64_tn``,
``volta_sgemm_32x128_tn``), with a library's choice of tiles, and with the order in which a fusing compiler numbers
what it makes (``triton_poi_fused_add_3``). So kernels are paired in rounds, each looser than the one before, and a
round sees only what the stricter ones left:

1. ``name``: the demangled name;
2. ``normalised``: the name without what demanglers spell differently; then without types, sizes and arguments; then
   without card, tiles, instruction shapes, versions and numbers (:func:`spellings`);
3. ``operator``: launched by the same framework operator, and of the same category;
4. ``range``: launched in the same innermost range, and of the same category;
5. ``fused``: a compiler's kernel, with those whose operators its name lists;
6. ``appeared`` and ``disappeared``: the rest.

A round may pair several kernels with several. Each kernel is in exactly one row, so sums over rows are those of the
trace.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from typing import NamedTuple, TypeVar

__all__ = ["HOW", "Kernel", "Pairing", "in_rounds", "pair", "plain_range", "spellings"]

#: How the kernels of a row were found to belong together, from the strictest to not at all.
HOW = ("name", "normalised", "operator", "range", "fused", "appeared", "disappeared")


class Kernel(NamedTuple):
    """What is known of all launches of one name.

    Parameters
    ----------
    name, category : str
    operator, range : str or None
        What launched most of its time, where that was recorded.
    """

    name: str
    category: str
    operator: str | None = None
    range: str | None = None


class Pairing(NamedTuple):
    """Kernels that belong together.

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
        *(("normalised", lambda kernel, i=i: spelt[kernel.name][i]) for i in range(3)),
        ("operator", lambda kernel: kernel.operator and (kernel.operator, kernel.category)),
        ("range", lambda kernel: kernel.range and (kernel.range, kernel.category)),
    ]
    return in_rounds(before, after, rounds, partial(_fused, before, after))


_Thing = TypeVar("_Thing")


def in_rounds(
    before: Sequence[_Thing],
    after: Sequence[_Thing],
    rounds: Sequence[tuple[str, Callable[[_Thing], Hashable]]],
    last: Callable[[Sequence[Sequence[int]]], list[Pairing]] = lambda _: [],
) -> list[Pairing]:
    """Pair what has the same key, in rounds: each sees only what the ones before it left.

    Parameters
    ----------
    before, after : sequence
    rounds : sequence of tuple
        How pairs of that round are called, and the key; what has no key (None) waits for the next round.
    last : callable, optional
        Pairs some of what is left: positions before and after.

    Returns
    -------
    list of Pairing
        Every position of either list is in exactly one. What has no partner has ``disappeared`` or ``appeared``.
    """
    found: list[Pairing] = []
    left = [list(range(len(before))), list(range(len(after)))]
    for how, key in rounds:
        sides: list[dict[Hashable, list[int]]] = [defaultdict(list), defaultdict(list)]
        for side, things, rows in zip(sides, (before, after), left, strict=True):
            for row in rows:
                side[key(things[row])].append(row)
        both = dict.fromkeys(k for k in sides[0] if k is not None and k in sides[1])
        found += [Pairing(how, tuple(sides[0][k]), tuple(sides[1][k])) for k in both]
        left = [[row for k, rows in side.items() if k not in both for row in rows] for side in sides]
    found += last(left)
    gone, come = ({row for one in found for row in getattr(one, side)} for side in ("before", "after"))
    found += [Pairing("disappeared", (row,), ()) for row in left[0] if row not in gone]
    return found + [Pairing("appeared", (), (row,)) for row in left[1] if row not in come]


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
    spelt = _SUFFIX.sub(r"\1", _CAST.sub("", _RETURNED.sub("", spelt)))
    words = _telling(spelt)
    family = [reduce(lambda text, choice: choice[0].sub(choice[1], text), _CHOICES, word) for word in words]
    # A wrapper's argument says what it runs.
    family = family[len(family) > 1 and family[0] in ("kernel", "device_kernel", "entry") :]
    return re.sub(r"\s+", "", spelt), " ".join(words), " ".join(dict.fromkeys(family)) or spelt


def _telling(spelt: str) -> list[str]:
    """Give the function's own name, and the words of its template arguments that say what it does."""
    head, _, rest = spelt.partition("<")
    named = _WORD.findall(head.partition("(")[0])
    function = named[-1].lower() if named else spelt
    if fused := _FUSED.match(function):
        function = "_".join(filter(None, fused.groups()))
    signs = ((sign == "<") - (sign == ">" and rest[at - 1 : at] != "-") for at, sign in enumerate(rest))
    depths = list(itertools.accumulate(signs, initial=1))[1:]
    inside = rest[: depths.index(0) if 0 in depths else None]  # what follows are the call's arguments
    words = [word.lower() for word in _WORD.findall(inside)]
    return list(dict.fromkeys([function, *(word for word in words if not _MACHINERY.match(word))]))


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


# ---------------------------------------------------------------- fusion

#: The category of what a fusing compiler made.
_BY_COMPILER = "Triton-fused"
#: What a fusing compiler can put into one kernel; matrix products keep kernels of their own.
_FUSIBLE = ("elementwise", "memory-like", "reduction", "normalization", "softmax", "optimizer", "other")
#: Parts of operators' names that many share.
_COMMON = ("native", "backward", "fused", "unsafe", "kernel")


def _fused(before: Sequence[Kernel], after: Sequence[Kernel], left: Sequence[Sequence[int]]) -> list[Pairing]:
    """Group the kernels that a compiler fused, in either direction, with those that it made of them."""
    parts = [[(row, _Part.of(side[row])) for row in rows] for side, rows in zip((before, after), left, strict=True)]
    groups: list[tuple[set[int], set[int]]] = []
    for (i, one), (j, other) in itertools.product(*parts):
        if one.made_of(other) or other.made_of(one):
            joined = [group for group in groups if i in group[0] or j in group[1]]
            groups = [group for group in groups if group not in joined]
            groups.append(({i}.union(*(was for was, _ in joined)), {j}.union(*(now for _, now in joined))))
    return [Pairing("fused", was, now) for was, now in sorted((tuple(sorted(a)), tuple(sorted(b))) for a, b in groups)]


class _Part(NamedTuple):
    """A kernel as fusion sees it: the operators that its name lists, and what it would be listed as."""

    kernel: Kernel
    lists: str
    operator: str
    spelt: str

    @classmethod
    def of(cls, kernel: Kernel) -> _Part:
        fused = kernel.category == _BY_COMPILER
        listed = _FUSED.match(_telling(kernel.name)[0]) if fused else None
        operator = (kernel.operator or "").rpartition("::")[2].strip("_")
        spelt = "" if fused or operator else spellings(kernel.name)[1]
        return cls(kernel, (listed and listed[2]) or "", operator, spelt)

    def made_of(self, other: _Part) -> bool:
        """Whether this is a compiler's kernel with the other one in it."""
        if self.kernel.category != _BY_COMPILER or other.kernel.category not in _FUSIBLE:
            return False
        if not self.lists:  # a compiler that does not say what it fused
            return self.kernel.range is not None and self.kernel.range == other.kernel.range
        words = (w for w in self.lists.split("_") if len(w) > 2 and w not in _COMMON and w in other.spelt)
        return f"_{other.operator}_" in f"_{self.lists}_" if other.operator else any(words)
