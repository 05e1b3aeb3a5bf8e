"""The command line: parse, call, print one answer on stdout. Nothing is computed here.

Every command is a function of :mod:`nsightkit.questions` or :mod:`nsightkit.commands`; its parser is made from the
function's signature and docstring.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from nsightkit import commands, questions
from nsightkit.errors import UsageError, in_words, note, plain, progress
from nsightkit.options import REQUIRED, Command, Option, command_of, options_of
from nsightkit.version import __version__

if TYPE_CHECKING:
    from nsightkit.table import Record, Table

#: How an answer can be written.
Format = Literal["text", "csv", "json"]

#: Functions of commands, by the heading that lists them in the overview.
_PANELS = {
    "Ask about a trace": list(questions.QUESTIONS.values()),
    "Ask about other files": [*questions.FILES.values(), questions.diff, commands.check, commands.ranks, commands.mcp],
    "Write": [commands.convert, commands.report, commands.demo],
    "Capture": [commands.doctor, commands.capture_nsys, commands.capture_ncu, commands.capture_torch],
    "Estimate and measure": [commands.peaks, commands.envelope, commands.bench],
}
_COMMANDS_OF_PANEL = {panel: list(map(command_of, functions)) for panel, functions in _PANELS.items()}
#: Every command by the words that call it.
COMMANDS = {command.name: command for commands_shown in _COMMANDS_OF_PANEL.values() for command in commands_shown}
#: The first lines of the overview.
_ABOUT = (
    "Turn a GPU profile into an answer. TRACE is an Nsight Systems .sqlite or parquetdir export, a .nsys-rep, a "
    "PyTorch profiler .json or .json.gz, or a folder that `nsightkit convert` wrote."
)
#: Options that select a part of a trace; help lists them in a separate group.
_FILTERS = options_of(questions.Selection)
#: argparse's ``nargs`` of a positional argument, by whether it is (a list, required).
_NARGS = {(True, True): "+", (True, False): "*", (False, True): None, (False, False): "?"}


# ---------------------------------------------------------------- parsers


class _Help(argparse.HelpFormatter):
    """Formatter of help: a wide column for names of options, and lines are not broken at hyphens (``--last-steps``)."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """A parser that raises UsageError where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split())
        required = re.sub(r" \[-[^]]*\]", "", usage)  # without the options that may be left out
        raise UsageError(f"{message} ({required}; {self.prog} --help)")


def _parser_of(command: Command) -> _Parser:
    """Make a command's parser, with the options that all commands but ``mcp`` share."""
    name = command.name
    parser = _Parser(
        prog=f"nsightkit {name}",
        description=command.help.replace("%", "%%"),  # argparse formats it with %
        formatter_class=_Help,
        allow_abbrev=False,
    )
    if name.startswith("capture"):
        tool = name.removeprefix("capture ")
        # nsys and ncu get the options that are not ours; PyTorch's profiler has no command line.
        tool_options = "" if tool == "torch" else f" [{tool.upper()} OPTIONS]"
        parser.usage = f"nsightkit {name} [options]{tool_options} -- COMMAND..."
    filters = parser.add_argument_group("filters")
    for option in command.options:
        _add_option(filters if option in _FILTERS else parser, option)
    if name != "mcp":  # which prints no answer
        about_format = "Text for people (the default), CSV of a table, or JSON."
        parser.add_argument("-f", "--format", choices=get_args(Format), default="text", help=about_format)
        about_cache = "Neither write nor read the cache of large traces."
        parser.add_argument("--no-cache", action="store_true", help=about_cache)
    return parser


def _add_option(parser: argparse._ActionsContainer, option: Option) -> None:
    """Add an option, or a positional argument, to a parser or to a group of one; a list that is not given is empty."""
    help_text = option.help.replace("%", "%%")  # argparse formats help with %
    is_required = option.default is REQUIRED
    # Nor is a default of 0 written, which equals False.
    if option.default not in (None, False, REQUIRED, ()) and "Default" not in help_text:
        help_text = f"{help_text.removesuffix('.')} (default: {option.default})."
    settings: dict[str, Any] = {"help": help_text, "default": option.default}
    if option.is_list:
        settings["default"] = []
    if option.kind is bool:
        settings["action"] = "store_true"
    elif option.choices:
        settings["choices"] = option.choices
    else:
        settings["type"] = integer if option.kind is int else option.kind
        settings["metavar"] = option.metavar
    if option.is_positional:
        parser.add_argument(option.name, nargs=_NARGS[option.is_list, is_required], **settings)
        return
    if option.is_list:
        settings["action"] = "append"
    flag = f"--{option.name.replace('_', '-')}"
    flags = ("-o", flag) if option.name == "output" else (flag,)
    parser.add_argument(*flags, required=is_required, **settings)


def integer(text: str) -> int:
    """Read an integer that is not negative; argparse's error for other text has this function's name in it."""
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
    return _parser_of(COMMANDS[name]).format_help()


def _commands_overview(panels: Mapping[str, Sequence[Command]]) -> str:
    """List commands below the heading of their panel, each with its help in a sentence."""
    lines = [*textwrap.wrap(_ABOUT, 100, break_on_hyphens=False), "", "usage: nsightkit COMMAND [options]"]
    for panel, commands_shown in panels.items():
        lines += ["", f"{panel}:"]
        for command in commands_shown:
            help_lines = textwrap.wrap(command.help, 82, break_on_hyphens=False)
            lines.append(f"  {command.name:<15} {help_lines[0]}")
            lines += [f"{'':<18}{line}" for line in help_lines[1:]]
    lines += ["", "`nsightkit COMMAND --help` shows the options of a command; `nsightkit --version` the version."]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- stdout


def write(result: Table | Record | str, form: Format = "text") -> None:
    """Write an answer to stdout.

    Parameters
    ----------
    result : Table, Record or str
        Text goes out as it is.
    form : {"text", "csv", "json"}

    Raises
    ------
    UsageError
        CSV is asked for of an answer that is no table, or stdout cannot be written.
    """
    if isinstance(result, str):
        text = result
    elif form == "text":
        text = _text_for_stdout(result)
    elif hasattr(result, form):
        text = getattr(result, form)()
    else:
        raise UsageError("--format csv: CSV is for tables, and this answer is not one; take json or text")
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # traces hold bytes that are not UTF-8
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader left early, such as head
        discard_stdout()
    except OSError as error:
        discard_stdout()
        raise UsageError(f"stdout: cannot be written ({error.strerror or error}); choose another place") from error


def _text_for_stdout(result: Table | Record) -> str:
    """Fit an answer to the terminal; a pipe or a log gets lines as wide as $COLUMNS or, without it, the default."""
    if sys.stdout.isatty():
        return result.text(shutil.get_terminal_size().columns)
    width = os.environ.get("COLUMNS", "")
    if width.isdecimal() and int(width):
        return result.text(int(width))
    return result.text()


def discard_stdout() -> None:
    """Discard what is left for stdout: Python flushes it again at exit, which must not fail a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---------------------------------------------------------------- one command


def _parse_words(command: Command, words: list[str]) -> dict[str, Any]:
    """Parse what follows a command's name; gives the values of its options and arguments by name.

    Those of a capture are ours, then ``tool_args``, options that we do not know, and ``program``, all after the ``--``.
    """
    parser = _parser_of(command)
    if not command.name.startswith("capture"):
        # Only parse_intermixed_args takes arguments between options, and only parse_args takes all that follows "--" as
        # arguments.
        if "--" in words:
            return vars(parser.parse_args(words))
        return vars(parser.parse_intermixed_args(words))
    program_at = len(words)
    if "--" in words:
        program_at = words.index("--")
    parsed, tool_args = parser.parse_known_args(words[:program_at])
    if tool_args and command.name == "capture torch":
        parser.error(f"unrecognized arguments: {' '.join(tool_args)}")
    return {**vars(parsed), "tool_args": tool_args, "program": words[program_at + 1 :]}


def _run_command(words: Sequence[str]) -> int:
    """Run the command that the words of a command line call, print its answer, and return the exit code."""
    if not words or words[0] in ("-h", "--help"):
        write(_commands_overview(_COMMANDS_OF_PANEL))
        return 0
    if words[0] == "--version":
        write(f"nsightkit {__version__}\n")
        return 0
    name = words[0]
    rest = list(words[1:])
    if name == "capture":
        if not rest or rest[0] in ("-h", "--help"):
            captures = _COMMANDS_OF_PANEL["Capture"][1:]  # without `doctor`
            write(_commands_overview({"Capture": captures}))
            return 0
        name = f"capture {rest.pop(0)}"
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}; nsightkit --help lists them")
    values = _parse_words(COMMANDS[name], rest)
    form = values.pop("format", "text")
    if values.pop("no_cache", False):
        os.environ["NSIGHTKIT_NO_CACHE"] = "1"  # for worker processes too
    try:
        result = COMMANDS[name].run(values)
    finally:
        progress("")  # wipes the line of progress
    if result is None:
        return 0
    write(result, form)
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
        0 when all is well, 1 when a check failed, 2 on bad input or usage or where a check or a benchmark has no
        result, 3 on a bug in nsightkit, 130 when interrupted. What went wrong is one line on stderr;
        ``NSIGHTKIT_DEBUG=1`` adds the traceback.
    """
    try:
        return _run_command(sys.argv[1:] if arguments is None else arguments)
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
    except OSError:  # `write` has reported it already, or the reader of a pipe left early
        discard_stdout()
    sys.exit(code)
