"""What a function takes, read from its signature and its numpydoc docstring: for the command line and for agents."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["REQUIRED", "Option", "options_of", "summary_of"]

#: The default of what must be given.
REQUIRED = inspect.Parameter.empty
#: Placeholders of values in help.
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}


@dataclasses.dataclass(frozen=True)
class Option:
    """A parameter of a function, as the command line and agents give it.

    Parameters
    ----------
    name : str
    kind : type
        Of one value: bool, int, float, str or Path.
    help : str
        From the docstring.
    metavar : str
        Placeholder of a value in help.
    default : object
        :data:`REQUIRED` where it must be given.
    choices : tuple of str
        The only values, if they are listed.
    is_list : bool
        It takes several values.
    is_positional : bool
        It is given by its place.
    """

    name: str
    kind: type
    help: str
    metavar: str
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()
    is_list: bool = False
    is_positional: bool = False

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is REQUIRED


def summary_of(function: Callable[..., Any]) -> str:
    """Give the first sentence of a docstring.

    Parameters
    ----------
    function : callable
    """
    return (inspect.getdoc(function) or "").partition("\n")[0]


def options_of(function: Callable[..., Any]) -> list[Option]:
    """Read what a function takes.

    Parameters
    ----------
    function : callable
        Annotated with types of what a person can type (bool, int, float, str, Path, choices, or lists of them). A
        parameter with a quoted annotation (``"Trace"``) takes something else and is left out. A type in capital letters
        in the docstring (``REGEX``) is the placeholder in help.
    """
    described = _described(inspect.getdoc(function) or "")
    options = []
    for parameter in inspect.signature(function).parameters.values():
        if isinstance(parameter.annotation, str):
            continue
        told, text = described.get(parameter.name, ("", ""))
        kind, choices, is_list = _kind(parameter.annotation)
        default = parameter.default
        if parameter.kind is parameter.VAR_POSITIONAL:
            is_list, default = True, []
        words = told.partition(",")[0]
        option = Option(
            name=parameter.name,
            kind=kind,
            help=text,
            metavar=words if words.isupper() else _METAVARS.get(kind, ""),
            default=default,
            choices=choices,
            is_list=is_list,
            is_positional=parameter.kind is not parameter.KEYWORD_ONLY,
        )
        options.append(option)
    return options


def _described(docstring: str) -> dict[str, tuple[str, str]]:
    """The type and the description of each parameter in a numpydoc docstring."""
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\S+\n-+\n|\Z)", docstring, re.MULTILINE | re.DOTALL)
    described: dict[str, tuple[str, str]] = {}
    names: list[str] = []
    for line in section[1].splitlines() if section else []:
        if line and not line.startswith(" "):
            before, _, told = line.partition(" : ")
            names = [name.strip().lstrip("*") for name in before.split(",")]
            described |= dict.fromkeys(names, (told, ""))
        elif line.strip():
            for name in names:
                told, text = described[name]
                described[name] = (told, f"{text} {line.strip()}".strip())
    return described


def _kind(annotation: Any) -> tuple[type, tuple[str, ...], bool]:
    """The type of one value, its choices, and whether there can be several."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not types.NoneType]
        return _kind(members[0])
    if get_origin(annotation) is list:
        kind, choices, _ = _kind(get_args(annotation)[0])
        return kind, choices, True
    if get_origin(annotation) is Literal:
        return str, get_args(annotation), False
    return annotation, (), False
