"""Nothing that is written or shown of a trace identifies a person or opens a door.

A Trace holds only the tables and columns of :data:`nsightkit.trace.model.TABLES`: environments, command lines, process
lists and program output never enter it. What remains is text, which one cleaner goes through: paths keep the file's
name or the part from ``site-packages`` on; users, hosts, e-mail and network addresses, credentials in URLs,
``name=value`` secrets and the commonest tokens give way to ``[user]``, ``[host]`` and so on. Readers note in
``meta.private`` what only the file can know: the name of its host, its user, and secrets of its environment.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import getpass
import json
import os
import pickle
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pandas as pd

from nsightkit.trace.model import TABLES, TIME_COLUMNS, Trace, categorical

__all__ = ["TextCleaner", "clean", "clean_snapshot", "left_out", "private_names", "this_machine", "write_snapshot"]

#: Environment variables whose values name a user or a host.
_NAMING_VARIABLES = {
    "EXPORT_USER": "user",
    "USER": "user",
    "LOGNAME": "user",
    "USERNAME": "user",
    "SUDO_USER": "user",
    "HOSTNAME": "host",
    "COMPUTERNAME": "host",
    "SLURMD_NODENAME": "host",
    "SLURM_SUBMIT_HOST": "host",
    "SLURM_JOB_USER": "user",
}
_STRONG = (
    r"(?:pass(?:word|wd|phrase)|passwd|secret|api[_-]?key|(?:access|private|account|secret|signing)[_-]?key|credentials?"
    r"|(?:auth|access|refresh|api)[_-]?token|authorization)(?:[_-]?(?:id|value))?"
)
#: Names that mean a secret, or a word of the trade: the value tells.
_WEAK = r"(?:token|auth|cookie|signature|sig)"
_SECRET_VARIABLE = re.compile(rf"[\w.-]*(?:{_STRONG}|token)", re.IGNORECASE)
#: Words that users and hosts are called and that names of ranges and functions also hold.
_ORDINARY = frozenset(
    [
        *("root", "user", "users", "admin", "administrator", "ubuntu", "debian", "guest", "runner", "jovyan", "docker"),
        *("default", "local", "localhost", "localdomain", "train", "training", "test", "tests", "model", "models"),
        *("data", "home", "work", "workspace", "node", "head", "master", "worker", "server", "host", "login"),
        *("compute", "cluster", "batch", "volta", "ampere", "hopper", "tesla", "grace", "python", "cuda", "torch"),
    ]
)
#: Shorter names would be found inside of words, and shorter secrets are words.
_SHORTEST = {"user": 4, "host": 4, "secret": 6}

_FOLDERS_OF_PEOPLE = (
    "home|Users|root|tmp|scratch|data|mnt|media|work|workspace|workspaces|project|projects|global|gpfs|lustre"
    "|nfs|storage|var|srv|content|kaggle|opt|dev/shm|p|u|ssd|nvme|private"
)
_PATH = re.compile(
    r"(?<![\w.:/\\<>~\]-])(?:file://)?(?:~[\w.-]*|[A-Za-z]:|\\)?"
    r"(?:[/\\]{1,2}[^\s/\\\"'`<>|:*?,;()\[\]{}=&]+)+[/\\]?"
)
_FILE = re.compile(
    r"[\w.+-]*\.(?:py|pyc|pyx|so|cu|cuh|cpp|cc|c|h|hpp|ptx|cubin|json|gz|pt|pth|bin|sh|ipynb|txt|log|csv|ya?ml)[\d.]*"
)
_PERSONAL = re.compile(rf"(?:file://)?(?:~|[A-Za-z]:[/\\]|\\\\|[/\\]+(?:{_FOLDERS_OF_PEOPLE})(?:[/\\]|$))")
#: From where on a path is a library's, or a compiler's; `where` and `memory` know these by the same words.
_INSIDE = re.compile(
    r"((?:site|dist)-packages|lib[/\\]+python\d[\d.]*|torchinductor_)[^/\\]*([/\\]+(?!(?:site|dist)-packages).+)",
    re.DOTALL,
)

_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_VALUE = r"(?:\"[^\"\[][^\"]*\"|'[^'\[][^']*'|[^\s\"',;&|)}\[\]][^\s\"',;&|)}\]]*)"
#: Prefixes and lengths as the providers document them: AWS, GitHub, GitLab, Hugging Face, OpenAI and Anthropic, Google,
#: Slack, npm and PyPI, NVIDIA, JSON web tokens.
_TOKENS = (
    r"A(?:KIA|SIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{28,}"
    r"|sk-[A-Za-z0-9][\w-]{18,}|AIza[\w-]{30,}|xox[abeoprs]-[\w-]{10,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{16,}"
    r"|nvapi-[\w-]{20,}|wandb_v\d_\w{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
)
#: What is replaced, by what: the first group stays, the rest goes.
_FORMS = (
    (r"()(?s:-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY.*?(?:-----END [A-Z0-9 ]{0,40}-----|\Z))", "secret"),
    (r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s/@\"'<>]+@", "secret"),
    (rf"()(?<![A-Za-z0-9])(?:{_TOKENS})(?![A-Za-z0-9])", "secret"),
    (r"(?i)(\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/-]{16,}=*", "secret"),
    (rf"(?i)((?<![\w-])--?[\w-]{{0,40}}{_STRONG}[ =]\s{{0,9}})(?!\d+\b){_VALUE}", "secret"),
    (rf"(?i)(\b[\w.-]{{0,60}}{_STRONG}[\"']?\s{{0,9}}(?:=|:(?!:))\s{{0,9}})(?!\d+\b){_VALUE}", "secret"),
    (
        (
            rf"(?i)((?:\b|--)[\w.-]{{0,60}}{_WEAK}[\"']?\s{{0,9}}[=: ]\s{{0,9}}[\"']?)"
            r"(?=[\w%+/=.~-]*\d)[\w%+/=.~-]{12,}"
        ),
        "secret",
    ),
    (r"()(?<![\w.+-])[A-Za-z0-9][\w.+-]{0,60}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,24}\b", "email"),
    (r"()(?<![\w.@-])[A-Za-z_][\w.-]{0,60}@[A-Za-z0-9][\w.-]{0,60}(?=:(?:[~/]|\d{1,5}\b)|:?\s?[~#$](?:\s|$))", "user"),
    (r"(\bssh\s+)[A-Za-z_][\w.-]{0,60}@[\w.-]{1,60}", "user"),
    (
        (
            r"()(?<![\w.-])(?<!==)(?<!ersion )(?<!cuDNN )(?<!CUDA )(?<!river )(?!127\.0\.0\.1|0\.0\.0\.0)"
            rf"(?:{_OCTET}\.){{3}}{_OCTET}(?![\w-]|\.\d)"
        ),
        "address",
    ),
    (r"()(?<![\w:])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![\w:])", "address"),
    (
        (
            r"(?i)()(?<![\w:])(?:(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}"
            r"|(?:fe80|f[cd][0-9a-f]{2}|2[0-9a-f]{3})(?=[0-9a-f:]*::|(?::[0-9a-f]+){4})[0-9a-f:]+)(?![\w:])"
        ),
        "address",
    ),
    (r"()(?<![\w.-])ip-\d{1,3}(?:-\d{1,3}){3}(?:\.[a-z0-9-]+)*", "host"),
    (r"()(?<![\w.@/-])[a-z][\w-]{0,60}\.(?:[\w-]{1,60}\.){0,8}(?:internal|corp|lan|local)\b", "host"),
)
_PATTERNS = [(re.compile(form), kind) for form, kind in _FORMS]
#: Entries of an environment, which are joined by zero bytes.
_ENTRY = re.compile(r"(?:^|\0)[A-Za-z_]\w*=")
#: No text without one of these holds anything of these forms.
_HINTS = re.compile(
    r"[@/\\=:]|--|\d\.\d|ip-|eyJ|AIza|A[KS]IA[A-Z0-9]|[a-z\d]_[A-Za-z0-9]{20}|-[\w-]{10}|[Bb]earer"
    r"|\.(?:internal|corp|lan|local)"
)


class TextCleaner:
    """Replaces in texts what identifies a person or opens a door.

    Parameters
    ----------
    private : mapping of str to str
        What no pattern knows: a text, and whether it is a ``user``, a ``host`` or a ``secret``.

    Attributes
    ----------
    changed : int
        Distinct texts that were changed.
    """

    def __init__(self, private: Mapping[str, str]) -> None:
        self._kinds = {text.lower(): kind for text, kind in private.items()}
        longest_first = sorted(self._kinds, key=len, reverse=True)
        names = "|".join(re.escape(text) for text in longest_first)
        self._names = re.compile(f"(?<![a-z0-9])(?:{names})(?![a-z0-9])", re.IGNORECASE) if names else None
        self._known: dict[str, str] = {}
        self.changed = 0

    def text(self, given: str) -> str:
        """Give a text without what identifies people; each distinct text is looked at once.

        Parameters
        ----------
        given : str
        """
        if given not in self._known:
            cleaned = self._cleaned(given)
            self.changed += cleaned != given
            self._known[given] = cleaned
        return self._known[given]

    def value(self, given: Any, key: str = "") -> Any:
        """Clean every text of a JSON value; what stands under the name of a secret goes whole.

        Parameters
        ----------
        given : JSON value
        key : str
            The key it stands under.
        """
        if isinstance(given, Mapping):
            return {self.text(str(name)): self.value(item, str(name)) for name, item in given.items()}
        if isinstance(given, list | tuple):
            return [self.value(item, key) for item in given]
        if not isinstance(given, str):
            return given
        if _SECRET_VARIABLE.fullmatch(key):
            return "[secret]"
        return self.text(given)

    def _cleaned(self, text: str) -> str:
        if "\0" in text and _ENTRY.search(text):
            return "[environment]"
        if _HINTS.search(text):
            for pattern, kind in _PATTERNS:
                text = pattern.sub(rf"\1[{kind}]", text)
            text = _PATH.sub(_shortened, text)
        if self._names is not None:
            text = self._names.sub(lambda match: f"[{self._kinds.get(match[0].lower(), 'user')}]", text)
        return text


def _shortened(match: re.Match[str]) -> str:
    """Shorten a path that leads to people, to a file or into a library; names of layers look like paths and stay."""
    path = match[0]
    inside = _INSIDE.search(path)
    if inside:
        return inside[1] + inside[2]
    name = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    if _FILE.fullmatch(name):
        return name
    return "[path]" if _PERSONAL.match(path) else path


def private_names(pairs: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Pick from environment variables and properties what identifies a person or opens a door.

    Parameters
    ----------
    pairs : iterable of (str, object)
        Names and values. Of a home folder or a working folder, its owner is taken.

    Returns
    -------
    dict of str to str
        As :class:`TextCleaner` takes it. Short and ordinary words are left out: they also stand in other names.
    """
    private: dict[str, str] = {}
    for name, value in pairs:
        text = str(value).strip().strip("\"'")
        kind = _NAMING_VARIABLES.get(name.upper())
        if _SECRET_VARIABLE.fullmatch(name):
            kind = "secret"
        if kind is not None:
            _note(private, text, kind)
        for owner in re.findall(r"(?:/home|/Users|\\Users|:/Users)[/\\]+([\w.-]+)", text):
            _note(private, owner, "user")
    return private


def _note(private: dict[str, str], text: str, kind: str) -> None:
    forms = [text, text.partition(".")[0]] if kind == "host" else [text]
    for form in forms:
        ordinary = form.lower() in _ORDINARY or form.isdigit() or any(sign in form for sign in "/\\ ")
        if len(form) >= _SHORTEST[kind] and not ordinary:
            private[form] = kind


def this_machine() -> dict[str, str]:
    """Name this machine's host and user, and the secrets of this process's environment."""
    pairs: list[tuple[str, str]] = [*os.environ.items(), ("HOSTNAME", socket.gethostname())]
    with contextlib.suppress(KeyError, OSError):  # some containers have no such user
        pairs.append(("USER", getpass.getuser()))
    return private_names(pairs)


# ---------------------------------------------------------------- traces


def clean(trace: Trace) -> Trace:
    """Give a trace whose texts identify nobody.

    Times, sizes, rows and their order are the same, and names that differed still differ.

    Parameters
    ----------
    trace : Trace
        With the selection it carries.

    Returns
    -------
    Trace
        Itself if it is clean already.
    """
    whole = trace.whole
    if isinstance(whole._source, _CleanSource):
        return trace
    if "clean" not in whole.memo:
        whole.memo["clean"] = Trace(_CleanSource(whole), whole.path)
    cleaned: Trace = whole.memo["clean"]
    return cleaned if trace is whole else cleaned.masked(trace._masks)


def clean_text(trace: Trace, text: str) -> str:
    """Clean a text about a trace, such as its file's name, of what the trace is cleaned of.

    Parameters
    ----------
    trace : Trace
    text : str
    """
    source = clean(trace).whole._source
    assert isinstance(source, _CleanSource)
    return source.cleaner.text(text)


def left_out(traces: Iterable[Trace]) -> list[str]:
    """Name what clean copies of traces do not hold, one sentence each.

    Parameters
    ----------
    traces : iterable of Trace
        Whose tables have been read through :func:`clean`.
    """
    sentences = ["left out: environment, command lines, process lists, program output, call chains of samples"]
    changed = 0
    for trace in traces:
        source = clean(trace).whole._source
        assert isinstance(source, _CleanSource)
        changed += source.cleaner.changed
    if changed:
        texts = "1 text" if changed == 1 else f"{changed:,} texts"
        sentences.append(f"{texts} had paths shortened, or users, hosts, addresses or secrets replaced")
    sentences.append("not recognised: secrets of an unusual form, confidential names of ranges, kernels and files")
    return sentences


class _CleanSource:
    """Reads another trace and cleans the texts it reads."""

    def __init__(self, whole: Trace) -> None:
        self._whole = whole
        self.cleaner = TextCleaner({**this_machine(), **whole.meta.private})
        text = self.cleaner.text
        self.meta = dataclasses.replace(
            whole.meta,
            private={},
            gpus=[dataclasses.replace(gpu, name=gpu.name and text(gpu.name)) for gpu in whole.meta.gpus],
            notes=[text(note) for note in whole.meta.notes],
            thread_names={thread: text(name) for thread, name in whole.meta.thread_names.items()},
            distributed=self.cleaner.value(whole.meta.distributed),
        )

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`~nsightkit.trace.model.Source`."""
        cleaned = {}
        for column, values in self._whole.table(table, columns).items():
            name = str(column)
            if TABLES[table][name] == "category":
                cleaned[name] = _clean_names(values, self.cleaner, described=name in ("collective", "inputs"))
            elif name in TIME_COLUMNS:
                cleaned[name] = values + self._whole.t0_ns  # the new trace moves them to its own clock again
            else:
                cleaned[name] = values
        return pd.DataFrame(cleaned, copy=False)

    def first_ns(self) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        return self._whole.t0_ns


def _clean_names(names: pd.Series[Any], cleaner: TextCleaner, *, described: bool) -> pd.Series[Any]:
    """Clean a categorical column; names that differed get a number where they no longer would.

    ``described``: its texts are JSON, which takes no number, and equal descriptions may become one.
    """
    given = [str(name) for name in names.cat.categories]
    cleaned = [_clean_json(name, cleaner) if described else cleaner.text(name) for name in given]
    if cleaned == given:
        return names
    if not described:
        cleaned = _kept_apart(given, cleaned)
    return pd.Series(categorical(np.asarray(names.cat.codes), cleaned), index=names.index, name=names.name)


def _clean_json(text: str, cleaner: TextCleaner) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return cleaner.text(text)
    cleaned = cleaner.value(value)
    return text if cleaned == value else json.dumps(cleaned, separators=(",", ":"))


def _kept_apart(given: Sequence[str], cleaned: Sequence[str]) -> list[str]:
    """Number the names that cleaning has made equal."""
    taken = {new for old, new in zip(given, cleaned, strict=True) if old == new}
    counts: collections.Counter[str] = collections.Counter()
    apart = []
    for old, new in zip(given, cleaned, strict=True):
        name = new
        while old != new and name in taken:
            counts[new] += 1
            name = f"{new} ({counts[new] + 1})"
        taken.add(name)
        apart.append(name)
    return apart


# ---------------------------------------------------------------- memory snapshots

_SEGMENT_FIELDS = (
    *("device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream"),
    *("segment_type", "segment_pool_id", "is_expandable"),
)
_BLOCK_FIELDS = ("address", "size", "requested_size", "state")
_EVENT_FIELDS = ("action", "addr", "size", "stream", "time_us", "device_free", "pool_id")
_EVENT_TEXTS = ("user_metadata", "category", "compile_context")
_ANNOTATION_FIELDS = ("device", "time_us", "name", "stage")


def clean_snapshot(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Copy what PyTorch's own pages read of a memory snapshot, with shortened paths and clean texts.

    Parameters
    ----------
    taken : mapping
        What ``torch.cuda.memory._snapshot()`` returned.

    Returns
    -------
    dict
        Of the same shape. Equal stacks are one object, which makes the file small.
    """
    cleaner = TextCleaner(this_machine())
    frames = _Frames(cleaner)
    segments = []
    for segment in taken["segments"]:
        blocks = []
        for block in segment.get("blocks", ()):
            kept = {name: block[name] for name in _BLOCK_FIELDS if name in block}
            blocks.append({**kept, "frames": frames.cleaned(block.get("frames"))})
        kept = {name: segment[name] for name in _SEGMENT_FIELDS if name in segment}
        segments.append({**kept, "frames": frames.cleaned(segment.get("frames")), "blocks": blocks})
    traces = []
    for events in taken.get("device_traces", ()):
        cleaned = []
        for event in events:
            kept = {name: event[name] for name in _EVENT_FIELDS if name in event}
            texts = {name: cleaner.value(event[name]) for name in _EVENT_TEXTS if name in event}
            cleaned.append({**kept, **texts, "frames": frames.cleaned(event.get("frames"))})
        traces.append(cleaned)
    annotations = []
    for annotation in taken.get("external_annotations", ()):
        annotations.append({name: cleaner.value(annotation[name]) for name in _ANNOTATION_FIELDS if name in annotation})
    return {
        "segments": segments,
        "device_traces": traces,
        "external_annotations": annotations,
        "allocator_settings": cleaner.value(taken.get("allocator_settings", {})),
    }


class _Frames:
    """Clean stacks; equal ones are one object."""

    def __init__(self, cleaner: TextCleaner) -> None:
        self._cleaner = cleaner
        self._stacks: dict[tuple[tuple[str, int, str], ...], list[dict[str, Any]]] = {}

    def cleaned(self, frames: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        content = []
        for frame in frames or ():
            filename = self._cleaner.text(str(frame.get("filename", "")))
            content.append((filename, int(frame.get("line", 0)), self._cleaner.text(str(frame.get("name", "")))))
        stack = tuple(content)
        if stack not in self._stacks:
            self._stacks[stack] = [{"filename": filename, "line": line, "name": name} for filename, line, name in stack]
        return self._stacks[stack]


def write_snapshot(taken: Mapping[str, Any], file: BinaryIO) -> None:
    """Write a memory snapshot as PyTorch does.

    Parameters
    ----------
    taken : mapping
    file : binary file
    """
    pickle.dump(taken, file, protocol=4)  # any Python since 3.4 reads it
