"""What a part runs: operators with what they are given, own kernels, inputs, and how it is timed.

It is listed when a part is recorded, without a GPU (:mod:`nsightkit.investigations.listed`), and kept with the
recording. Code that has changed since and runs the same can be accepted:
:func:`nsightkit.investigations.recordings.accept`. What Python does between the operators is not compared: whoever
accepts says that it takes no longer than before.
"""

from __future__ import annotations

import functools
import gzip
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import nsightkit
from nsightkit.capture.children import ask_child, fork_child
from nsightkit.investigations.keys import closure
from nsightkit.investigations.parts import Part
from nsightkit.trace._process import run

__all__ = ["NAME", "ask", "differs", "digests", "past", "read", "sources", "write"]

#: The file in a recording.
NAME = "runs.json.gz"
#: The code that says how a part is timed; what its workload runs is listed operator by operator instead.
_TIMING = ("nsightkit.capture.", "nsightkit.investigations.")
_WORD = re.compile(r'"(\w+)"')
_DEEPEST = 8  # calls of one definition in another
_WHOLE = {"torch", "key", "parameters", "counts", "operators", "sources"}
_SHOWN = 150  # characters of a call in a message


def ask(part: Part, start: Callable[..., Any] | None = None, timeout_s: float = 300.0) -> dict[str, Any]:
    """List what a part runs, in a process of its own that uses no GPU.

    Parameters
    ----------
    part : Part
    start : callable, optional
        How the process is started, as for :func:`nsightkit.capture.children.ask_child`; with the code as it is now when
        omitted.
    timeout_s : float

    Returns
    -------
    dict
        ``why_not``: why it cannot be listed; else ``torch``, the version of PyTorch that listed it, ``key``, that of a
        recording by the same code, ``parameters``, ``counts``, ``operators``, and ``sources``, as from :func:`sources`.
    """
    job = {"investigation": part.investigation, "part": part.name}  # older code, too, is asked in these words
    try:
        return ask_child("nsightkit.investigations.listed", job, timeout_s, start or fork_child)
    # A recording is kept whatever goes wrong here.
    except Exception as error:
        return {"why_not": " ".join(f"{error}".split())}


def past(commit: str, part: Part) -> dict[str, Any]:
    """List what a part ran with the code of a commit.

    Parameters
    ----------
    commit : str
        As a recording names it.
    part : Part

    Returns
    -------
    dict
        As from :func:`ask`; ``why_not`` also where this checkout does not have the commit.
    """
    checkout = Path(nsightkit.__file__).parents[1]
    command = ["git", "-C", str(checkout), "archive", "--format=tar", commit, "nsightkit"]
    absent = {"why_not": f"this checkout does not have its commit {commit[:12]}".rstrip()}
    if not re.fullmatch("[0-9a-f]{7,40}", commit):  # it comes from a file: git must not take it for an option
        return absent
    with tempfile.TemporaryDirectory(prefix="nsightkit-") as folder:
        try:
            packed = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(packed)) as tree:
                tree.extractall(folder, filter="data")
        except (OSError, subprocess.SubprocessError, tarfile.TarError):
            return absent
        return ask(part, functools.partial(_start_in, folder))


def _start_in(folder: str, module: str, job: Mapping[str, Any], timeout_s: float) -> Any:
    # Without -P the folder one stands in, a checkout for instance, would come first.
    return run(
        [sys.executable, "-P", "-m", "nsightkit.capture.children", module, json.dumps(job)],
        timeout_s,
        env={**os.environ, "PYTHONPATH": folder},
    )


def sources(part: Part, kernels: Iterable[str], data: Iterable[str]) -> dict[str, dict[str, str]]:
    """Give digests of the source that makes a part's figures and is not seen in its operators.

    Parameters
    ----------
    part : Part
    kernels, data : iterable of str
        ``module:name`` of own kernels, and of classes that make data.

    Returns
    -------
    dict of dict
        ``kernel``, ``data`` and ``timing``; each has digests by ``module:name``.
    """
    timing = closure(place for place in part.code if place != part.workload)
    return {
        "kernel": digests(closure(kernels)),
        # Of what makes data the class itself: sizes, and the model that learns from it, are seen elsewhere.
        "data": digests({place: source for place, source in closure(data).items() if place in data}),
        "timing": digests({place: source for place, source in timing.items() if place.startswith(_TIMING)}),
    }


def digests(definitions: Mapping[str, str]) -> dict[str, str]:
    """Hash definitions so that what they are called, and where they lie, does not count.

    Parameters
    ----------
    definitions : mapping
        Normalised source by ``module:name``, from :func:`nsightkit.investigations.keys.closure`.

    Returns
    -------
    dict of str to str
        Of two definitions that have one digest both do the same, and use what does the same.
    """
    names = {place: place.partition(":")[2] for place in definitions}
    # A name stands for the digest of what it names: after as many rounds as calls are deep, for all that this uses.
    found: dict[str, str] = dict.fromkeys(definitions, "")
    for _ in range(_DEEPEST):
        own = {names[place]: digest for place, digest in found.items()}
        found = {
            place: blake2b(_WORD.sub(functools.partial(_named, own), source).encode(), digest_size=8).hexdigest()
            for place, source in definitions.items()
        }
    return found


def _named(own: Mapping[str, str], word: re.Match[str]) -> str:
    return f'"{own.get(word[1], word[1])}"'


def differs(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say in one line what a part runs now that it did not run then.

    Parameters
    ----------
    then, now : mapping
        From :func:`ask`.

    Returns
    -------
    str
        Empty where it runs the same.
    """
    for group, what in (("parameters", "parameter"), ("counts", "count")):
        for name in sorted({*then[group], *now[group]}):
            was, is_ = (listed[group].get(name) for listed in (then, now))
            if was != is_:
                return f"its {what} {name} {_was_and_is(was, is_)}"
    for number, (was, is_) in enumerate(itertools.zip_longest(then["operators"], now["operators"])):
        if was != is_:
            return f"of what it calls, number {number} {_was_and_is(was, is_)}"
    for group, what in (
        ("kernel", "the source of a Triton kernel has changed"),
        ("data", "the source of what makes its data has changed"),
        ("timing", "the source of how it is timed has changed"),
    ):
        old, new = then["sources"][group], now["sources"][group]
        alike = {*old.values()} & {*new.values()}
        changed = {place for listed in (old, new) for place, digest in listed.items() if digest not in alike}
        if changed:
            return f"{what}: {', '.join(sorted(changed, key=lambda place: (place not in old, place))[:3])}"
    return ""


def _was_and_is(*values: Any) -> str:
    """Show two values; of long ones where they begin to differ."""
    texts = ["nothing" if value is None else f"{value}" for value in values]
    same = next((i for i, two in enumerate(zip(*texts, strict=False)) if len({*two}) > 1), 0)
    first = same - _SHOWN // 2 if same > _SHOWN // 2 and max(map(len, texts)) > _SHOWN else 0
    ends = ("..." if first else "", "...")
    was, is_ = (f"{ends[0]}{t[first : first + _SHOWN]}{ends[1] if len(t) > first + _SHOWN else ''}" for t in texts)
    return f"was {was} and is {is_}"


def write(listed: Mapping[str, Any], folder: Path) -> None:
    """Keep a list with a recording.

    Parameters
    ----------
    listed : mapping
        From :func:`ask`.
    folder : Path
        The recording's.
    """
    text = json.dumps(listed, sort_keys=True, ensure_ascii=False).encode()
    (folder / NAME).write_bytes(gzip.compress(text, mtime=0))


def read(folder: Path) -> dict[str, Any]:
    """Read the list that a recording holds.

    Parameters
    ----------
    folder : Path

    Returns
    -------
    dict
        As :func:`ask` gives it; ``why_not`` also if the recording has no list.
    """
    try:
        found = json.loads(gzip.decompress((folder / NAME).read_bytes()))
    except FileNotFoundError:
        return {"why_not": "the recording holds no list of it"}
    except (OSError, EOFError, ValueError, zlib.error) as error:
        return {"why_not": f"its list cannot be read ({error})"}
    whole = isinstance(found, dict) and ("why_not" in found or found.keys() >= _WHOLE)
    return found if whole else {"why_not": "its list is not whole"}
