"""Match the names of two traces: equal names first, then names that are equal without the parts that versions change.

A kernel's name changes with the compiler (``Kernel<(int)4>`` or ``Kernel<4>``), with the card and a library's choice
of tiles (``ampere_sgemm_128x64_tn``, ``volta_sgemm_32x128_tn``), with element types, and with the number that a
compiler gives a fused kernel (``triton_poi_fused_add_3``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Pair(NamedTuple):
    """Names of two traces that belong together.

    Parameters
    ----------
    match : {"name", "normalised", "appeared", "disappeared"}
        How they were matched: by name, by plain name, or not, as only one side has them.
    before, after : list of str
        The names of each side; one may be empty.
    """

    match: str
    before: list[str]
    after: list[str]


def pair(before: Sequence[str], after: Sequence[str], plain: Callable[[str], str]) -> list[Pair]:
    """Pair the names of two traces: the same name first, then the same plain name among the rest.

    Parameters
    ----------
    before, after : sequence of str
        Each name once.
    plain : callable
        Removes from a name what may differ.

    Returns
    -------
    list of Pair
        Every name of either side is in exactly one.
    """
    shared = set(before) & set(after)
    # By how names match and what they have in common: the names before, and the names after.
    groups: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for side, names in enumerate((before, after)):
        for name in names:
            key = ("name", name) if name in shared else ("normalised", plain(name))
            groups.setdefault(key, ([], []))[side].append(name)
    pairs = []
    for key, (names_before, names_after) in groups.items():
        match, _ = key
        if not names_after:
            match = "disappeared"
        elif not names_before:
            match = "appeared"
        pairs.append(Pair(match, names_before, names_after))
    return pairs


#: Parts of a demangled name that compilers write differently for one kernel.
_NAMELESS = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\[lambda\(.*?\)[^\]]*\]|\{lambda\(.*?\)[^}]*\}")
_WORD = re.compile(r"\b[A-Za-z_]\w*")
#: Template arguments that are a type, or machinery of PyTorch's templates.
_MACHINERY = re.compile(
    r"^(void|int|unsigned|signed|long|short|bool|char|float|double|half|__half|__nv_bfloat16|bfloat16|true|false|const"
    r"|u?int\d+_t|c10|at|aten|native|cuda|detail|std|thrust|lambda|operator|instance|type|array"
    r"|\w*offsetcalculator|\w*withoutcast|\w*withcast|memory|tensor(iterator\w*|info|accessor\w*)?|params"
    r"|genericpackedtensoraccessor|\w*ptrtraits|gpu_kernel_impl(_nocast)?|enable_if)$"
)
#: Parts of a word that name a card, a tile, a stage count, a version or a number.
_CHOICE = re.compile(
    r"(maxwell|pascal|volta|turing|ampere|ada|hopper|blackwell|vectorized|unrolled|legacy|cutlass|tensorop|wmma|simt"
    r"|sm\d+[a-z]?|(tile|warp|tensor)?(size)?\d+x[\dx]+t?|(sliced|stages?|align|ldg|coop)\w?\d*(x\d+)?"
    r"|[a-z]?\d+[a-z]?\d*|v|h|bz|)"
)
#: Digits to remove from a part of a word: three or more before a letter, or any at its end.
_NUMBERS = re.compile(r"\d{3,}(?=[a-z])|(?<=[a-z])\d+$")


def plain_kernel(name: str) -> str:
    """Reduce a kernel's name to the words that stay the same without types, card, tiles, versions and numbers.

    Parameters
    ----------
    name : str
        Demangled, such as ``void at::native::kernel<4, at::native::add<float>>(int)``.

    Examples
    --------
    >>> plain_kernel("volta_sgemm_128x32_nt") == plain_kernel("ampere_sgemm_64x64_nt")
    True
    >>> plain_kernel("volta_sgemm_128x32_nt") == plain_kernel("volta_sgemm_128x32_nn")
    False
    >>> plain_kernel("triton_poi_fused_add_3")
    'triton_poi_fused_add'
    """
    head, _, arguments = _NAMELESS.sub("", name).partition("<")
    # Before the template's arguments: the last word is the function, the others are its namespaces and its type.
    head_words = _WORD.findall(head.partition("(")[0])
    words = [head_words[-1].lower()] if head_words else [name]
    # The template's arguments end where those of the call begin.
    for word in _WORD.findall(arguments.rpartition(">(")[0] or arguments):
        if not _MACHINERY.match(word.lower()):
            words.append(word.lower())
    plain_words = [_without_choices(word) for word in words]
    return " ".join(dict.fromkeys(filter(None, plain_words))) or name


def _without_choices(word: str) -> str:
    """Remove from a word, part by part between underscores, what names a card, a tile, a version or a number."""
    parts = [_NUMBERS.sub("", part) for part in word.split("_") if not _CHOICE.fullmatch(part)]
    return "_".join(parts)


#: The end of the name of PyTorch's loader, which differs with and without worker processes.
_ITERATOR = re.compile(r"#_(Single|Multi)Process(ing)?DataLoaderIter\b")
#: Numbers in a range's name, with a number sign and spaces before them.
_RANGE_NUMBERS = re.compile(r"[#\s]*\d+")


def plain_range(name: str) -> str:
    """Name a range with ``#`` for its numbers, and the same whether a data loader has worker processes or not.

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
    return _RANGE_NUMBERS.sub("#", _ITERATOR.sub("", name))
