"""Remove personal names and secrets from everything that is written or shown of a trace.

A Trace holds only the tables and columns of :data:`nsightkit.trace.model.TABLES`: environments, command lines, process
lists and program output never enter it. One cleaner goes through the text that remains: paths keep the file's name or
the part from ``site-packages`` on; users, hosts, e-mail and network addresses, credentials in URLs, ``name=value``
secrets and the commonest tokens become ``[user]``, ``[host]`` and so on. Readers note in ``meta.private`` what only the
file can know: the name of its host, its user, and secrets of its environment.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import getpass
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.text import Json
from nsightkit.trace.model import (
    SECRET_VARIABLE,
    SENSITIVE_NAMES,
    TABLES,
    TIME_COLUMNS,
    Trace,
    categorical,
    private_names,
)

#: Names that mean a secret or an ordinary technical word, depending on the value.
_AMBIGUOUS_NAMES = r"(?:token|auth|cookie|signature|sig)"

_FOLDERS_OF_PEOPLE = (
    "home|Users|root|tmp|scratch|data|mnt|media|work|workspace|workspaces|project|projects|global|gpfs|lustre"
    "|nfs|storage|var|srv|content|kaggle|opt|dev/shm|p|u|ssd|nvme|private"
)
#: A path: absolute, or of a home folder (``~user``), a drive (``C:``) or a share; not what goes on from a word or URL.
_PATH = re.compile(
    r"(?<![\w.:/\\<>~\]-])(?:file://)?(?:~[\w.-]*|[A-Za-z]:|\\)?"
    r"(?:[/\\]{1,2}[^\s/\\\"'`<>|:*?,;()\[\]{}=&]+)+[/\\]?"
)
#: The name of a file of code or data, which may be kept of a path.
_CODE_OR_DATA_FILE = re.compile(
    r"[\w.+-]*\.(?:py|pyc|pyx|so|cu|cuh|cpp|cc|c|h|hpp|ptx|cubin|json|gz|pt|pth|bin|sh|ipynb|txt|log|csv|ya?ml)[\d.]*"
)
#: A path that begins in a folder where people keep their files.
_PERSONAL_PATH = re.compile(rf"(?:file://)?(?:~|[A-Za-z]:[/\\]|\\\\|[/\\]+(?:{_FOLDERS_OF_PEOPLE})(?:[/\\]|$))")
#: The part of a path that belongs to a library or a compiler; `where` and `memory` rely on the same words.
_LIBRARY_PATH = re.compile(
    r"((?:site|dist)-packages|lib[/\\]+python\d[\d.]*|torchinductor_)[^/\\]*([/\\]+(?!(?:site|dist)-packages).+)",
    re.DOTALL,
)

_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
#: A value after ``name=``: in quotes, or up to a blank or a separator.
_VALUE = r"(?:\"[^\"\[][^\"]*\"|'[^'\[][^']*'|[^\s\"',;&|)}\[\]][^\s\"',;&|)}\]]*)"
#: Prefixes and lengths as the providers document them: AWS, GitHub, GitLab, Hugging Face, OpenAI and Anthropic, Google,
#: Slack, npm and PyPI, NVIDIA, JSON web tokens.
_TOKENS = (
    r"A(?:KIA|SIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{28,}"
    r"|sk-[A-Za-z0-9][\w-]{18,}|AIza[\w-]{30,}|xox[abeoprs]-[\w-]{10,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{16,}"
    r"|nvapi-[\w-]{20,}|wandb_v\d_\w{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
)
#: Patterns, and the kind that each finds. Of a match the first group stays, and `[kind]` replaces the rest.
_PRIVATE_FORMS = (
    # a private key in PEM form
    (r"()(?s:-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY.*?(?:-----END [A-Z0-9 ]{0,40}-----|\Z))", "secret"),
    # user and password of a URL
    (r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s/@\"'<>]+@", "secret"),
    # tokens of known providers, and of HTTP headers
    (rf"()(?<![A-Za-z0-9])(?:{_TOKENS})(?![A-Za-z0-9])", "secret"),
    (r"(?i)(\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/-]{16,}=*", "secret"),
    # the value of an option, a variable or a JSON member whose name means a secret
    (rf"(?i)((?<![\w-])--?[\w-]{{0,40}}{SENSITIVE_NAMES}[ =]\s{{0,9}})(?!\d+\b){_VALUE}", "secret"),
    (rf"(?i)(\b[\w.-]{{0,60}}{SENSITIVE_NAMES}[\"']?\s{{0,9}}(?:=|:(?!:))\s{{0,9}})(?!\d+\b){_VALUE}", "secret"),
    # the same of a name that may mean a secret, if the value is long and holds a digit
    (
        (
            rf"(?i)((?:\b|--)[\w.-]{{0,60}}{_AMBIGUOUS_NAMES}[\"']?\s{{0,9}}[=: ]\s{{0,9}}[\"']?)"
            r"(?=[\w%+/=.~-]*\d)[\w%+/=.~-]{12,}"
        ),
        "secret",
    ),
    # e-mail addresses, and user@host of scp, of a prompt and of ssh
    (r"()(?<![\w.+-])[A-Za-z0-9][\w.+-]{0,60}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,24}\b", "email"),
    (r"()(?<![\w.@-])[A-Za-z_][\w.-]{0,60}@[A-Za-z0-9][\w.-]{0,60}(?=:(?:[~/]|\d{1,5}\b)|:?\s?[~#$](?:\s|$))", "user"),
    (r"(\bssh\s+)[A-Za-z_][\w.-]{0,60}@[\w.-]{1,60}", "user"),
    # an IPv4 address, which a version number may look like; a MAC address; an IPv6 address
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
    # hosts of AWS, and of domains that only a local network knows
    (r"()(?<![\w.-])ip-\d{1,3}(?:-\d{1,3}){3}(?:\.[a-z0-9-]+)*", "host"),
    (r"()(?<![\w.@/-])[a-z][\w-]{0,60}\.(?:[\w-]{1,60}\.){0,8}(?:internal|corp|lan|local)\b", "host"),
)


#: An entry of an environment, whose entries are joined by zero bytes.
_ENVIRONMENT_ENTRY = re.compile(r"(?:^|\0)[A-Za-z_]\w*=")
#: Only a text with one of these is searched, which saves time. It also leaves alone an ambiguous word and a value with
#: only a blank between them: mostly that is a name, such as the range "token embedding_layer_1".
_HINTS = re.compile(
    r"[@/\\=:]|--|\d\.\d|ip-|eyJ|AIza|A[KS]IA[A-Z0-9]|[a-z\d]_[A-Za-z0-9]{20}|-[\w-]{10}|(?i:bearer|basic )"
    rf"|\.(?:internal|corp|lan|local)|-[\w-]*(?i:{SENSITIVE_NAMES}) "
)


class TextCleaner:
    """Replace personal names and secrets in texts: ``[user]``, ``[host]``, ``[secret]`` and so on stand in their place.

    Parameters
    ----------
    private : mapping of str to str
        Texts that no pattern recognises, each a ``user``, a ``host`` or a ``secret``.

    Attributes
    ----------
    changed : int
        Distinct texts that were changed.
    """

    def __init__(self, private: Mapping[str, str]) -> None:
        self._kinds = {text.lower(): kind for text, kind in private.items()}  # kind by private text
        # The longest first, so that a name does not hide a longer one that begins with it. (?!) matches nothing.
        names = "|".join(map(re.escape, sorted(self._kinds, key=len, reverse=True)))
        self._names = re.compile(f"(?<![a-z0-9])(?:{names or '(?!)'})(?![a-z0-9])", re.IGNORECASE)
        self._cleaned_texts: dict[str, str] = {}  # by original
        self.changed = 0

    def text(self, original: str) -> str:
        """Remove personal names and secrets from a text; each distinct one is cleaned once.

        Parameters
        ----------
        original : str
        """
        if original not in self._cleaned_texts:
            cleaned = self._replaced(original)
            self.changed += cleaned != original
            self._cleaned_texts[original] = cleaned
        return self._cleaned_texts[original]

    def value(self, original: Any, key: str = "") -> Any:
        """Clean every text of a JSON value; a text under a key that means a secret is replaced.

        Parameters
        ----------
        original : JSON value
        key : str
            The key under which it stands, "" for none.
        """
        if isinstance(original, Mapping):
            return {self.text(str(name)): self.value(item, str(name)) for name, item in original.items()}
        if isinstance(original, list | tuple):
            return [self.value(item, key) for item in original]
        if not isinstance(original, str):
            return original
        if SECRET_VARIABLE.fullmatch(key):
            return "[secret]"
        return self.text(original)

    def json(self, original: str) -> str:
        """Remove names and secrets from the values inside a JSON text, so that the text stays valid JSON.

        Parameters
        ----------
        original : str
        """
        try:
            value = json.loads(original)
        except (ValueError, RecursionError):
            return self.text(original)
        cleaned = self.value(value)
        if cleaned == value:
            return original
        return json.dumps(cleaned, separators=(",", ":"))

    def _replaced(self, text: str) -> str:
        """Replace what the patterns find, then paths, then the private names of this machine and of the file."""
        if "\0" in text and _ENVIRONMENT_ENTRY.search(text):  # an environment is replaced as a whole
            return "[environment]"
        if _HINTS.search(text):
            for form, kind in _PRIVATE_FORMS:
                text = re.sub(form, rf"\1[{kind}]", text)  # `re` keeps what it has compiled
            text = _PATH.sub(_shortened_path, text)
        return self._names.sub(self._placeholder, text)

    def _placeholder(self, match: re.Match[str]) -> str:
        """Return what replaces a private name."""
        # "user" where `lower` does not lead to the name: a pattern that ignores case also takes the long s for an s.
        kind = self._kinds.get(match[0].lower(), "user")
        return f"[{kind}]"


def _shortened_path(match: re.Match[str]) -> str:
    """Shorten a path to its part in a library, a file's name or "[path]"; names of layers look like paths and stay."""
    path = match[0]
    in_library = _LIBRARY_PATH.search(path)
    if in_library:
        return in_library[1] + in_library[2]  # without the user between them in `torchinductor_USER/…`
    name = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    if _CODE_OR_DATA_FILE.fullmatch(name):
        return name
    if _PERSONAL_PATH.match(path):
        return "[path]"
    return path


def _private_names_here() -> dict[str, str]:
    """Collect this machine's host and user, and the secrets of this process's environment, for :class:`TextCleaner`."""
    pairs = [*os.environ.items(), ("HOSTNAME", socket.gethostname())]
    with contextlib.suppress(KeyError, OSError):  # some containers have no such user
        pairs.append(("USER", getpass.getuser()))
    return private_names(pairs)


# ---------------------------------------------------------------- traces


def clean(trace: Trace) -> Trace:
    """Return a trace whose texts identify no person.

    Times, sizes, rows and their order stay the same. Names that become equal get a number.

    Parameters
    ----------
    trace : Trace
        With the selection it carries.

    Returns
    -------
    Trace
        The same trace if it is clean already.
    """
    whole = trace.whole
    if isinstance(whole._source, _CleanSource):
        return trace
    if "clean" not in whole.memo:
        whole.memo["clean"] = Trace(_CleanSource(whole), whole.path)
    cleaned: Trace = whole.memo["clean"]
    if trace is whole:
        return cleaned
    return cleaned.masked(trace._masks)


def _cleaner(trace: Trace) -> TextCleaner:
    """Return the cleaner of a whole trace, which counts the texts that it changed; it is kept with the trace."""
    source: Any = clean(trace).whole._source
    cleaner: TextCleaner = source.cleaner
    return cleaner


def clean_text(trace: Trace, text: str) -> str:
    """Clean a text about a trace, such as the name of its file.

    Parameters
    ----------
    trace : Trace
    text : str
    """
    return _cleaner(trace).text(text)


def removed_by_cleaning(traces: Iterable[Trace]) -> list[str]:
    """Say what clean copies of traces do not hold, one sentence each, for the person who passes them on.

    Parameters
    ----------
    traces : iterable of Trace
        Whose tables have been read through :func:`clean`: each trace keeps its cleaner, which has counted since.
    """
    sentences = ["left out: environment, command lines, process lists, program output, call chains of samples"]
    changed = 0
    for trace in traces:
        changed += _cleaner(trace).changed
    if changed:
        sentences.append(f"texts with paths shortened, or users, hosts, addresses or secrets replaced: {changed:,}")
    sentences.append(
        "names of kernels, ranges and files are kept: look through the output for secrets before you share it"
    )
    return sentences


class _CleanSource:
    """Reads a trace that has no selection, and cleans its texts."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        meta = trace.meta
        self.cleaner = TextCleaner({**_private_names_here(), **meta.private})
        text = self.cleaner.text
        self.meta = dataclasses.replace(
            meta,
            private={},
            gpus=[dataclasses.replace(gpu, name=gpu.name and text(gpu.name)) for gpu in meta.gpus],
            notes=list(map(text, meta.notes)),
            thread_names={thread: text(name) for thread, name in meta.thread_names.items()},
            distributed=self.cleaner.value(meta.distributed),
        )

    def read(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """See :class:`~nsightkit.trace.model.Source`."""
        frame = self._trace.table(table, columns)
        for column in columns:
            if TABLES[table][column] == "category":
                texts = frame[column].cat
                cleaned = self._clean_texts(column, texts.categories.tolist())
                frame[column] = categorical(np.asarray(texts.codes), cleaned)
            elif column in TIME_COLUMNS:
                frame[column] += self._trace.t0_ns  # the new trace moves them to its own clock again
        return frame

    def first_ns(self) -> int:
        """See :class:`~nsightkit.trace.model.Source`."""
        return self._trace.t0_ns

    def _clean_texts(self, column: str, originals: list[str]) -> list[str]:
        """Remove private parts from the distinct texts of a column.

        Two kernels or ranges whose names become equal are still two, so the later ones get a number: "[path] (2)".
        """
        # These columns hold JSON, which a number behind it would break.
        if column in ("collective", "inputs"):
            return list(map(self.cleaner.json, originals))
        counts = collections.Counter(originals)  # 1 each; a cleaned text may also equal one that was clean before
        cleaned = []
        for original in originals:
            text = self.cleaner.text(original)
            if text != original:
                counts[text] += 1
                number = counts[text]
                text += f" ({number})" if number > 1 else ""
            cleaned.append(text)
        return cleaned


# ---------------------------------------------------------------- memory snapshots


#: Members of a frame of a call stack that are kept.
_FRAME_KEYS = ("filename", "line", "name")


def clean_snapshot(snapshot: Json) -> Json:
    """Copy what PyTorch's own pages read of a memory snapshot, with shortened paths and clean texts.

    Parameters
    ----------
    snapshot : mapping
        What ``torch.cuda.memory._snapshot()`` returned.

    Returns
    -------
    dict
        Of the same shape. Equal frames and stacks are one object each, which makes the file small.
    """
    copier = _SnapshotCopier()
    return {
        "segments": copier.rows(snapshot["segments"]),
        "device_traces": list(map(copier.rows, snapshot["device_traces"])),
        "allocator_settings": copier.cleaner.value(snapshot["allocator_settings"]),
        "external_annotations": copier.rows(snapshot.get("external_annotations", ())),
    }


class _SnapshotCopier:
    """Copies rows of a snapshot, their texts cleaned."""

    def __init__(self) -> None:
        self.cleaner = TextCleaner(_private_names_here())
        self._shared: dict[Any, Any] = {}  # frames by their values, stacks by the identities of their frames

    def rows(self, rows: Iterable[Json]) -> list[Json]:
        """Copy segments, the blocks in a segment, events or annotations."""
        copies = []
        for row in rows:
            copy: Json = {}
            for key, value in row.items():
                if key == "frames":  # the same stacks come again and again: one copy of each saves memory and the file
                    copy[key] = self._stack(value)
                elif key == "blocks":
                    copy[key] = self.rows(value)
                else:
                    copy[key] = self.cleaner.value(value)
            copies.append(copy)
        return copies

    def _stack(self, frames: Iterable[Json]) -> Any:
        """Copy a call stack; equal frames, and equal stacks, come back as one object.

        `_shared` keeps every frame alive, so no two of them have the same `id`.
        """
        stack = []
        for frame in frames:
            values = tuple(self.cleaner.value(frame.get(key)) for key in _FRAME_KEYS)
            stack.append(self._shared.setdefault(values, dict(zip(_FRAME_KEYS, values, strict=True))))
        return self._shared.setdefault(tuple(map(id, stack)), stack)
