"""Recognise in text what identifies a person or a machine, or opens a door, and put a placeholder in its place.

One :class:`Scrubber` reads one file: the same secret gets the same placeholder wherever it stands, and two secrets
never get the same one, so that names that differed still differ. Placeholders are numbered in the order in which their
secrets are met; the first of a kind has no number: ``[path]``, ``[path 2]``.

Three things are recognised: what has a known form (keys of providers, private keys, credentials in URLs, home folders,
addresses), what stands behind a name that says so (``password=``, ``--token``, ``"hostname":``), and what the file or
this machine says about itself (:meth:`Scrubber.learn`): no pattern knows that ``orion`` is a host. Each rule says where
in a text something has to go; what overlaps goes as one.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from nsightkit.hardware import GPUS

__all__ = ["PLACEHOLDER", "Kind", "Ledger", "Scrubber"]

Kind = Literal["environment", "secret", "path", "host", "user", "email", "address"]
#: From where to where in a text something has to go, and what it is; nothing stands for what is of no kind.
_Span: TypeAlias = tuple[int, int, str]

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

#: What the value under a JSON key or of a variable is, by its name in small letters.
_KEY_NAMES: dict[Kind, str] = {
    "host": "host hostname host_name nodename node_name computername computer_name machine_name fqdn export_host "
    "device_display_name userdomain slurmd_nodename slurm_submit_host slurm_launch_node_ipaddr pbs_o_host lsb_hosts "
    "container_name pod_name master_addr k8s_node_name",
    "user": "user username user_name login logname login_name userid owner author export_user sudo_user slurm_job_user "
    "slurm_job_account pbs_o_logname nb_user jupyterhub_user lsfuser",
    "environment": "env environ environment envs envvars env_vars environment_variables os.environ",
    "secret": "authorization proxy-authorization cookie set-cookie jwt psk",
    "path": "cwd pwd home workdir working_dir working_directory tracename userprofile oldpwd slurm_submit_dir "
    "virtual_env conda_prefix tmpdir",
}
_KEYS = {name: kind for kind, names in _KEY_NAMES.items() for name in names.split()}
#: Names in capitals whose values are secrets wherever they stand.
_SECRET_VARIABLE = re.compile(
    r".*(?:TOKEN(?!S|IZER)|SECRET|PASSW|PASSPHRASE|API_?KEY|ACCESS_?KEY|CREDENTIAL|PRIVATE|JWT|COOKIE).*"
    r"|.*_(?:KEY|PAT|PSK|DSN)"
)

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

# ---------------------------------------------------------------- paths

_PATH_LIKE = re.compile(r"/[^/]|[A-Za-z]:[\\/]|\\\\|~[\w.\-]*/")
_STOP = r"\s/\"'`<>|;:,()\[\]{}=&?*#\x00\\"
#: What a path looks like in a text, and what stands in every text that has one.
_PATHS: dict[re.Pattern[str], tuple[str, ...]] = {
    re.compile(
        rf"(?:(?<=file://)|(?<=-[IL])|(?<=[^\w./~\])}}\-])|^)"
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
_INDUCTOR = re.compile(r"torchinductor_([^/\\]*)[/\\]")

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
        self._known: dict[str, Kind] = {}  # what was learnt, in small letters
        self._roots: set[str] = set()  # folders, as they stand
        self._harmless: set[str] = set()  # texts with nothing in them, whatever digits they have
        asked: dict[str, Callable[[], str]] = {
            "hostname": socket.gethostname, "user": getpass.getuser, "home": lambda: str(Path.home()),
        }  # fmt: skip
        for key, ask in asked.items() if machine else ():
            with contextlib.suppress(KeyError, OSError, ImportError, RuntimeError):  # some containers have no such user
                self.learn(ask(), key)
        self.learn(os.environ if machine else {}, "environ")

    def learn(self, given: Any, key: str = "") -> None:
        """Learn who and where it was, and secrets, which are then found wherever they stand.

        Parameters
        ----------
        given : JSON value
            Of a text, the users whose home folders it names are learnt, and of an environment all that tells.
        key : str
            The key it stands under, or the variable that it is the value of: ``hostname``, ``LOGNAME``, ``env``. Of a
            host also the part before the first dot is learnt. A path is a folder: all below it is one. Common words and
            short ones are not learnt: they also occur as ordinary words.
        """
        kind = _KEYS.get(key.lower())
        if isinstance(given, Mapping):
            for name, item in given.items():
                self.learn(item, str(name).upper() if kind == "environment" else str(name))
        elif isinstance(given, list | tuple):
            for item in given:
                self.learn(item, key)
        if not isinstance(given, str):
            return
        if (key.isupper() and _SECRET_VARIABLE.fullmatch(key)) or _STRONG.fullmatch(key):
            kind = "secret"
        if kind is not None:
            self._know(kind, given.strip().strip("\"'"))
        for name in _HOME.findall(given):
            self._know("user", name)
        for entry in given.split("\x00") if "\x00" in given or kind == "environment" else ():
            name, found, value = entry.partition("=")
            self.learn(value if found else None, name.strip().removeprefix("export ").upper())

    def _know(self, kind: Kind, text: str) -> None:
        if not text or kind == "environment" or PLACEHOLDER.search(text) or "[scrubbed]" in text:
            return
        self._harmless.clear()
        if kind == "path":
            if text.startswith("/") and text.count("/") >= 2 and not _SYSTEM.fullmatch(text.split("/")[1]):
                self._roots.add(text.rstrip("/"))
            return
        for word in {text.lower(), text.partition(".")[0].lower() if kind == "host" else text.lower()}:
            usual = word in _COMMON or _PLAIN_WORD.fullmatch(word) or (kind != "secret" and word in _CARDS)
            unfit = (word[:1] == "/" or _NUMBER.fullmatch(word)) if kind == "secret" else " " in word
            if len(word) >= (6 if kind == "secret" else 4) and not (usual or unfit):
                self._known.setdefault(word, kind)

    # -- replacing -----------------------------------------------------------------------------------------------

    def placeholder(self, kind: str, secret: str) -> str:
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
        key = (kind, secret if kind in ("secret", "path", "environment") else secret.lower())
        if key not in self._numbers:
            taken = self._taken[kind]
            number = next(n for n in itertools.count(len(taken) + 1) if n not in taken)
            taken.add(number)
            self._numbers[key] = f"[{kind}]" if number == 1 else f"[{kind} {number}]"
        return self._numbers[key]

    def text(self, value: str) -> str:
        """Replace every secret in a text, which may be JSON.

        Parameters
        ----------
        value : str

        Returns
        -------
        str
            The same object when it holds none.
        """
        if value[:1] in ("{", "[") and '"' in value:
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(value)
                clean = self.value(found)
                return value if clean == found else json.dumps(clean, ensure_ascii=False, separators=(",", ":"))
        skeleton, lower = value.translate(_SKELETON), value.lower()
        if skeleton in self._harmless and not any(text in lower for text in self._known):
            return value
        spans = [span for may, rule in _RULES if may(self, value, lower) for span in rule(self, value)]
        if spans or PLACEHOLDER.search(value):
            return self._replaced(value, spans)
        if not (any(hint in value for hint in _TOKEN_HINTS) or _FOUR.search(value)):
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
        spelt = _PATH_LIKE.match(value) and "\x00" not in value
        return self.text(self._replaced(value, self._folders(value, free=False)) if spelt else value)

    def _replaced(self, value: str, spans: Iterable[_Span]) -> str:
        """Put placeholders where something has to go; what was scrubbed before stays as it is."""
        earlier = list(PLACEHOLDER.finditer(value))
        for match in earlier:
            self._taken[match[1]].add(int(match[2] or 1))
        merged: list[_Span] = []
        for start, end, kind in sorted([*spans, *((*m.span(), "") for m in earlier)], key=lambda s: (s[0], -s[1])):
            if merged and start < merged[-1][1]:
                first, last, other = merged[-1]
                merged[-1] = first, max(last, end), other or kind
            else:
                merged.append((start, end, kind))
        out, at = [], 0
        for start, end, kind in merged:
            found = value[start:end]
            stays = PLACEHOLDER.fullmatch(found)
            out += [value[at:start], found if stays else self.placeholder(kind, found) if kind else ""]
            at = end
        return "".join([*out, value[at:]])

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
            return self.placeholder(kind, text)
        commit = re.fullmatch(r"(?i).*(?:commit|revision|sha\d*|hash|digest|version)|key", key)
        plain = commit and re.fullmatch(r"[0-9a-f]{40}|[\d.]+", text)
        return text if plain else self.text(text)

    def _argument(self, flag: Any, word: Any) -> Any:
        """Give a command line's word, or a placeholder if the word before it says that it is a secret or a user."""
        told = isinstance(flag, str) and isinstance(word, str) and flag.startswith("-")
        if not told or word[:1] in ("", "-") or _NUMBER.fullmatch(word) or PLACEHOLDER.search(word):
            return word
        if re.fullmatch(_FLAG, f"{flag} x") or (":" in word and re.fullmatch(_USER_FLAG, f"{flag} x:x")):
            return self.placeholder("secret", word)
        return self.placeholder("user", word) if re.fullmatch(_USER_FLAG, f"{flag} x") else word

    # -- rules that know what was learnt -------------------------------------------------------------------------

    def _learnt(self, text: str) -> Iterator[_Span]:
        # A short word is part of other words as well.
        parts = {known for known, kind in self._known.items() if kind == "secret" and not _is_word(known)}
        words, rest = (
            sorted(map(re.escape, some), key=len, reverse=True) for some in (self._known.keys() - parts, parts)
        )
        forms = [rf"(?<![A-Za-z0-9])(?:{'|'.join(words)})(?![A-Za-z0-9])", *rest][not words :]
        for match in re.finditer(f"(?i){'|'.join(forms)}", text):
            # A letter may match another that `lower` does not make of it: a long s is an s.
            yield *match.span(), self._known.get(match[0].lower(), "user")

    def _paths(self, text: str) -> Iterator[_Span]:
        for pattern, signs in _PATHS.items():
            for match in pattern.finditer(text) if any(sign in text for sign in signs) else ():
                for start, end, kind in self._folders(match[0], free=True):
                    yield match.start() + start, match.start() + end, kind

    def _folders(self, given: str, *, free: bool) -> Iterator[_Span]:
        """What goes of a path; `free`: found in a text, where what looks like one may be a name in a model."""
        parts = [part for part in re.split(r"[/\\]+", given) if part]
        if not parts or given == "~" or _SYSTEM_PATH.match(given):
            return
        system = _SYSTEM.fullmatch(parts[0]) and "home" not in parts and parts[:2] != ["dev", "shm"]
        named = {"/": system or (free and not self._leads_to_people(given, parts)), "~": free and len(parts) == 1}
        if named.get(given[0]):
            return
        compiled = _INDUCTOR.search(given)
        cut = len(given)
        if library := compiled or _LIBRARY.search(given):
            cut = library.start()
        elif len(parts) > 1 and given[-1] not in "/\\" and _FILE.fullmatch(parts[-1]):
            cut -= len(parts[-1])
        yield 0, len(given[:cut].rstrip("/\\")), "path"
        if compiled:
            yield *compiled.span(1), ""

    def _leads_to_people(self, given: str, parts: list[str]) -> bool:
        return bool(
            f"{given}/".startswith(tuple(f"{root}/" for root in self._roots))
            or (_ROOTS.fullmatch(parts[0]) and (len(parts) > 1 or given.endswith("/")))
            or not {"home", "Users", "site-packages", "dist-packages"}.isdisjoint(parts[:-1])
            or (len(parts) > 1 and _FILE.fullmatch(parts[-1]))
        )


_Rule: TypeAlias = Callable[[Scrubber, str], Iterable[_Span]]


def _environments(_: Scrubber, text: str) -> Iterator[_Span]:
    if "\x00" in text and any(_ENTRY.match(piece) for piece in text.split("\x00")):
        yield 0, len(text), "environment"
    entries = [match.span(2) for match in _ENTRIES.finditer(text)]
    for span in entries if len(entries) >= 3 else ():
        yield *span, "environment"
    for match in _ENVIRONMENT.finditer(text):
        name, value = match["name"] or "", match["value"] or ""
        quoted = value[:1] == '"' and name.isupper() and len(name) > 1
        if match["export"] or quoted or not name or _VARIABLE.fullmatch(name):
            yield *match.span(), "environment"


def _assigned(_: Scrubber, text: str) -> Iterator[_Span]:
    for match in _ASSIGNED.finditer(text):
        when, value = _by_name(match["name"], match["sign"]), _VALUE.match(text, match.end())
        if when is not None and value is not None:
            yield from (span for span in _inner(text, value.span(), "secret") if when(text[span[0] : span[1]]))


def _has(*signs: str) -> Callable[[Scrubber, str, str], bool]:
    return lambda _, value, __: any(sign in value for sign in signs)


def _form(pattern: str, kind: Kind = "secret", when: Callable[[str, str], bool] = lambda *_: True) -> _Rule:
    """A rule of what a pattern finds: its groups, which are named by their kinds, or all of it.

    `when` is asked of a text that was found, and of what stands before it.
    """
    compiled = re.compile(pattern)

    def rule(_: Scrubber, text: str) -> Iterator[_Span]:
        for match in compiled.finditer(text):
            for name in compiled.groupindex or (0,):
                yield from _inner(text, match.span(name), name.rstrip("2") if isinstance(name, str) else kind, when)

    return rule


def _inner(
    text: str, span: tuple[int, int], kind: str, when: Callable[[str, str], bool] = lambda *_: True
) -> Iterator[_Span]:
    """What was found, without its quotes, if there is something in it."""
    start, end = span
    if end - start > 1 and text[start] in "\"'" and text[end - 1] == text[start]:
        start, end = start + 1, end - 1
    if (
        start < end
        and text[start:end].lower() not in _NOTHING
        and when(text[start:end], text[max(0, start - 30) : start])
    ):
        yield start, end, kind


def _is_word(text: str) -> bool:
    return text.isalpha() and len(text) < 12


def _may_be_assigned(_: Scrubber, value: str, lower: str) -> bool:
    return ("=" in value or ":" in value or "-" in value or "bearer" in lower) and any(n in lower for n in _NAME_HINTS)


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


#: Which texts a rule may find something in, and the rule.
_RULES: tuple[tuple[Callable[[Scrubber, str, str], bool], _Rule], ...] = (
    (lambda s, _, lower: any(text in lower for text in s._known), Scrubber._learnt),
    # Credentials of a known form.
    (
        _has("PRIVATE KEY"),
        _form(
            r"(?s)-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:.{0,20000}?-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
            r"|(?:[A-Za-z0-9+/=:,.\-\s\\]|\\[nr])*)"
        ),
    ),
    (lambda _, value, __: "=" in value and re.search(r"[A-Za-z0-9_)%]=", value) is not None, _environments),
    (_has("://"), _form(r"\b[A-Za-z][A-Za-z0-9+.\-]{0,20}://(?P<secret>[^\s/@\"'<>?#]+)(?=@)")),
    (
        _has(".com/", "telegram.org/"),
        _form(
            r"(?:hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks|api\.telegram\.org"
            r"|webhook\.office\.com)/(?P<secret>[^\s\"'<>]+)"
        ),
    ),
    (
        _has(*_TOKEN_HINTS),
        _form(rf"(?<![A-Za-z0-9])(?:{'|'.join(form for _, form in _TOKENS)})(?![A-Za-z0-9])"),
    ),
    # What a name says.
    (
        _may_be_assigned,
        _form(
            r"(?i)\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token|digest|negotiate|"
            r"aws4-hmac-sha256)\s+)?(?P<secret>[^\s\"'][^\"'\r\n\x00]*)"
        ),
    ),
    (_may_be_assigned, _form(r"(?i)\b(?:set-)?cookie\s*:\s*(?P<secret>\S[^\"'\r\n\x00]*)")),
    (_may_be_assigned, _assigned),
    (_may_be_assigned, _form(_FLAG, when=_no_number)),
    (
        _may_be_assigned,
        _form(
            r"\b[Bb](?:earer|EARER)\s+(?P<secret>[A-Za-z0-9._~+/\-]{8,}=*)",
            when=lambda word, _: len(word) >= 16 or any(map(str.isdigit, word)),
        ),
    ),
    # People, and more of their credentials.
    (
        _has("@"),
        _form(
            r"(?<![\w.+\-])[A-Za-z0-9][\w.+\-]*@"
            r"[A-Za-z0-9][A-Za-z0-9\-]*(?:\.[A-Za-z0-9\-]+)*\.[A-Za-z]{2,24}(?![\w\-])",
            "email",
        ),
    ),
    (
        _has("@"),
        _form(
            r"(?<![\w.@\-])(?P<user>[A-Za-z_][\w.\-]*)@(?P<host>[A-Za-z0-9][\w.\-]*)"
            r"(?=:(?:[~/]|\d{1,5}\b)|:?\s?[~#$](?:\s|$))"
            r"|(?<=\bssh )(?P<user2>[A-Za-z_][\w.\-]*)@(?P<host2>[A-Za-z0-9][\w.\-]*)"
        ),
    ),
    (_has("-u", "--login"), _form(_USER_FLAG)),
    (_has("sshpass"), _form(r"\bsshpass\s+-p\s*(?P<secret>\"[^\"]*\"|'[^']*'|\S+)")),
    # A key of Weights & Biases (and an old one of GitHub) is 40 hexadecimal digits and nothing else. So is a commit.
    # Arguments of templates are not looked at.
    (
        lambda _, value, __: len(value) >= 40 and "<" not in value and "::" not in value,
        _form(
            r"(?:^|(?<=[\s\"'=:,;(]))[0-9a-f]{40}(?=$|[\s\"',;)])", when=lambda _, before: not _COMMIT.search(before)
        ),
    ),
    (_has("/", "\\"), Scrubber._paths),
    # Machines.
    (
        _has("."),
        _form(
            rf"(?<![\w.\-])(?:{_OCTET}\.){{3}}{_OCTET}(?![\w\-]|\.\w)",
            "address",
            lambda ip, before: (
                not (re.fullmatch(r"0\.0\.0\.0|127\.0\.[01]\.1|255(?:\.255){3}", ip) or _VERSION.search(before))
            ),
        ),
    ),
    (
        lambda _, value, __: value.count(":") >= 2,
        _form(r"(?<![\w:])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![\w:])", "address"),
    ),
    (
        lambda _, value, __: value.count(":") >= 2,
        _form(
            r"(?i)(?<![\w:])(?:(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|fe80::[0-9a-f:]+"
            r"|f[cd][0-9a-f]{2}:[0-9a-f]{1,4}:[0-9a-f:]+|2[0-9a-f]{3}:(?:[0-9a-f]{1,4}:){1,6}:[0-9a-f:]*)(?![\w:])",
            "address",
        ),
    ),
    (
        lambda _, value, __: value.count(".") >= 2 or "ip-" in value,
        _form(
            r"(?<![\w.@/\-])(?:ip-\d{1,3}(?:-\d{1,3}){3}(?:\.[a-z0-9\-]+)*"
            r"|[a-z][a-z0-9\-]{0,60}(?:-[a-z0-9]{1,60}|\d)\.(?:[a-z0-9\-]{1,60}\.){1,8}"
            r"(?:com|org|edu|gov|internal|intranet|corp|lan|localdomain)"
            r"|[a-z0-9][a-z0-9\-]{0,60}\.(?:[a-z0-9\-]{1,60}\.){0,8}svc\.cluster\.local)(?![\w\-]|\.\w)",
            "host",
        ),
    ),
)


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
