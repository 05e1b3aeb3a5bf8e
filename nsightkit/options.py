"""A function as a command: its options, from its signature and numpydoc docstring, and its call with opened traces.

The command line and the server for agents use the same commands.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin

from nsightkit.errors import progress, reading
from nsightkit.questions import Selection

if TYPE_CHECKING:
    from nsightkit.trace.model import Trace

#: The default of an option that must be given.
REQUIRED = inspect.Parameter.empty
#: Placeholders of values in help.
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
#: Help of a trace that the docstring does not describe.
_TRACE_HELP = "Trace to read."
#: Types of what a person types, by the annotation of a parameter that takes a trace or several.
_TRACE_TYPES: dict[Any, Any] = {"Trace": Path, "Sequence[Trace]": list[Path]}
#: A parameter in a numpydoc docstring: names, type, indented text.
_PARAMETER = re.compile(r"^([\w*, ]+) : (.+)\n((?:    .*(?:\n|\Z))+)", re.MULTILINE)


class Option(NamedTuple):
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
    is_trace : bool
        The function takes the trace, or traces, that the value names.
    """

    name: str
    kind: type
    help: str
    metavar: str
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()
    is_list: bool = False
    is_positional: bool = False
    is_trace: bool = False


class Command(NamedTuple):
    """A function that the command line can call; agents call some of them as tools.

    Parameters
    ----------
    name, help : str
    options : list of Option
    run : callable
        Takes the values of all options, by name; returns a result to print, or nothing.
    """

    name: str
    help: str
    options: list[Option]
    run: Callable[[Mapping[str, Any]], Any]


def options_of(function: Callable[..., Any]) -> list[Option]:
    """Read the options of a function from its signature and its docstring.

    Parameters
    ----------
    function : callable
        Annotated with types of what a person can type (bool, int, float, str, Path, choices, or lists of them), with
        ``"Trace"`` or ``"Sequence[Trace]"``, or with a dataclass of such fields, whose options it takes. A parameter
        with another quoted annotation takes something else and is left out. A type in capital letters in the docstring
        (``REGEX``) is the placeholder in help.
    """
    described = {}  # {name: (type, text)}
    for names, kind, text in _PARAMETER.findall(inspect.getdoc(function) or ""):
        for name in names.replace("*", "").split(", "):
            described[name] = (kind, " ".join(text.split()))
    options = []
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            options += options_of(annotation)
        elif not isinstance(annotation, str) or annotation in _TRACE_TYPES:
            options.append(_option_of(parameter, *described.get(name, ("", ""))))
    return options


def _option_of(parameter: inspect.Parameter, type_text: str, help_text: str) -> Option:
    """Make the option of a parameter from its annotation, and from its type and text in the docstring."""
    kind = parameter.annotation
    default = parameter.default
    choices = ()
    is_list = parameter.kind is parameter.VAR_POSITIONAL
    if is_list:
        default = ()
    is_trace = kind in _TRACE_TYPES
    if is_trace:
        kind = _TRACE_TYPES[kind]
        help_text = help_text or _TRACE_HELP
    if get_origin(kind) in (Union, types.UnionType):  # `int | None`
        kind = get_args(kind)[0]
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
        is_list = True
    if get_origin(kind) is Literal:
        kind, choices = str, get_args(kind)
    # The docstring may name the placeholder, as in "match : REGEX, optional"; "int, optional" does not.
    placeholder = type_text.partition(",")[0]
    if not placeholder.isupper():
        placeholder = "TRACE" if is_trace else _METAVARS.get(kind, "")
    is_positional = parameter.kind is not parameter.KEYWORD_ONLY
    return Option(parameter.name, kind, help_text, placeholder, default, choices, is_list, is_positional, is_trace)


def call(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function with the values of its options.

    Parameters
    ----------
    function : callable
    values : mapping
        By the name of the option or parameter.
    """
    # What is bound is passed by position or by name, as the function's parameters have it. The fields of a dataclass
    # (Selection, Model) are options on the command line, so it is made from the same values.
    bound = inspect.signature(function).bind_partial()
    for name, parameter in bound.signature.parameters.items():
        annotation = parameter.annotation
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            bound.arguments[name] = call(annotation, values)
        else:
            bound.arguments[name] = values[name]
    return function(*bound.args, **bound.kwargs)


# ---------------------------------------------------------------- commands of functions


#: Traces, and selections from them, that stay open: two traces to compare, and a selection from each.
_TRACES_KEPT_OPEN = 4


def command_of(function: Callable[..., Any]) -> Command:
    """Make the command of a function.

    Parameters
    ----------
    function : callable
        If it takes traces, the command also takes the filters.
    """
    accepted = options_of(function)
    run = functools.partial(call, function)
    if any(option.is_trace for option in accepted):
        accepted += options_of(Selection)
        run = functools.partial(_ask_about_traces, function)
    summary, _, _ = (function.__doc__ or "").partition("\n")
    return Command(function.__name__.replace("_", " "), summary, accepted, run)


def _ask_about_traces(question: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Open the traces that a question's options name, select what the filters leave, and call the question."""
    selection = call(Selection, values)
    arguments = dict(values)
    for option in options_of(question):
        if option.is_trace and option.is_list:
            arguments[option.name] = [opened(path, selection) for path in values[option.name]]
        elif option.is_trace:
            arguments[option.name] = opened(values[option.name], selection)
    progress("analysing")
    result = call(question, arguments)
    result.about.title = " · ".join([result.about.title, *selection.words])
    return result


def opened(path: Path, selection: Selection) -> Trace:
    """Read a trace, and select a part of it. The last ones stay open while their files do not change.

    Parameters
    ----------
    path : Path
    selection : Selection
        The whole trace where it has no filter.
    """
    progress(f"reading {path.name}")
    with reading(path):
        files = [path] if path.exists() else []  # the trace's reader refuses an absent one
        if path.is_dir():
            files += sorted(path.iterdir())
        stamps = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return open_once(path, stamps, selection)


@functools.lru_cache(_TRACES_KEPT_OPEN)
def open_once(path: Path, stamps: object, selection: Selection) -> Trace:
    """Open a trace and select a part of it; the last few results are kept.

    Parameters
    ----------
    path : Path
    stamps : object
        Only part of the key, so that a file that has changed is read again.
    selection : Selection
    """
    from nsightkit.trace import load

    if selection == Selection():
        return load(path)
    return selection.of(open_once(path, stamps, Selection()))  # the whole trace stays open for other selections
