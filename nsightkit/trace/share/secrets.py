"""Recognise in text what identifies a person or a machine, or opens a door, and put a placeholder in its place.

One :class:`Scrubber` reads one file: the same secret gets the same placeholder wherever it stands, and two secrets
never get the same one, so that names that differed still differ. Placeholders are numbered in the order in which their
secrets are met; the first of a kind has no number: ``[path]``, ``[path 2]``.

Three things are recognised: what has a known form (keys of providers, private keys, credentials in URLs, home folders,
addresses), what stands behind a name that says so (``password=``, ``--token``, ``"hostname":``), and what the file or
this machine says about itself (:meth:`Scrubber.learn`): no pattern knows that ``orion`` is a host.

Names of kernels, operators and calls hold paths' slashes (``/layer1/Conv``), long hexadecimal numbers, ``@`` and ``=``
that are none of this. Each rule here is as narrow as that takes.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import itertools
import json
import os
import re
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from nsightkit.hardware import GPUS

__all__ = ["PLACEHOLDER", "Kind", "Ledger", "Scrubber", "json_text"]

Kind = Literal["environment", "secret", "path", "host", "user", "email", "address"]

#: What stands in the place of what was removed; older copies have outputs, too.
PLACEHOLDER = re.compile(r"\[(environment|secret|path|host|user|email|address|output)(?: (\d{1,9}))?\]")

# ---------------------------------------------------------------- credentials of a known form

#: What stands in every text that has one, and how it looks. Prefixes and lengths are those that the providers document,
#: a little looser: a key that lost its end is still a key.
_TOKENS: tuple[tuple[str, str], ...] = (
    # Amazon, Google, Azure
    ("AKIA ASIA AROA AIDA AGPA ANPA ANVA AIPA ABIA ACCA", r"A(?:KIA|SIA|ROA|IDA|GPA|NPA|NVA|IPA|BIA|CCA)[A-Z0-9]{16}"),
    ("AIza", r"AIza[\w\-]{30,}"),
    ("ya29.", r"ya29\.[\w\-.]{20,}"),
    ("GOCSPX-", r"GOCSPX-[\w\-]{20,}"),
    ("1//0", r"1//0[\w\-]{30,}"),
    ("Q~", r"[\w~.\-]{3}[78]Q~[\w~.\-]{31,34}"),
    ("==", r"[A-Za-z0-9+/]{86}=="),
    # GitHub, GitLab, Hugging Face
    ("ghp_ gho_ ghu_ ghs_ ghr_", r"gh[pousr]_[A-Za-z0-9]{30,}"),
    ("github_pat_", r"github_pat_\w{22,}"),
    (
        "glpat- gloas- gldt- glrt- glcbt- glptt- glft- glimt- glagent- glsoat- glffct-",
        r"gl(?:pat|oas|dt|rt|cbt|ptt|ft|imt|agent|soat|ffct)-[\w\-.]{16,}",
    ),
    ("hf_ api_org_", r"(?:hf|api_org)_[A-Za-z]\w{28,}"),
    # OpenAI, Anthropic and others; Groq, Replicate, RunPod, Cerebras, Fireworks, Tavily, LangSmith, E2B; xAI; NVIDIA
    ("sk-", r"sk-(?:proj-|svcacct-|admin-|ant-|or-|lf-)?[A-Za-z0-9][\w\-]{18,}"),
    (
        "gsk r8 pplx rpa csk fw_ fw- tvly lsv2_ e2b",
        r"(?:gsk|r8|pplx|rpa|csk|fw|tvly|lsv2_pt|lsv2_sk|e2b)[_\-][A-Za-z0-9]{30,}",
    ),
    ("xai-", r"xai-[A-Za-z0-9]{40,}"),
    ("nvapi-", r"nvapi-[\w\-]{20,}"),
    # Slack, npm, PyPI, Weights & Biases
    ("xox", r"xox[abeoprs](?:\.xox[bp])?-[\w\-]{10,}"),
    ("xapp-", r"xapp-\d-[\w\-]{10,}"),
    ("npm_", r"npm_[A-Za-z0-9]{30,}"),
    ("pypi-", r"pypi-[\w\-]{16,}"),
    ("wandb_v", r"wandb_v\d_\w{20,}"),
    # Stripe, SendGrid, Mailgun, Databricks, DigitalOcean, Vault, Docker, Doppler, Grafana, Linear, Atlassian,
    # Tailscale, Notion, Shopify, Pulumi, CircleCI, Telegram, age, Terraform
    ("k_live_ k_test_", r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"),
    ("whsec_", r"whsec_[A-Za-z0-9+/]{20,}"),
    ("SG.", r"SG\.[\w\-]{16,}\.[\w\-]{16,}"),
    ("key-", r"key-[0-9a-f]{32}"),
    ("dapi", r"dapi[0-9a-f]{32}"),
    ("_v1_", r"do[oprt]_v1_[0-9a-f]{64}"),
    ("hvs. hvb. hvr.", r"hv[sbr]\.[\w\-]{20,}"),
    ("dckr_", r"dckr_[po]at_[\w\-]{20,}"),
    ("dp.", r"dp\.(?:pt|st|ct|sa|scim|audit)\.[\w.\-]{20,}"),
    ("glsa_ glc_", r"gl(?:sa|c)_[\w+/=]{30,}"),
    ("lin_api_", r"lin_api_\w{30,}"),
    ("ATATT3", r"ATATT3[\w\-=]{40,}"),
    ("tskey-", r"tskey-[a-z]+-[\w\-]{16,}"),
    ("secret_ ntn_", r"(?:secret|ntn)_[A-Za-z0-9]{40,}"),
    ("shpat_ shpca_ shppa_ shpss_", r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"),
    ("pul-", r"pul-[0-9a-f]{40}"),
    ("CCIPAT_", r"CCIPAT_\w{20,}"),
    (":AA", r"\d{8,10}:AA[\w\-]{30,}"),
    ("AGE-SECRET-KEY-", r"AGE-SECRET-KEY-1[0-9A-Z]{50,}"),
    (".atlasv1.", r"[A-Za-z0-9]{14}\.atlasv1\.[\w\-=]{40,}"),
    # JSON web tokens; keys of SSH, with the name that stands behind them
    ("eyJ", r"eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*"),
    ("AAAA", r"(?:ssh|ecdsa|sk-ssh|sk-ecdsa)-[\w\-@.]+\s+AAAA[A-Za-z0-9+/=]{20,}(?:[ \t]+\S+@\S+)?"),
)
_TOKEN_HINTS = tuple(hint for hints, _ in _TOKENS for hint in hints.split())

# ---------------------------------------------------------------- what a name says

_SURE_NAMES = (
    r"pass(?:word|wd|phrase|code)|passwd|secret|api[_\-]?key|access[_\-]?key|private[_\-]?key|account[_\-]?key"
    r"|shared[_\-]?(?:access[_\-]?)?key|secret[_\-]?key|(?:en|de)cryption[_\-]?key|signing[_\-]?key|master[_\-]?key"
    r"|credential|(?:auth|access|refresh|id|bearer|session|security|deploy|personal|bot|api)[_\-]?token|client[_\-]?secret"
    r"|_authToken|x-amz-(?:signature|credential|security-token)"
)
_SURE_TAIL = r"(?:s|[_\-]?(?:id|value|b64|base64|text|string))?"
_STRONG = re.compile(rf"(?i)[\w.\-]*(?:{_SURE_NAMES}){_SURE_TAIL}")
#: Names that mean a secret in one place and a word of the trade in another (tokens, keys and queries): `_secretive`
#: decides by the value. In capitals they are variables, and any value but a number is one.
_WEAK = re.compile(
    r"[\w.\-]*(?:(?i:token|auth|jwt|pat|session|cookie|signature|sig)|(?i:[_\-]key)|KEY|[Pp]wd|PASS|PSK)"
)
#: ``name=value``, ``name: value``, ``"name": "value"``. ``--name value`` is `_FLAG`.
_ASSIGNED = re.compile(
    r"(?P<quote>[\"']?)(?P<name>(?<![\w.\-])[\w.\-]+)(?P=quote)(?P<sign>\s{0,9}(?:=>|:=|:(?!:)|=(?!=))\s{0,9})"
)
_VALUE = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s\"',;&|)}\]]+")
_NAME_HINTS = (
    *("pass", "secret", "key", "credential", "token", "auth", "jwt", "pat", "session", "cookie", "sig", "pwd", "psk"),
    *("x-amz", "bearer"),
)
_FLAG = (
    rf"(?i)(?<![\w\-])--?(?:[\w\-]*(?:{_SURE_NAMES}|token|auth|jwt|cookie|[_\-]key|pwd){_SURE_TAIL}|key)"
    r"(?:=|\s+|\x00)(?P<secret>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s\"'\x00]+)"
)
_LOGIN_NAME = r"[A-Za-z_][\w.\-@\\]*"
_USER_FLAG = (  # not `python -u script.py`
    rf"(?<![\w\-])(?:-u(?:=|\s+|\x00)(?P<user>{_LOGIN_NAME}):(?P<secret>\S+)"
    rf"|--(?:user(?:name)?|login(?:-name)?)(?:=|\s+|\x00)(?P<user2>{_LOGIN_NAME})(?::(?P<secret2>\S+))?)"
)
#: Values that are not secrets whatever their name is.
_NOTHING = frozenset(
    ["", "null", "none", "nil", "true", "false", "yes", "no", "undefined", "unset", "empty", "<unset>", "***", "xxx"]
)
_NUMBER = re.compile(r"[+\-]?(?:0[xX][0-9a-fA-F]+|\d[\d_,]*(?:\.\d*)?(?:[eE][+\-]?\d+)?)(?:[a-zA-Zµ%]{1,3})?")

#: What the value under a JSON key is, by the key in small letters.
_KEY_NAMES: dict[Kind, str] = {
    "host": "host hostname host_name nodename node_name computername computer_name machine_name fqdn export_host "
    "device_display_name",
    "user": "user username user_name login logname login_name userid owner author export_user",
    "environment": "env environ environment envs envvars env_vars environment_variables os.environ",
    "secret": "authorization proxy-authorization cookie set-cookie jwt psk",
    "path": "cwd pwd home workdir working_dir working_directory tracename",
}
_KEYS = {name: kind for kind, names in _KEY_NAMES.items() for name in names.split()}

# ---------------------------------------------------------------- environments

_ENTRY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:%%|\(\))?=")
#: Variables that only an environment has: alone and without quotes, other ``NAME=value`` may be a label (``BATCH=32``).
_VARIABLE = re.compile(
    r"(?:SLURM[A-Z]*|SBATCH|PBS|LSB|SGE|PMIX?|PRTE|OMPI_MCA|SSH|AWS|AZURE|ARM_CLIENT|GOOGLE|GCP|GCLOUD|CLOUDSDK|HF|HUGGING"
    r"|HUGGINGFACE|WANDB|OPENAI|ANTHROPIC|GITHUB|GITLAB|NPM|PIP|CONDA|KUBERNETES|DOCKER|XDG|DBUS|LC|LD|SUDO|VSCODE"
    r"|JUPYTER|JPY|MLFLOW|COMET|NEPTUNE|DATABRICKS|KAGGLE|NGC|PYENV|NVM|CARGO|RUSTUP|LESS|GIT|HISTFILE|TERM|TMUX"
    r"|PYTHONPATH|PYTHONHOME|SINGULARITY|APPTAINER|MODULES?|LMOD|POETRY|UV|TORCHELASTIC|RUNPOD|VAST)_[A-Z0-9_]+"
    r"|PATH|HOME|USER|LOGNAME|USERNAME|USERPROFILE|USERDOMAIN|HOSTNAME|HOST|COMPUTERNAME|HOSTTYPE|PWD|OLDPWD|SHELL|MAIL"
    r"|LANG|LANGUAGE|TERM|EDITOR|DISPLAY|XAUTHORITY|PS1|PYTHONPATH|PYTHONHOME|MANPATH|INFOPATH|TMPDIR|TEMP|TMP|SHLVL"
    r"|VIRTUAL_ENV|MASTER_ADDR|MASTER_PORT|APPDATA|LOCALAPPDATA|LOADEDMODULES|NODELIST|KUBECONFIG|DATABASE_URL|DSN"
    r"|https?_proxy|HTTPS?_PROXY|all_proxy|ALL_PROXY|no_proxy|NO_PROXY"
)
_SET_TO = r"(?:\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s;\"'\x00]*)"
_ENVIRONMENT = re.compile(  # SSH_CONNECTION's value has blanks in it
    rf"(?<![\w.$/\-])(?P<export>(?:export|setenv|declare -x|typeset -x|set)\s+)?"
    rf"(?:SSH_[A-Z0-9_]+={_SET_TO}(?:\s+[0-9a-fA-F:.]+)*|(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>{_SET_TO}))"
)
_ENTRIES = re.compile(r"(?:^|(?<=[;\r\n]))([ \t]{0,40})(?:export\s+|declare -x )?([A-Z_][A-Z0-9_]*=[^;\r\n]*)")

#: What a variable tells, for :meth:`Scrubber.learn_environment`; the first that fits.
_VARIABLES: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (
        "host",
        re.compile(
            r"HOSTNAME|HOST|COMPUTERNAME|USERDOMAIN|SLURMD_NODENAME|SLURM_SUBMIT_HOST|SLURM_LAUNCH_NODE_IPADDR"
            r"|PBS_O_HOST|LSB_HOSTS|NODENAME|NODE_NAME|CONTAINER_NAME|POD_NAME|MASTER_ADDR|K8S_NODE_NAME"
        ),
    ),
    (
        "user",
        re.compile(
            r"USER|LOGNAME|USERNAME|SUDO_USER|SLURM_JOB_USER|SLURM_JOB_ACCOUNT|PBS_O_LOGNAME|NB_USER|JUPYTERHUB_USER"
            r"|LSFUSER"
        ),
    ),
    (
        "secret",
        re.compile(
            r"(?i).*(?:TOKEN(?!S|IZER)|SECRET|PASSW|PASSPHRASE|API_?KEY|ACCESS_?KEY|CREDENTIAL|PRIVATE|JWT|COOKIE).*"
            r"|.*_(?:KEY|PAT|PSK|DSN)"
        ),
    ),
    ("path", re.compile(r"HOME|USERPROFILE|PWD|OLDPWD|SLURM_SUBMIT_DIR|VIRTUAL_ENV|CONDA_PREFIX|TMPDIR")),
)

# ---------------------------------------------------------------- paths

_PATH_LIKE = re.compile(r"/[^/]|[A-Za-z]:[\\/]|\\\\|~[\w.\-]*/")
_STOP = r"\s/\"'`<>|;:,()\[\]{}=&?*#\x00\\"
#: What a path looks like in a text, and what stands in every text that has one.
_PATHS: dict[re.Pattern[str], tuple[str, ...]] = {
    re.compile(
        rf"(?:(?<=file://)|(?<=-[IL])|(?<=[^\w./~\])}}\-\U000F0000-\U0010FFFD])|^)"
        rf"(?:~[A-Za-z][\w.\-]*|~)?(?:/[^{_STOP}]+)+/?"
    ): ("/",),
    re.compile(rf"(?:/[^{_STOP}]{{1,255}}){{0,30}}/(?:home|Users)/[^{_STOP}]+(?:/[^{_STOP}]+)*/?"): (
        "/home",
        "/Users/",
    ),
    re.compile(
        r"(?<![A-Za-z0-9])(?:[A-Za-z]:(?P<s>\\{1,2}|/)(?=[^/\\\s])|\\\\(?=[A-Za-z0-9_.\-]+\\))"
        r"(?:[^\\/:*?\"<>|\r\n\x00]+(?:\\{1,2}|/))*[^\\/:*?\"<>|\s\x00,;)(\]\[]*"
    ): ("\\", ":/"),
}
#: First components of paths that lead to people's files. Not ``/shared`` or ``/net``: models have modules of that name,
#: and TensorRT names its ranges ``/shared/Gather``.
_ROOTS = re.compile(
    r"home\d*|Users|root|tmp|var|private|mnt|media|data\d*|datasets|scratch[\w\-]*|pscratch|work\d*|workspaces?|gpfs[\w\-]*"
    r"|lustre[\w\-]*|nfs[\w\-]*|beegfs|projects|fsx|efs|storage\d*|nobackup|afs|cephfs|ceph|exports?|nethome|homes|opt|srv"
    r"|netscratch|ptmp|dss|global|kaggle|Volumes|mount|volume\d*|volumes"
)
_SYSTEM = re.compile(r"usr|lib|lib32|lib64|libx32|bin|sbin|etc|proc|sys|dev|boot|System|Library|Applications|nix|snap")
_SYSTEM_PATH = re.compile(
    r"/opt/(?:nvidia|rocm[\w.\-]*|intel|cuda[\w.\-]*|amdgpu|hpcx)(?:/|$)"
    r"|(?i:[A-Z]:[\\/]+(?:Windows|Program Files(?: \(x86\))?|ProgramData)(?:[\\/]|$))"
)
_HOME = re.compile(r"[/\\](?:home\d*|Users|homes|nethome|u\d+/[a-z]|users)[/\\]{1,2}([^/\\\s\"':;,\x00]+)")
_EXTENSIONS = (
    "py|pyc|pyx|pyi|ipynb|so(?:\\.[\\d.]+)?|dll|dylib|pyd|a|o|cu|cuh|ptx|cubin|fatbin|c|cc|cpp|cxx|h|hh|hpp|inl|rs|go|java"
    "|js|ts|json|jsonl|gz|zst|xz|bz2|log|txt|out|err|yaml|yml|toml|cfg|conf|config|ini|sh|bash|zsh|pt|pth|bin|safetensors"
    "|onnx|plan|engine|trt|ckpt|npy|npz|pb|parquet|arrow|sqlite|db|csv|tsv|hdf5?|h5|qdrep|qdstrm|nsys-rep|ncu-rep|pickle"
    "|pkl|pem|key|crt|cert|exe|whl|zip|tar|tgz|gguf|model|html|md|xml|png|jpg|jpeg|wav|mp4|lock|sock|pid|env|socket|sqsh"
    "|sif|img|patch|diff|proto|lua|rb|pl|r|jl|f90|tmp|cache|dat|idx"
)
_FILE = re.compile(rf"[^/\\]+\.(?:{_EXTENSIONS})")
#: From these on a path names a library, the same on every machine. Analyses of snapshots tell libraries by them.
_LIBRARY = re.compile(
    r"(?s)(?:(?:site|dist)-packages[/\\]|lib[/\\]{1,2}python\d[^/\\]*[/\\](?!(?:site|dist)-packages)"
    r"|torch[/\\]{1,2}(?:autograd|cuda|distributed|_dynamo|_functorch|_inductor|nn|optim|utils)[/\\]"
    r"|transformers[/\\]{1,2}(?=[\w./\\]+\.py$))(?=.)"
)
_INDUCTOR = re.compile(r"(torchinductor_)[^/\\]*([/\\])")

# ---------------------------------------------------------------- numbers that mean something else

_COMMIT = re.compile(r"(?i)(?:commit|rev(?:ision)?|sha1?|git|hash|digest|tree|head|version)\W{0,4}$")
#: Versions have four parts as well as addresses.
_VERSION = re.compile(
    r"(?i)(?:version|ver|v|release|driver|cuda|cudnn|cublas|cupti|nccl|build|rev|so|toolkit|nsys|ncu|r)[\s:=.]*$|[=<>~!]=\s*$"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"

#: Names that are too common to be a secret, or that the trade uses: a user called ``max`` must not cost ``aten::max``.
_COMMON = frozenset(
    """
    localhost localdomain local root user users admin administrator ubuntu debian centos fedora rocky alma guest nobody
    docker podman container runner builder jovyan vscode coder sandbox azureuser ec2-user opc default system service
    daemon operator www-data slurm hpc nvidia cuda torch pytorch python python3 jupyter colab kaggle node nodes host
    server master worker workers head login compute cluster batch gpu gpus cpu tpu data home work workspace scratch
    test tests train training trainer infer inference bench benchmark benchmarks profile profiler model models main
    code project projects research student team group shared public private temp tmp build release debug prod dev
    staging linux windows darwin macos unix x86_64 amd64 arm64 aarch64 volta turing ampere hopper blackwell ada lovelace
    kepler maxwell pascal fermi tesla grace jetson orin xavier adam adamw lamb lion muon norm conv linear relu gelu silu
    gemm copy fill sort topk view void char half bool float double long short step loss grad mean prod flip roll triton
    cutlass cublas cudnn nccl nvtx sdpa flash attention softmax embedding forward backward optimizer optim layer layers
    block blocks tensor tensors matmul reduce gather scatter stream kernel kernels memory memcpy memset event events
    thread process range ranges name names none null true false unknown other local (cli) file files path text value
    token tokens cache index array vector matrix queue stack heap page pool graph graphs mask input output inputs
    outputs
    weight weights bias scale shape size dims rank ranks world epoch iter iteration warmup sample sampler loader dataset
    sync async wait lock send recv read write open close load store push pull start stop begin end init exit call calls
    launch empty zeros ones rand randn arange clone detach expand reshape permute transpose contiguous slice select
    split concat stack chunk where gather clamp round floor ceil sqrt rsqrt exp log sin cos tanh sigmoid dropout batch
    vector elementwise vectorized unrolled native operator lambda unsigned const struct class template static inline
    autograd engine function module modules session sessions client clients local remote global device devices
    """.split()  # noqa: SIM905 - a hundred lines otherwise
)
_PLAIN_WORD = re.compile(r"\d+|[0-9a-f]{1,3}")
#: Hosts are called after the card they hold, and the card's name must stay: it names no machine.
_CARDS = frozenset(word for gpu in GPUS for word in gpu.name.lower().split())

#: While a text is worked on, one character of a private plane stands for each placeholder: no rule takes a part of one
#: for a value, and what was scrubbed before stays as it is.
_FIRST_MARK, _MARKS = 0xF0000, 0x1FFF0
_MARK = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + _MARKS)}]")

#: Names that differ only in their digits (``aten::add, op_id = 4711``) are looked at once: no rule asks which digit it
#: is, but those about credentials and addresses.
_SKELETON = str.maketrans("123456789", "000000000")
_FOUR = re.compile(r"\d\.\d{1,3}\.\d{1,3}\.\d|[0-9a-fA-F]:[0-9a-fA-F]*:")


class Scrubber:
    """Puts placeholders in the place of secrets, the same for the same, for the whole of one file.

    Parameters
    ----------
    machine : bool
        Know this machine's names, its user and what its environment holds: traces are mostly looked at where they
        were captured.

    Attributes
    ----------
    removed : list of str
        The kinds of what was replaced, one after the other.
    """

    def __init__(self, *, machine: bool = True) -> None:
        self.removed: list[str] = []
        self._numbers: dict[tuple[str, str], str] = {}
        self._taken: defaultdict[str, set[int]] = defaultdict(set)
        self._words: dict[str, Kind] = {}  # in small letters
        self._literal: set[str] = set()  # secrets, as they stand
        self._roots: set[str] = set()  # folders, as they stand
        self._harmless: set[str] = set()  # texts with nothing in them, whatever digits they have
        self._marked: list[tuple[Kind | None, str]] = []  # what the marks of the text at hand stand for
        if machine:
            self._learn_machine()

    # -- what is known beforehand --------------------------------------------------------------------------------

    def learn(self, kind: Kind, text: str | None) -> None:
        """Learn that a text is a secret wherever it stands.

        Parameters
        ----------
        kind : {"host", "user", "secret", "path"}
            Of a host also the part before the first dot is learnt. A path is a folder: all below it is one.
        text : str or None
            Common words and short ones are not learnt: they would be found where they are none.
        """
        text = (text or "").strip().strip("\"'")
        if not text or PLACEHOLDER.search(text) or "[scrubbed]" in text:
            return
        self._harmless.clear()
        if kind == "path":
            if text.startswith("/") and text.count("/") >= 2 and not _SYSTEM.fullmatch(text.split("/")[1]):
                self._roots.add(text.rstrip("/"))
        elif kind == "secret" and not (text.isalpha() and len(text) < 12):  # a short word is part of other words, too
            if len(text) >= 6 and text.lower() not in _COMMON and not _NUMBER.fullmatch(text):
                self._literal.add(text)
        else:
            for word in {text.lower(), text.partition(".")[0].lower() if kind == "host" else text.lower()}:
                shortest = 6 if kind == "secret" else 4
                usual = word in _COMMON or word in _CARDS
                if len(word) >= shortest and not (usual or " " in word or _PLAIN_WORD.fullmatch(word)):
                    self._words.setdefault(word, kind)

    def learn_environment(self, entries: Iterable[object] | Mapping[Any, object]) -> None:
        """Learn from an environment's entries who and where it was, and its secrets.

        Parameters
        ----------
        entries : iterable of str, or mapping
            ``NAME=value`` each, in quotes or not; or values by name.
        """
        if not isinstance(entries, Mapping):
            entries = {name: value for name, found, value in (str(entry).partition("=") for entry in entries) if found}
        for given, quoted in entries.items():
            name, value = str(given).strip().removeprefix("export "), str(quoted).strip().strip("\"'")
            kind = next((kind for kind, names in _VARIABLES if names.fullmatch(name)), None)
            if kind and not (kind == "secret" and value.startswith("/")):
                self.learn(kind, value)
            self.learn_from(value)

    def learn_from(self, text: str) -> None:
        """Learn the users whose home folders a text names, and an environment whose entries end with NULs.

        Parameters
        ----------
        text : str
        """
        if "\x00" in text:
            self.learn_environment(text.split("\x00"))
        for name in _HOME.findall(text):
            self.learn("user", name)

    def learn_value(self, given: Any, key: str = "") -> None:
        """Learn from a JSON value who and where it was.

        Parameters
        ----------
        given : JSON value
        key : str
            The key it stands under.
        """
        kind = _KEYS.get(key.lower())
        if isinstance(given, str):
            if kind in ("host", "user", "path"):
                self.learn(kind, given)
            elif key.isupper():
                self.learn_environment({key: given})
            self.learn_from(given)
        elif isinstance(given, Mapping | list | tuple):
            if kind == "environment":
                self.learn_environment(given)
            for name, item in given.items() if isinstance(given, Mapping) else ((key, item) for item in given):
                self.learn_value(item, str(name))

    def _learn_machine(self) -> None:
        asked: dict[Kind, Callable[[], str]] = {
            "host": socket.gethostname,
            "user": getpass.getuser,
            "path": lambda: str(Path.home()),
        }
        for kind, ask in asked.items():
            with contextlib.suppress(KeyError, OSError, ImportError, RuntimeError):  # some containers have no such user
                self.learn(kind, ask())
        self.learn_environment(os.environ)

    # -- replacing -----------------------------------------------------------------------------------------------

    def placeholder(self, kind: Kind, secret: str) -> str:
        """Give what stands for a secret, and count it.

        Parameters
        ----------
        kind : str
        secret : str

        Returns
        -------
        str
            ``[kind]``, or with a number from the second secret of a kind on.
        """
        self.removed.append(kind)
        key = (kind, secret)
        if key not in self._numbers:
            taken = self._taken[kind]
            number = next(n for n in itertools.count(len(taken) + 1) if n not in taken)
            taken.add(number)
            self._numbers[key] = f"[{kind}]" if number == 1 else f"[{kind} {number}]"
        return self._numbers[key]

    def text(self, value: str) -> str:
        """Replace every secret in a text.

        Parameters
        ----------
        value : str

        Returns
        -------
        str
            The same object when it holds none.
        """
        skeleton, lower = value.translate(_SKELETON), value.lower()
        known = any(secret in value for secret in self._literal) or any(word in lower for word in self._words)
        if skeleton in self._harmless and not known:
            return value
        work = self._marked_up(value)
        for may, rule in _RULES:
            if may(self, value, lower):
                work = rule(self, work)
        if any(kind is not None for kind, _ in self._marked):
            return self._spelt(work)
        if not (self._marked or any(hint in value for hint in _TOKEN_HINTS) or _FOUR.search(value)):
            if len(self._harmless) > 200_000:  # a bound on memory
                self._harmless.clear()
            self._harmless.add(skeleton)
        return value

    def path(self, value: str) -> str:
        """Replace the folders of a text that is a path, whatever they are called.

        Parameters
        ----------
        value : str
            Absolute or not; a relative path is only searched as any text.

        Returns
        -------
        str
            ``[path]/train.py``; a library keeps its path from ``site-packages`` on, a system folder all of it.
        """
        if not _PATH_LIKE.match(value) or "\x00" in value:
            return self.text(value)
        return self.text(self._spelt(self._shortened(self._marked_up(value), free=False)))

    def value(self, given: Any, key: str = "") -> Any:
        """Replace every secret in a JSON value, also those that only their key gives away.

        Parameters
        ----------
        given : JSON value
        key : str
            The key it stands under.

        Returns
        -------
        JSON value
        """
        kind = _KEYS.get(key.lower())
        match given:
            case str():
                return self._keyed(key, kind, given)
            case Mapping() | list() | tuple() if kind == "environment" and given:
                self.removed += ["environment"] * len(given)
                return {} if isinstance(given, Mapping) else []
            case Mapping():
                return {
                    self.text(name) if isinstance(name, str) else name: self.value(item, str(name))
                    for name, item in given.items()
                }
            case list() | tuple():
                words = [self.value(item, key) for item in given]
                return [*words[:1], *itertools.starmap(self._argument, itertools.pairwise(words))]
            case int() | float() if not isinstance(given, bool) and _STRONG.fullmatch(key):
                return self.placeholder("secret", str(given))
        return given

    def _keyed(self, key: str, kind: Kind | None, text: str) -> str:
        """Replace every secret in a text that stands under a key, which says what kind of text it is."""
        if not text or PLACEHOLDER.fullmatch(text):
            return text
        if kind == "path" and _PATH_LIKE.match(text):
            return self.path(text)
        when = bool if kind == "secret" else _by_name(key, ":")
        if when is not None and when(text) and text.lower() not in _NOTHING and not PLACEHOLDER.search(text):
            return self.placeholder("secret", text)
        if kind in ("environment", "host") or (kind == "user" and _no_number(text)):
            return self.placeholder(kind, text if kind == "environment" else text.lower())
        commit = re.fullmatch(r"(?i).*(?:commit|revision|sha\d*|hash|digest|version)|key", key)
        plain = commit and re.fullmatch(r"[0-9a-f]{40}|[\d.]+", text)
        return text if plain else json_text(self, text)

    def _argument(self, flag: Any, word: Any) -> Any:
        """Give a command line's word, or a placeholder if the word before it says that it is a secret or a user."""
        told = isinstance(flag, str) and isinstance(word, str) and flag.startswith("-")
        if not told or word[:1] in ("", "-") or _NUMBER.fullmatch(word) or PLACEHOLDER.search(word):
            return word
        if re.fullmatch(_FLAG, f"{flag} x") or (":" in word and re.fullmatch(_USER_FLAG, f"{flag} x:x")):
            return self.placeholder("secret", word)
        return self.placeholder("user", word.lower()) if re.fullmatch(_USER_FLAG, f"{flag} x") else word

    # -- marks ---------------------------------------------------------------------------------------------------

    def _marked_up(self, value: str) -> str:
        """Begin with a text: what was scrubbed before becomes marks."""
        self._marked.clear()

        def seen(match: re.Match[str]) -> str:
            self._taken[match[1]].add(int(match[2] or 1))
            return self._mark(None, match[0])

        return PLACEHOLDER.sub(seen, _MARK.sub("\ufffd", value))

    def _mark(self, kind: Kind | None, secret: str) -> str:
        if len(self._marked) >= _MARKS:  # all further ones of one text are one
            return chr(_FIRST_MARK + _MARKS - 1)
        self._marked.append((kind, _MARK.sub(lambda match: self._behind(match)[1], secret)))
        return chr(_FIRST_MARK + len(self._marked) - 1)

    def _behind(self, match: re.Match[str]) -> tuple[Kind | None, str]:
        return self._marked[ord(match[0]) - _FIRST_MARK]

    def _spelt(self, work: str) -> str:
        """Put placeholders where marks are."""

        def placeholder(match: re.Match[str]) -> str:
            kind, secret = self._behind(match)
            return secret if kind is None else self.placeholder(kind, secret)

        return _MARK.sub(placeholder, work)

    # -- rules ---------------------------------------------------------------------------------------------------

    def _names(self, work: str) -> str:
        # A letter may match another that `lower` does not make of it: a long s is an s.
        names = rf"(?i)(?<![A-Za-z0-9])(?:{_any_of(self._words)})(?![A-Za-z0-9])"
        return re.sub(names, lambda m: self._mark(self._words.get(m[0].lower(), "user"), m[0].lower()), work)

    def _environments(self, work: str) -> str:
        if "\x00" in work and any(_ENTRY.match(piece) for piece in work.split("\x00")):
            return self._mark("environment", work)
        if len(_ENTRIES.findall(work)) >= 3:
            work = _ENTRIES.sub(lambda m: m[1] + self._mark("environment", m[2]), work)

        def replaced(match: re.Match[str]) -> str:
            name, value = match["name"] or "", match["value"] or ""
            quoted = value[:1] == '"' and name.isupper() and len(name) > 1
            certain = match["export"] or quoted or not name or _VARIABLE.fullmatch(name)
            return self._mark("environment", match[0]) if certain else match[0]

        return _ENVIRONMENT.sub(replaced, work)

    def _assigned(self, work: str) -> str:
        out, at = [], 0
        for match in _ASSIGNED.finditer(work) if ":" in work or "=" in work else ():
            when = _by_name(match["name"], match["sign"])
            value = _VALUE.match(work, match.end())
            if when is None or value is None or match.start() < at:
                continue
            inner = _unquoted(value[0])
            if not _is_replaceable(inner) or not when(inner):
                continue
            quote = value[0][: (len(value[0]) - len(inner)) // 2]
            out += [work[at : match.end()], quote, self._mark("secret", inner), quote]
            at = value.end()
        return "".join([*out, work[at:]])

    def _paths(self, work: str) -> str:
        for pattern, signs in _PATHS.items():
            if any(sign in work for sign in signs):
                work = pattern.sub(lambda match: self._shortened(match[0], free=True), work)
        return work

    def _shortened(self, given: str, *, free: bool) -> str:
        """Shorten a path; `free`: found in a text, where what looks like one may be a name in a model."""
        parts = [part for part in re.split(r"[/\\]+", given) if part]
        if not parts or given == "~" or _MARK.search(parts[0]) or _SYSTEM_PATH.match(given):
            return given
        system = _SYSTEM.fullmatch(parts[0]) and "home" not in parts and parts[:2] != ["dev", "shm"]
        named = {"/": system or (free and not self._leads_to_people(given, parts)), "~": free and len(parts) == 1}
        if named.get(given[0]):
            return given
        library = _INDUCTOR.search(given) or _LIBRARY.search(given)
        if library:
            cut = library.start()
        elif len(parts) > 1 and given[-1] not in "/\\" and _FILE.fullmatch(parts[-1]):
            cut = len(given) - len(parts[-1])
        else:
            cut = len(given.rstrip("/\\"))
            return self._mark("path", given[:cut]) + given[cut:][-1:]
        slash = "\\" if "\\" in given else "/"
        return self._mark("path", given[:cut].rstrip("/\\")) + slash + _INDUCTOR.sub(r"\1\2", given[cut:], count=1)

    def _leads_to_people(self, given: str, parts: list[str]) -> bool:
        return bool(
            f"{given}/".startswith(tuple(f"{root}/" for root in self._roots))
            or (_ROOTS.fullmatch(parts[0]) and (len(parts) > 1 or given.endswith("/")))
            or not {"home", "Users", "site-packages", "dist-packages"}.isdisjoint(parts[:-1])
            or (len(parts) > 1 and _FILE.fullmatch(parts[-1]))
        )


def _any_of(known: Iterable[str]) -> str:
    """A pattern that finds texts, the longest first."""
    return "|".join(re.escape(text) for text in sorted(known, key=lambda text: (-len(text), text)))


def _has(*signs: str) -> Callable[[Scrubber, str, str], bool]:
    return lambda _, value, __: any(sign in value for sign in signs)


def _marking(
    form: str, kind: Kind = "secret", when: Callable[[str, str], bool] = lambda *_: True
) -> Callable[[Scrubber, str], str]:
    """A rule that marks what a pattern finds: its groups, which are named by their kinds, or all of it.

    `when` is asked of a whole text that was found, and of what stands before it.
    """
    pattern = re.compile(form)

    def rule(scrubber: Scrubber, work: str) -> str:
        def whole(match: re.Match[str]) -> str:
            found = when(match[0], work[max(0, match.start() - 30) : match.start()])
            return scrubber._mark(kind, match[0]) if found else match[0]

        def groups(match: re.Match[str]) -> str:
            out, at = "", match.start()
            for name in (name for name in pattern.groupindex if match[name] is not None):
                inner = _unquoted(match[name])
                if not _is_replaceable(inner) or not when(inner, ""):
                    return match[0]
                cut, named = match.start(name) + (len(match[name]) - len(inner)) // 2, cast("Kind", name.rstrip("2"))
                out += work[at:cut] + scrubber._mark(named, inner if named == "secret" else inner.lower())
                at = cut + len(inner)
            return out + work[at : match.end()]

        return pattern.sub(groups if pattern.groupindex else whole, work)

    return rule


def _is_replaceable(value: str) -> bool:
    return bool(value) and not _MARK.search(value) and value.lower() not in _NOTHING


def _may_be_assigned(_: Scrubber, value: str, lower: str) -> bool:
    return ("=" in value or ":" in value or "-" in value or "bearer" in lower) and any(n in lower for n in _NAME_HINTS)


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] in "\"'" and value[-1] == value[0] else value


def _by_name(name: str, sign: str) -> Callable[[str], bool] | None:
    """Which values of a name are secrets; None if none is."""
    if _STRONG.fullmatch(name):
        return bool
    if not _WEAK.fullmatch(name):
        return None
    return _no_number if (name.isupper() and "=" in sign) or name.lower() == "pwd" else _secretive


def _no_number(value: str, _: str = "") -> bool:
    return not _NUMBER.fullmatch(value)


def _secretive(value: str) -> bool:
    """Whether a value looks like random characters: not a number, a word, or words and a number."""
    if len(value) < 8 or not re.fullmatch(r"[A-Za-z0-9+/_=.~%$!*\-]+", value) or _NUMBER.fullmatch(value):
        return False
    kinds = re.findall(r"[A-Za-z]+|\d+", value)
    changes = sum(a[0].isdigit() != b[0].isdigit() for a, b in itertools.pairwise(kinds))
    mixed = len(value) >= 20 and "_" not in value and any(re.search("[a-z][A-Z]+[a-z]", kind) for kind in kinds)
    return changes >= 3 or (changes > 0 and len(value) >= 16) or mixed


#: Which texts a rule may find something in, and the rule. In this order: what is known comes first, and what is part of
#: something longer after it.
_RULES: tuple[tuple[Callable[[Scrubber, str, str], bool], Callable[[Scrubber, str], str]], ...] = (
    # Credentials: those that were learnt, and those of a known form.
    (
        lambda s, value, _: any(secret in value for secret in s._literal),
        lambda s, work: re.sub(_any_of(s._literal), lambda m: s._mark("secret", m[0]), work),
    ),
    (
        _has("PRIVATE KEY"),
        _marking(
            r"(?s)-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:.{0,20000}?-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
            r"|(?:[A-Za-z0-9+/=:,.\-\s\\]|\\[nr])*)"
        ),
    ),
    (lambda _, value, __: "=" in value and re.search(r"[A-Za-z0-9_)%]=", value) is not None, Scrubber._environments),
    (_has("://"), _marking(r"\b[A-Za-z][A-Za-z0-9+.\-]{0,20}://(?P<secret>[^\s/@\"'<>?#]+)(?=@)")),
    (
        _has(".com/", "telegram.org/"),
        _marking(
            r"(?:hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks|api\.telegram\.org"
            r"|webhook\.office\.com)/(?P<secret>[^\s\"'<>]+)"
        ),
    ),
    (
        _has(*_TOKEN_HINTS),
        _marking(rf"(?<![A-Za-z0-9])(?:{'|'.join(form for _, form in _TOKENS)})(?![A-Za-z0-9])"),
    ),
    # What a name says.
    (
        _may_be_assigned,
        _marking(
            r"(?i)\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token|digest|negotiate|"
            r"aws4-hmac-sha256)\s+)?(?P<secret>[^\s\"'][^\"'\r\n\x00]*)"
        ),
    ),
    (_may_be_assigned, _marking(r"(?i)\b(?:set-)?cookie\s*:\s*(?P<secret>\S[^\"'\r\n\x00]*)")),
    (_may_be_assigned, Scrubber._assigned),
    (_may_be_assigned, _marking(_FLAG, when=_no_number)),
    (
        _may_be_assigned,
        _marking(
            r"\b[Bb](?:earer|EARER)\s+(?P<secret>[A-Za-z0-9._~+/\-]{8,}=*)",
            when=lambda word, _: len(word) >= 16 or any(map(str.isdigit, word)),
        ),
    ),
    # People, and more of their credentials.
    (
        _has("@"),
        _marking(
            r"(?<![\w.+\-])[A-Za-z0-9][\w.+\-]*@"
            r"[A-Za-z0-9][A-Za-z0-9\-]*(?:\.[A-Za-z0-9\-]+)*\.[A-Za-z]{2,24}(?![\w\-])",
            "email",
        ),
    ),
    (
        _has("@"),
        _marking(
            r"(?<![\w.@\-])(?P<user>[A-Za-z_][\w.\-]*)@(?P<host>[A-Za-z0-9][\w.\-]*)"
            r"(?=:(?:[~/]|\d{1,5}\b)|:?\s?[~#$](?:\s|$))"
            r"|(?<=\bssh )(?P<user2>[A-Za-z_][\w.\-]*)@(?P<host2>[A-Za-z0-9][\w.\-]*)"
        ),
    ),
    (_has("-u", "--login"), _marking(_USER_FLAG)),
    (_has("sshpass"), _marking(r"\bsshpass\s+-p\s*(?P<secret>\"[^\"]*\"|'[^']*'|\S+)")),
    # A key of Weights & Biases (and an old one of GitHub) is 40 hexadecimal digits and nothing else. So is a commit.
    # Arguments of templates are not looked at.
    (
        lambda _, value, __: len(value) >= 40 and "<" not in value and "::" not in value,
        _marking(
            r"(?:^|(?<=[\s\"'=:,;(]))[0-9a-f]{40}(?=$|[\s\"',;)])", when=lambda _, before: not _COMMIT.search(before)
        ),
    ),
    (_has("/", "\\"), Scrubber._paths),
    # Machines.
    (
        _has("."),
        _marking(
            rf"(?<![\w.\-])(?:{_OCTET}\.){{3}}{_OCTET}(?![\w\-]|\.\w)",
            "address",
            lambda ip, before: (
                not (re.fullmatch(r"0\.0\.0\.0|127\.0\.[01]\.1|255(?:\.255){3}", ip) or _VERSION.search(before))
            ),
        ),
    ),
    (
        lambda _, value, __: value.count(":") >= 2,
        _marking(r"(?<![\w:])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![\w:])", "address"),
    ),
    (
        lambda _, value, __: value.count(":") >= 2,
        _marking(
            r"(?i)(?<![\w:])(?:(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|fe80::[0-9a-f:]+"
            r"|f[cd][0-9a-f]{2}:[0-9a-f]{1,4}:[0-9a-f:]+|2[0-9a-f]{3}:(?:[0-9a-f]{1,4}:){1,6}:[0-9a-f:]*)(?![\w:])",
            "address",
        ),
    ),
    (
        lambda _, value, __: value.count(".") >= 2 or "ip-" in value,
        _marking(
            r"(?<![\w.@/\-])(?:ip-\d{1,3}(?:-\d{1,3}){3}(?:\.[a-z0-9\-]+)*"
            r"|[a-z][a-z0-9\-]{0,60}(?:-[a-z0-9]{1,60}|\d)\.(?:[a-z0-9\-]{1,60}\.){1,8}"
            r"(?:com|org|edu|gov|internal|intranet|corp|lan|localdomain)"
            r"|[a-z0-9][a-z0-9\-]{0,60}\.(?:[a-z0-9\-]{1,60}\.){0,8}svc\.cluster\.local)(?![\w\-]|\.\w)",
            "host",
        ),
    ),
    (lambda s, _, lower: any(word in lower for word in s._words), Scrubber._names),
)


def json_text(scrubber: Scrubber, text: str) -> str:
    """Scrub a text that may be JSON: as JSON if it is, as text if not.

    Parameters
    ----------
    scrubber : Scrubber
    text : str

    Returns
    -------
    str
        The same object when nothing had to go.
    """
    if text[:1] not in ("{", "[") or '"' not in text:
        return scrubber.text(text)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return scrubber.text(text)
    clean = scrubber.value(found)
    return text if clean == found else json.dumps(clean, ensure_ascii=False, separators=(",", ":"))


class Ledger:
    """A scrubber that counts what it removes by place.

    Attributes
    ----------
    scrubber : Scrubber
        One that knows this machine.
    removed : Counter of (str, str)
        How often, by kind and place.
    """

    def __init__(self) -> None:
        self.scrubber = Scrubber()
        self.removed: Counter[tuple[str, str]] = Counter()
        self._once = functools.lru_cache(maxsize=100_000)(self._cleaned)  # each distinct text is cleaned once

    def note(self, kind: str, *names: str, count: int = 1) -> None:
        """Count something that was left out, by its name in the file, which may itself hold a secret."""
        self.removed[kind, ".".join(self._once(Scrubber.text, name)[0][:100] for name in names)] += count

    def text(self, value: str, place: str) -> str:
        """Scrub a text, as JSON where it is JSON."""
        return self.apply(json_text, place, value)  # type: ignore[no-any-return]

    def value(self, given: Any, place: str) -> Any:
        """Scrub a JSON value."""
        new, kinds = self._cleaned(Scrubber.value, given)
        self.removed.update((kind, place) for kind in kinds)
        return new

    def apply(self, clean: Callable[..., Any], place: str, *given: Any) -> Any:
        """Give ``clean(scrubber, *given)``, and count what went from a place."""
        new, kinds = self._once(clean, *given)
        for kind in kinds:  # mostly none
            self.removed[kind, place] += 1
        return new

    def _cleaned(self, clean: Callable[..., Any], *given: Any) -> tuple[Any, list[str]]:
        self.scrubber.removed.clear()
        new = clean(self.scrubber, *given)
        return new, self.scrubber.removed.copy()
