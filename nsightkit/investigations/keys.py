"""The key of a recording: a hash of the code and the parameters that made its figures.

Two sources have the same key when they differ only in comments, docstrings and layout. The hash covers
the measuring function, the workload's entry point, and whatever they use of nsightkit's workloads, captures
and investigations, function by function. It is the same on every Python version, and needs nothing imported.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import nsightkit
from nsightkit.capture.provenance import FORMAT

__all__ = ["closure", "key"]

_OURS = ("nsightkit.workloads", "nsightkit.capture", "nsightkit.investigations")
_ROOT = Path(nsightkit.__file__).parents[1]


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
    absent = [f"{module} defines no {name}" for module, name in waiting if name not in _load(module, root).definitions]
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
    loaded = _load(module, root)
    if name not in loaded.definitions:
        origin, there = loaded.imports.get(name, ("", None))
        return None, [] if there is None else [(origin, there)]
    nodes = loaded.definitions[name]
    return json.dumps([_canonical(node) for node in nodes]), [
        use for node in nodes for use in _uses(node, loaded, root)
    ]


@dataclasses.dataclass(frozen=True)
class _Module:
    """Top-level definitions of a module, and what it imports of ours: ``{name here: (module, name there)}``.

    The name there is None for a module itself.
    """

    name: str
    definitions: Mapping[str, list[ast.stmt]]
    imports: Mapping[str, tuple[str, str | None]]


@functools.cache
def _load(module: str, root: Path) -> _Module:
    source = _source(module, root)
    if source is None:
        raise LookupError(f"{module} has no source file")
    definitions: dict[str, list[ast.stmt]] = defaultdict(list)
    imports: dict[str, tuple[str, str | None]] = {}
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            definitions[node.name].append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for part in (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)):
                definitions[part.id].append(node)
        else:
            imports |= _imports(node, root)
    return _Module(module, dict(definitions), imports)


def _source(module: str, root: Path) -> Path | None:
    """Find a module's file without importing anything."""
    place = root.joinpath(*module.split("."))
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def _imports(node: ast.AST, root: Path) -> dict[str, tuple[str, str | None]]:
    found: dict[str, tuple[str, str | None]] = {}
    for part in ast.walk(node):
        if isinstance(part, ast.ImportFrom) and part.module and not part.level and part.module.startswith(_OURS):
            for alias in part.names:
                whole = f"{part.module}.{alias.name}"
                origin = (whole, None) if _source(whole, root) else (part.module, alias.name)
                found[alias.asname or alias.name] = origin
        elif isinstance(part, ast.Import):
            found |= {a.asname: (a.name, None) for a in part.names if a.asname and a.name.startswith(_OURS)}
    return found


def _uses(node: ast.AST, module: _Module, root: Path) -> Iterator[tuple[str, str]]:
    """Give the definitions that are named in a piece of a module."""
    imports = {**module.imports, **_imports(node, root)}
    owners = set()
    for part in ast.walk(node):  # from the outside in: an attribute comes before the name it belongs to
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            origin, name = imports.get(part.value.id, ("", ""))
            if name is None:
                owners.add(part.value)
                yield origin, part.attr
        elif isinstance(part, ast.Name) and part.id in imports:
            origin, name = imports[part.id]
            if name is not None:
                yield origin, name
            elif part not in owners:
                # A module that is passed on: whoever gets it may use anything in it.
                yield from ((origin, each) for each in _load(origin, root).definitions)
        elif isinstance(part, ast.Name) and part.id in module.definitions:
            yield module.name, part.id


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
