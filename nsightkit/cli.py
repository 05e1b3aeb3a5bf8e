"""The command line: parse, call, print. Nothing is computed here.

Every command is a function of :mod:`nsightkit.questions` or :mod:`nsightkit.commands`; its parser is made from the
function's signature and docstring.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import inspect
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from nsightkit import commands, questions
from nsightkit.commands import GROUPS
from nsightkit.errors import UsageError, in_words
from nsightkit.options import REQUIRED, Option, options_of, summary_of
from nsightkit.output import Format, discard_stdout, note, progress, write
from nsightkit.safe import plain
from nsightkit.version import __version__

__all__ = ["COMMANDS", "PANELS", "help_of", "main", "run"]

Function = Callable[..., Any]

PANELS: dict[str, list[Function]] = {
    "Ask about a trace": list(questions.QUESTIONS.values()),
    "Ask about other files": [*questions.FILES.values(), commands.diff, commands.check, commands.ranks, commands.mcp],
    "Write": [commands.convert, commands.report, commands.demo],
    "Capture": [commands.doctor, commands.capture_nsys, commands.capture_ncu, commands.capture_torch],
    "Estimate and measure": [commands.peaks, commands.envelope, commands.bench],
}
#: Every command by the words that call it.
COMMANDS = {function.__name__.replace("_", " "): function for functions in PANELS.values() for function in functions}
_ABOUT = (
    "Turn a GPU profile into an answer. TRACE is an Nsight Systems .sqlite or parquetdir export, a .nsys-rep, a "
    "PyTorch profiler .json or .json.gz, or a folder that `nsightkit convert` wrote."
)
_SHORT = {"output": "-o", "format": "-f"}
_TRACE = Option("trace", Path, "The trace; put -- before a name with a leading dash.", "TRACE", is_positional=True)


# ---------------------------------------------------------------- parsers


class _Help(argparse.HelpFormatter):
    """Help with wider names of options, in which no option's name is broken at a hyphen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help)")


def _groups_of(function: Function) -> dict[str, Any]:
    """The sets of options that a function takes, by parameter."""
    if function in questions.QUESTIONS.values():
        return {"selection": GROUPS["selection"], "reading": GROUPS["reading"]}
    parameters = inspect.signature(function).parameters
    return {name: GROUPS[name] for name in parameters if name in GROUPS}


def _parser_of(name: str, function: Function) -> _Parser:
    """Make a command's parser."""
    parser = _Parser(
        prog=f"nsightkit {name}",
        description=summary_of(function).replace("%", "%%"),
        formatter_class=_Help,
        allow_abbrev=False,
    )
    if name.startswith("capture"):
        tool = name.removeprefix("capture ")
        others = "" if tool == "torch" else f" [{tool.upper()} OPTIONS]"
        parser.usage = f"nsightkit {name} [options]{others} -- COMMAND..."
    if function in questions.QUESTIONS.values():
        _add(parser, _TRACE)
    for option in options_of(function):
        _add(parser, option)
    for group, options in _groups_of(function).items():
        section = parser.add_argument_group("filters") if group == "selection" else parser
        for option in options_of(options):
            _add(section, option)
    if function is not commands.mcp:
        forms = "Text for people (the default), CSV of a table, or JSON."
        parser.add_argument("-f", "--format", choices=get_args(Format), default="text", help=forms)
    return parser


def _add(parser: argparse._ActionsContainer, option: Option) -> None:
    """Add one option or argument to a parser."""
    text = option.help.replace("%", "%%")
    if option.default not in (None, False, REQUIRED, []) and "Default" not in text:
        text = f"{text.removesuffix('.')} (default: {option.default})."
    kind = _natural if option.kind is int else option.kind
    given: dict[str, Any] = {"help": text}
    if option.choices:
        given["choices"] = option.choices
    else:
        given["metavar"] = option.metavar
    if option.is_positional:
        if option.is_list:
            given["nargs"] = "+" if option.is_required else "*"
        elif not option.is_required:
            given |= {"nargs": "?", "default": option.default}
        parser.add_argument(option.name, type=kind, **given)
        return
    flags = [f"--{option.name.replace('_', '-')}"]
    if option.name in _SHORT:
        flags.insert(0, _SHORT[option.name])
    if option.kind is bool:
        parser.add_argument(*flags, action="store_true", help=text)
    else:
        action = "append" if option.is_list else "store"
        default = None if option.is_required else option.default
        parser.add_argument(*flags, type=kind, action=action, default=default, required=option.is_required, **given)


def _natural(text: str) -> int:
    """Read a whole number from 0 on."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number


def help_of(name: str) -> str:
    """Give a command's help.

    Parameters
    ----------
    name : str
        A key of :data:`COMMANDS`.
    """
    return _parser_of(name, COMMANDS[name]).format_help()


def _overview(functions: Sequence[tuple[str, Sequence[Function]]]) -> str:
    """List commands with a line of help each."""
    lines = [*textwrap.wrap(_ABOUT, 100, break_on_hyphens=False), "", "usage: nsightkit COMMAND [options]"]
    for panel, members in functions:
        lines += ["", f"{panel}:"]
        for function in members:
            name = function.__name__.replace("_", " ")
            text = textwrap.wrap(summary_of(function), 82, break_on_hyphens=False)
            lines.append(f"  {name:<15} {text[0]}")
            lines += [f"{'':<18}{more}" for more in text[1:]]
    lines += ["", "`nsightkit COMMAND --help` shows the options of a command; `nsightkit --version` the version."]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- one command


def _split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split a command line into the command's name and the rest."""
    name, rest = words[0], list(words[1:])
    if name == "capture" and rest and not rest[0].startswith("-"):
        name, rest = f"capture {rest[0]}", rest[1:]
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}; nsightkit --help lists them")
    return name, rest


def _parsed(name: str, words: list[str]) -> dict[str, Any]:
    """Read a command's options and arguments."""
    parser = _parser_of(name, COMMANDS[name])
    if name.startswith("capture"):
        from nsightkit.capture.profiling import separate

        own, rest = separate(words)
        if name == "capture torch":
            border = words.index("--") if "--" in words else len(words)
            own, rest = words[:border], words[border:]
        values = vars(parser.parse_args(own))
        values["words"] = rest
        return values
    if "--" in words:
        return vars(parser.parse_args(words))
    return vars(parser.parse_intermixed_args(words))


def _answer(function: Function, values: dict[str, Any]) -> Any:
    """Call a command's function with what was given."""
    groups = {}
    for name, options in _groups_of(function).items():
        fields = [field.name for field in dataclasses.fields(options)]
        groups[name] = options(**{field: values.pop(field) for field in fields})
    if function in questions.FILES.values():
        with progress("reading"):
            return function(**values)
    if function not in questions.QUESTIONS.values():
        return function(**groups, **values)
    path, changes = values.pop("trace"), values.pop("changes", [])
    trace = commands.opened(path, **groups)
    with progress(f"reading {path.name}"):
        result = function(trace, *changes, **values)
    result.about.title = " · ".join([result.about.title, *groups["selection"].words])
    result.about.remarks = [f"{path}: {remark}" for remark in result.about.remarks]
    return result


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        write(_overview(list(PANELS.items())))
        return 0
    if words[0] == "--version":
        write(f"nsightkit {__version__}\n")
        return 0
    if words[0] == "capture" and (len(words) == 1 or words[1] in ("-h", "--help")):
        write(_overview([("Capture", PANELS["Capture"][1:])]))
        return 0
    name, rest = _split(words)
    values = _parsed(name, rest)
    form = values.pop("format", "text")
    result = _answer(COMMANDS[name], values)
    if result is None:
        return 0
    write(result, form)
    if isinstance(result, str):
        return 0
    for remark in result.about.remarks:
        note(remark)
    return int(result.about.exit_code)


# ---------------------------------------------------------------- entry


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name; default: the process's own.

    Returns
    -------
    int
        0 when all is well, 1 when a check failed, 2 on bad input or usage, 3 on a bug in nsightkit, 130
        when interrupted. What went wrong is one line on stderr; ``NSIGHTKIT_DEBUG=1`` adds the traceback.
    """
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except SystemExit as end:  # after --help
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        text, code = in_words(error)
        if os.environ.get("NSIGHTKIT_DEBUG", "") not in ("", "0"):
            for line in "".join(traceback.format_exception(error)).splitlines():
                print(plain(line), file=sys.stderr)
        note(text)
        return code


def main() -> NoReturn:
    """Run the command line and exit."""
    # Importing pandas makes a hundred thousand objects that stay; looking through them again and again took a tenth
    # of the time of a short command.
    gc.set_threshold(200_000, 20, 20)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process: drop the output
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
    code = run()
    try:
        sys.stdout.flush()
    except OSError:  # which has been said, or is of a reader that left
        discard_stdout()
    sys.exit(code)
