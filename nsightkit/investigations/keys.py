"""The key of a recording: a hash of the code and the parameters that made its figures.

Two sources have the same key when they differ only in comments, docstrings and layout. The hash covers
the measuring function, the workload's entry point, and whatever they use of nsightkit's workloads, captures
and investigations, function by function. It is the same on every Python version, and needs nothing imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from nsightkit.capture.provenance import FORMAT

__all__ = ["closure", "key"]

_OURS = ("nsightkit.workloads", "nsightkit.capture", "nsightkit.investigations")


def key(code: Iterable[str], parameters: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """Compute the key of a part.

    Parameters
    ----------
    code : iterable of str
        ``module:name`` of what makes the figures: :attr:`nsightkit.investigations.parts.Part.code`.
    parameters, counts : mapping
        JSON values.

    Returns
    -------
    str
        32 hexadecimal digits.
    """
    facts = {"format": FORMAT, "code": closure(code), "parameters": dict(parameters), "counts": dict(counts)}
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def closure(roots: Iterable[str]) -> dict[str, str]:
    """Collect the definitions that some functions use, themselves included.

    Parameters
    ----------
    roots : iterable of str
        ``module:name`` each.

    Returns
    -------
    dict
        ``{"module:name": normalised source}``.

    Raises
    ------
    LookupError
        A root is not defined where it is said to be.
    """
    waiting = [(module, name) for module, _, name in (root.partition(":") for root in roots)]
    for module, name in waiting:
        if name not in _load(module).definitions:
            raise LookupError(f"{module} defines no {name}")
    found: dict[str, str] = {}
    while waiting:
        module, name = waiting.pop()
        if f"{module}:{name}" in found:
            continue
        loaded = _load(module)
        nodes = loaded.definitions.get(name)
        if nodes is None:
            origin = loaded.imports.get(name)  # imported there under this name
            if origin is not None and origin[1] is not None:
                waiting.append((origin[0], origin[1]))
            continue
        found[f"{module}:{name}"] = json.dumps([_canonical(node) for node in nodes])
        for node in nodes:
            waiting += _uses(node, loaded)
    return dict(sorted(found.items()))


class _Module:
    """Top-level definitions and imports of a module, from its source."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, tuple[str, str | None]] = {}
        source = _source(name)
        if source is None:
            raise LookupError(f"there is no source of {name}")
        for node in ast.parse(source.read_bytes()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.definitions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for part in ast.walk(target):
                        if isinstance(part, ast.Name):
                            self.definitions.setdefault(part.id, []).append(node)
            else:
                self.imports.update(_imports(node))


@functools.cache
def _load(module: str) -> _Module:
    return _Module(module)


def _imports(node: ast.AST) -> dict[str, tuple[str, str | None]]:
    """``{name here: (module, name there)}`` of our own modules that a statement imports; None for a module itself."""
    found: dict[str, tuple[str, str | None]] = {}
    for part in ast.walk(node):
        if isinstance(part, ast.ImportFrom) and part.module and not part.level and part.module.startswith(_OURS):
            for alias in part.names:
                whole = f"{part.module}.{alias.name}"
                found[alias.asname or alias.name] = (whole, None) if _source(whole) else (part.module, alias.name)
        elif isinstance(part, ast.Import):
            for alias in part.names:
                if alias.name.startswith(_OURS) and alias.asname:
                    found[alias.asname] = (alias.name, None)
    return found


@functools.cache
def _source(module: str) -> Path | None:
    """Find a module's file without importing anything on the way to it, as find_spec would."""
    package, *below = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin)
    if below:
        place = place.parent.joinpath(*below)
        place = place / "__init__.py" if place.is_dir() else place.with_name(place.name + ".py")
    return place if place.is_file() else None


def _uses(node: ast.AST, module: _Module) -> Iterator[tuple[str, str]]:
    imports = module.imports | _imports(node)
    parts = list(ast.walk(node))
    attributes = [(p.value, p.attr) for p in parts if isinstance(p, ast.Attribute) and isinstance(p.value, ast.Name)]
    for owner, attribute in attributes:
        if owner.id in imports:
            origin, name = imports[owner.id]
            if name is None:
                yield origin, attribute
    owners = {id(owner) for owner, _ in attributes}
    for part in parts:
        if not isinstance(part, ast.Name):
            continue
        if part.id in imports:
            origin, name = imports[part.id]
            if name is not None:
                yield origin, name
            elif id(part) not in owners:
                # A module that is passed on: whoever gets it may use anything in it.
                yield from ((origin, each) for each in _load(origin).definitions)
        elif part.id in module.definitions:
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
