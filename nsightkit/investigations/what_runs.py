"""What a part runs: its code, operators with what they are given, own kernels, inputs, and how it is timed.

The key of a recording is a hash of the code and the parameters that made its figures. Two sources have the same key
when they differ only in comments, docstrings and layout. The hash covers the measuring function, the workload's entry
point, and whatever they use of nsightkit's workloads, captures and investigations, function by function. It is the same
on every Python version, and needs nothing imported.

What the code runs is listed when a part is recorded, without a GPU (:mod:`nsightkit.investigations.listed`), and kept
with the recording. Code that has changed since and runs the same can be accepted:
:func:`nsightkit.investigations.recordings.accept`. What Python does between the operators is not compared: whoever
accepts says that it takes no longer than before.
"""

from __future__ import annotations

import ast
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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import nsightkit
from nsightkit.capture.children import ask_child, fork_child
from nsightkit.capture.provenance import FORMAT
from nsightkit.investigations.parts import Part
from nsightkit.trace.programs import run

__all__ = ["NAME", "ask", "closure", "differs", "digests", "key", "past", "read", "sources", "write"]

#: The file in a recording.
NAME = "runs.json.gz"
#: The code that says how a part is timed; what its workload runs is listed operator by operator instead.
_TIMING = ("nsightkit.capture.", "nsightkit.investigations.")
_WORD = re.compile(r'"(\w+)"')
_DEEPEST = 8  # calls of one definition in another
_WHOLE = {"torch", "key", "parameters", "counts", "operators", "sources"}
_SHOWN = 150  # characters of a call in a message
_OURS = ("nsightkit.workloads", "nsightkit.capture", "nsightkit.investigations")
_ROOT = Path(nsightkit.__file__).parents[1]
#: By the name here, the module and the name there; None for a module itself.
_Imports = dict[str, tuple[str, str | None]]


# -- the key -----------------------------------------------------------------------------------------------------------


def key(code: Iterable[str], parameters: Mapping[str, Any], counts: Mapping[str, int], root: Path = _ROOT) -> str:
    """Compute the key of a part.

    Parameters
    ----------
    code : iterable of str
        ``module:name`` of what makes the figures: :attr:`nsightkit.investigations.parts.Part.code`.
    parameters, counts : mapping
        JSON values.
    root : Path
        The folder that holds the package ``nsightkit``.

    Returns
    -------
    str
        32 hexadecimal digits.
    """
    made_by = _digest(tuple(code), root)
    return _hash({"format": FORMAT, "code": made_by, "parameters": dict(parameters), "counts": dict(counts)})


@functools.cache
def _digest(roots: tuple[str, ...], root: Path) -> str:
    """Hash all that some functions use: many parts have the same."""
    return _hash(closure(roots, root))


def _hash(facts: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def closure(roots: Iterable[str], root: Path = _ROOT) -> dict[str, str]:
    """Collect the definitions that some functions use, themselves included.

    Parameters
    ----------
    roots : iterable of str
        ``module:name`` each.
    root : Path
        The folder that holds the package ``nsightkit``.

    Returns
    -------
    dict
        ``{"module:name": normalised source}``.

    Raises
    ------
    LookupError
        A root is not defined where it is said to be.
    """
    waiting = [(module, name) for module, _, name in (place.partition(":") for place in roots)]
    absent = [f"{module} defines no {name}" for module, name in waiting if name not in _load(module, root)[0]]
    if absent:
        raise LookupError(absent[0])
    found: dict[str, str | None] = {}
    while waiting:
        module, name = waiting.pop()
        if f"{module}:{name}" not in found:
            found[f"{module}:{name}"], uses = _definition(module, name, root)
            waiting += uses
    return {place: source for place, source in sorted(found.items()) if source is not None}


@functools.cache
def _definition(module: str, name: str, root: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """Give the normalised source of a definition and the names that it uses; of an imported name, where it is from."""
    definitions, imports = _load(module, root)
    if name not in definitions:
        origin, there = imports.get(name, ("", None))
        return None, [] if there is None else [(origin, there)]
    nodes = definitions[name]
    return json.dumps([_canonical(node) for node in nodes]), [
        use for node in nodes for use in _uses(node, module, root)
    ]


@functools.cache
def _load(module: str, root: Path) -> tuple[dict[str, list[ast.stmt]], _Imports]:
    """Give the top-level definitions of a module, and what it imports of ours."""
    source = _source(module, root)
    if source is None:
        raise LookupError(f"{module} has no source file")
    definitions: dict[str, list[ast.stmt]] = defaultdict(list)
    imports: _Imports = {}
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            definitions[node.name].append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for part in (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)):
                definitions[part.id].append(node)
        else:
            imports |= _imports(node, root)
    return dict(definitions), imports


def _source(module: str, root: Path) -> Path | None:
    """Find a module's file without importing anything."""
    place = root.joinpath(*module.split("."))
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def _imports(node: ast.AST, root: Path) -> _Imports:
    found: _Imports = {}
    for part in ast.walk(node):
        if isinstance(part, ast.ImportFrom) and part.module and not part.level and part.module.startswith(_OURS):
            for alias in part.names:
                whole = f"{part.module}.{alias.name}"
                origin = (whole, None) if _source(whole, root) else (part.module, alias.name)
                found[alias.asname or alias.name] = origin
        elif isinstance(part, ast.Import):
            found |= {a.asname: (a.name, None) for a in part.names if a.asname and a.name.startswith(_OURS)}
    return found


def _uses(node: ast.AST, module: str, root: Path) -> Iterator[tuple[str, str]]:
    """Give the definitions that are named in a piece of a module."""
    imports = _load(module, root)[1] | _imports(node, root)
    attributes: dict[ast.AST, str] = {
        part.value: part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)
    }
    for part in (part for part in ast.walk(node) if isinstance(part, ast.Name)):
        origin, name = imports.get(part.id, (module, part.id))
        if name is not None:
            yield origin, name
        elif part in attributes:
            yield origin, attributes[part]
        else:
            # A module that is passed on: whoever gets it may use anything in it.
            yield from ((origin, each) for each in _load(origin, root)[0])


def _canonical(node: Any) -> Any:
    """Give a syntax tree as JSON, without what does not run and without what Python versions add to it."""
    if isinstance(node, list):
        # A statement that is a bare string is a docstring, or a comment in the shape of one.
        texts = [isinstance(item, ast.Expr) and isinstance(getattr(item.value, "value", None), str) for item in node]
        return [_canonical(item) for item, text in zip(node, texts, strict=True) if not text]
    if not isinstance(node, ast.AST):
        return node if isinstance(node, str | int | bool | None) else repr(node)
    fields = {
        name: _canonical(value)
        for name, value in ast.iter_fields(node)
        # None and [] are skipped: newer versions add optional fields (type_params)
        if value is not None and value != [] and name not in ("type_comment", "kind", "ctx")
    }
    if isinstance(node, ast.Constant):
        fields["value"] = repr(node.value)
    return [type(node).__name__, fields]


# -- what it runs ------------------------------------------------------------------------------------------------------


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
        Normalised source by ``module:name``, from :func:`closure`.

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
