"""What kind of work a kernel does, read from its name.

Names are reliable only for kernels of known libraries: cuBLAS, cuDNN, CUTLASS, CUB and Thrust,
PyTorch's own kernels, flash attention, NCCL, what ``torch.compile`` generates, and a few more. Every other kernel is
*other*, even if its name contains familiar words. For known ones ordered rules over the demangled name decide; the
first match wins. ``categories.toml`` has the libraries and the rules.

Decisions that a reader may want to know:

- *convolution* is what cuDNN and MIOpen run, Winograd's transforms and offset tables included; *GEMM* includes a
  split-K epilogue.
- *Triton-fused* is what a fusing compiler generated: Triton through ``torch.compile``, nvFuser, XLA,
  TensorRT's Myelin. A Triton *template* (``triton_tem_fused_mm``) is a GEMM or an attention, not a fusion.
- *memory-like* kernels move, fill, cast, gather, scatter, permute or sort data: little arithmetic to each byte.
- *reduction* includes scans, histograms, pooling, arg-max and losses; ``multi_tensor_apply`` (PyTorch's
  ``_foreach`` kernels) is *optimizer*, which is also where gradient clipping runs.
"""

from __future__ import annotations

import functools
import re

import pandas as pd

from nsightkit.text import read_toml

_FILE = read_toml(__file__, "categories")
#: Every category, in the order tables show them when times are equal.
CATEGORIES: tuple[str, ...] = tuple(_FILE["categories"])
#: Collectives on a CPU: PyTorch's annotations of Gloo, MPI and UCC.
CPU_COLLECTIVE = re.compile(r"^(gloo|mpi|ucc):|\bshm_(all_?reduce|(all_)?gather|send|recv)")


def _expression(parts: str | list[str]) -> re.Pattern[str]:
    """Compile an expression that the file may split into parts."""
    return re.compile("".join(parts), re.IGNORECASE)


_LIBRARIES = _expression(_FILE["libraries"])
#: In order of precedence: a category, and what is searched in the function's name and in the full name.
_RULES: list[tuple[str, re.Pattern[str], re.Pattern[str]]] = []
for _rule in _FILE["rules"]:
    _RULES.append((_rule["category"], _expression(_rule["pattern"]), _expression(_rule.get("inner", ""))))
# A return type, and the two spellings of an unnamed namespace, are not part of a function's name.
_UNNAMED = re.compile(r"\(anonymous namespace\)|<unnamed>|\{anonymous\}")
_RETURN_TYPE = re.compile(r"^(?:(?:void|__global__|static)\s+|std::enable_if<.*?>::type\s+)+")
#: Names of fused kernels have up to 3,000 characters. The rest of a longer name, made to slow the rules, is ignored.
_MOST_CHARACTERS = 10_000


@functools.lru_cache(65_536)
def category_of(name: str) -> str:
    """Decide the category of one kernel.

    Parameters
    ----------
    name : str
        Demangled (or short) kernel name.

    Returns
    -------
    str
        One of :data:`CATEGORIES`.

    Examples
    --------
    >>> category_of("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN")
    'GEMM'
    >>> category_of("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps>>")
    'reduction'
    """
    name = name[:_MOST_CHARACTERS]
    # The rules are for the names of libraries. In the name of a user's own kernel their words may mean anything.
    if not _LIBRARIES.search(name):
        return "other"
    function = _RETURN_TYPE.sub("", _UNNAMED.sub("unnamed", name))
    function = re.split(r"[<(]", function, maxsplit=1)[0]
    for category, function_pattern, full_name_pattern in _RULES:
        if function_pattern.search(function) and full_name_pattern.search(name):
            return category
    return "other"


def categorize(names: pd.Index | pd.Series) -> pd.Categorical[str]:
    """Decide the category of each kernel; the rules run once per distinct name, never per row.

    Parameters
    ----------
    names : Index or Series of str or category, shape (n,)
        Kernel names.

    Returns
    -------
    Categorical, shape (n,)
        Its categories are :data:`CATEGORIES`.
    """
    distinct = pd.Series(names, dtype="category").cat
    # The last is for a missing name, whose code is -1.
    categories = [*map(category_of, distinct.categories.astype(str)), "other"]
    category_codes = pd.Categorical(categories, pd.Index(CATEGORIES)).codes
    return pd.Categorical.from_codes(category_codes[distinct.codes], pd.Index(CATEGORIES))
