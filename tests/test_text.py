"""Regular expressions that people type: what Python's find, in linear time."""

from __future__ import annotations

import contextlib
import random
import re
import time

import pandas as pd
import pytest

from nsightkit.errors import UsageError
from nsightkit.text import compiled, matching

#: With Python's own engine each takes longer than anybody waits, or is an error; here each is one or the other at once.
BACKTRACKING = [
    "(a+)+$",
    "(a|a)*$",
    "(a|aa)+$",
    "(.*a){20}$",
    "((a+)*)*$",
    "(a*)*b",
    "(a?){50}a{50}b",
    r"(\w+\s?)*!$",
    "(a{1000}){1000}",
    "(((a{100}){100}){100}){100}",
    "(a?){1000}" * 90,
    "(" * 400 + "a" + ")+" * 400 + "$",
    "a" * 1001,
    "[" * 1000,
    "(?i)[\x00-\U0010ffff]" * 40,
]
NAMES = ["a" * 3000 + "?", "b" * 3000, "aaaa " * 600 + "?", "a"]
WORDS = [
    *("forward", "backward", "step 12", "ProfilerStep#3", "aten::mm", "void k<float, 4>(int*)", "é", "data load", ""),
    *("ncclDevKernel_AllReduce", "Memcpy HtoD", "layer.3/attn", "FORWARD", "a_b-c", "two\nlines", "加载 batch", "$x^2"),
]
#: Pieces that mean the same in both engines.
PIECES = [
    *("for", "ward", "step", "a", "b", "[a-z]+", "[^a-z]", r"\d+", ".", ".*", "(k|mm)", "(?:data|load)", "é", "::"),
    *(r"\(", r"\*", "#", "^", "$", "x?", "[0-9]{1,2}", "(?P<n>w)", r"\.", "#", " ", "<", "l{2}", "加", r"\b", "(?i:F)"),
]


@pytest.mark.parametrize("expression", BACKTRACKING, ids=lambda text: text[:20])
def test_none_takes_long(expression: str):
    started = time.monotonic()
    with contextlib.suppress(UsageError):
        found = matching(pd.Series(pd.Categorical(NAMES)), compiled(expression, "--match"))
        assert len(found) == len(NAMES)
    assert time.monotonic() - started < 2


def test_it_finds_what_python_finds():
    names = pd.Series(pd.Categorical(WORDS))
    tried = 0
    for seed in range(2000):
        choose = random.Random(seed)
        expression = choose.choice(["", "", "(?i)"]) + "".join(choose.choices(PIECES, k=choose.randint(1, 4)))
        try:
            python = re.compile(expression, re.ASCII)
        except re.error:
            continue
        tried += 1
        expected = [python.search(name) is not None for name in WORDS]
        assert matching(names, compiled(expression, "x")).tolist() == expected, expression
    assert tried > 1500


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("(?=a)", "invalid perl operator"),
        (r"(a)\1", "invalid escape sequence"),
        ("(", "missing )"),
        ("a{2,1}", "repetition"),
        ("\udcff", "not a regular expression"),
        ("x" * 1001, "at most 1,000 characters"),
        ("a{1000}" * 9, "too large"),
    ],
)
def test_what_it_refuses(expression: str, says: str):
    with pytest.raises(UsageError, match=r"^--within: ") as raised:
        compiled(expression, "--within")
    assert says in str(raised.value)


def test_names_that_are_no_utf8():
    assert compiled("caf.$", "x").search("caf\udce9")
