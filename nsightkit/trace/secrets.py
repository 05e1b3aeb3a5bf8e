"""Recognise in text what identifies a person or a machine, or opens a door, and put a placeholder in its place.

One :class:`Scrubber` reads one file: the same secret gets the same placeholder wherever it stands, and two secrets never
get the same one, so that names that differed still differ. Placeholders are numbered in the order in which their
secrets are met; the first of a kind has no number: ``[path]``, ``[path 2]``.

Three things are recognised: what has a known form (keys of providers, private keys, credentials in URLs, home folders,
addresses), what stands behind a name that says so (``password=``, ``--token``, ``"hostname":``), and what the file or
this machine says about itself (:meth:`Scrubber.learn`): no pattern knows that ``orion`` is a host.

Names of kernels, operators and calls hold paths' slashes (``/layer1/Conv``), long hexadecimal numbers, ``@`` and ``=``
that are none of this. Each rule here is as narrow as that takes.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

__all__ = ["ENVIRONMENT_KEYS", "HOST_KEYS", "PLACEHOLDER", "SECRET_KEYS", "USER_KEYS", "Kind", "Scrubber"]

Kind = Literal["environment", "secret", "path", "host", "user", "email", "address"]

#: What stands in the place of what was removed.
PLACEHOLDER = re.compile(r"\[(environment|secret|path|host|user|email|address)(?: (\d+))?\]")

# ---------------------------------------------------------------- credentials of a known form

#: Prefixes and lengths are those the providers document, a little looser: a key that lost its end is still a key.
_TOKENS = (
    r"(?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA|ANVA|AIPA|ABIA|ACCA)[A-Z0-9]{16}",  # AWS
    r"AIza[\w\-]{30,}",  # Google API key
    r"ya29\.[\w\-.]{20,}",  # Google OAuth
    r"GOCSPX-[\w\-]{20,}",
    r"1//0[\w\-]{30,}",  # Google refresh token
    r"[\w~.\-]{3}[78]Q~[\w~.\-]{31,34}",  # Azure client secret
    r"[A-Za-z0-9+/]{86}==",  # Azure storage key
    r"gh[pousr]_[A-Za-z0-9]{30,}",  # GitHub
    r"github_pat_\w{22,}",
    r"gl(?:pat|oas|dt|rt|cbt|ptt|ft|imt|agent|soat|ffct)-[\w\-.]{16,}",  # GitLab
    r"(?:hf|api_org)_[A-Za-z]\w{28,}",  # Hugging Face
    r"sk-(?:proj-|svcacct-|admin-|ant-|or-|lf-)?[A-Za-z0-9][\w\-]{18,}",  # OpenAI, Anthropic, others
    r"(?:gsk|r8|pplx|rpa|csk|fw|tvly|lsv2_pt|lsv2_sk|e2b)[_\-][A-Za-z0-9]{30,}",  # Groq, Replicate, RunPod, …
    r"xai-[A-Za-z0-9]{40,}",
    r"nvapi-[\w\-]{20,}",  # NVIDIA
    r"xox[abeoprs](?:\.xox[bp])?-[\w\-]{10,}",  # Slack
    r"xapp-\d-[\w\-]{10,}",
    r"npm_[A-Za-z0-9]{30,}",
    r"pypi-[\w\-]{16,}",
    r"wandb_v\d_\w{20,}",
    r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",  # Stripe
    r"whsec_[A-Za-z0-9+/]{20,}",
    r"SG\.[\w\-]{16,}\.[\w\-]{16,}",  # SendGrid
    r"key-[0-9a-f]{32}",  # Mailgun
    r"dapi[0-9a-f]{32}",  # Databricks
    r"do[oprt]_v1_[0-9a-f]{64}",  # DigitalOcean
    r"hv[sbr]\.[\w\-]{20,}",  # Vault
    r"dckr_[po]at_[\w\-]{20,}",  # Docker
    r"dp\.(?:pt|st|ct|sa|scim|audit)\.[\w.\-]{20,}",  # Doppler
    r"gl(?:sa|c)_[\w+/=]{30,}",  # Grafana
    r"lin_api_\w{30,}",
    r"ATATT3[\w\-=]{40,}",  # Atlassian
    r"tskey-[a-z]+-[\w\-]{16,}",
    r"(?:secret|ntn)_[A-Za-z0-9]{40,}",  # Notion
    r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",
    r"pul-[0-9a-f]{40}",
    r"CCIPAT_\w{20,}",
    r"\d{8,10}:AA[\w\-]{30,}",  # Telegram
    r"AGE-SECRET-KEY-1[0-9A-Z]{50,}",
    r"[A-Za-z0-9]{14}\.atlasv1\.[\w\-=]{40,}",  # Terraform
    r"[MNO][A-Za-z\d]{23,27}\.[\w\-]{6}\.[\w\-]{27,}",  # Discord
    r"eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*",  # JSON web token
    r"ssh-(?:rsa|dss|ed25519)\s+AAAA[A-Za-z0-9+/=]{20,}(?:[ \t]+\S+@\S+)?",
    r"(?:ecdsa|sk-ssh|sk-ecdsa)[\w\-@.]*\s+AAAA[A-Za-z0-9+/=]{20,}(?:[ \t]+\S+@\S+)?",
)
_TOKEN = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_TOKENS)})(?![A-Za-z0-9])")
#: Cheap, and in every text that `_TOKEN` finds something in.
_TOKEN_HINT = re.compile(
    "AKIA|ASIA|ARO|AID|AGPA|ANPA|ANVA|AIP|ABIA|ACCA|AIza|ya29|GOCSPX|1//0|Q~|==|gh[pousr]_|github_pat|gl[a-z]+[-_]"
    "|hf_|api_org|sk-|gsk|r8|pplx|rpa|csk|fw[_-]|tvly|lsv2|e2b|xai-|nvapi|xox|xapp|npm_|pypi-|wandb_v|k_live|k_test"
    "|whsec|SG[.]|key-|dapi|_v1_|hv[sbr][.]|dckr_|dp[.]|lin_api|ATATT3|secret_|ntn_|shp|pul-|CCIPAT|:AA|AGE-SEC"
    "|atlasv1|eyJ|AAAA|[MNO][A-Za-z0-9]{23,27}[.]"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
    r"|(?:[A-Za-z0-9+/=:,.\-\s\\]|\\[nr])*)",
    re.DOTALL,
)
#: A key of Weights & Biases (and an old one of GitHub) is 40 hexadecimal digits and nothing else. So is a commit.
_BARE_HEX = re.compile(r"(?:^|(?<=[\s\"'=:,;(]))[0-9a-f]{40}(?=$|[\s\"',;)])")
_COMMIT = re.compile(r"(?i)(?:commit|rev(?:ision)?|sha1?|git|hash|digest|tree|head|version)\W{0,4}$")

# ---------------------------------------------------------------- what a name says

_SECRET_NAME = (
    r"pass(?:word|wd|phrase|code)|passwd|secret|api[_\-]?key|access[_\-]?key|private[_\-]?key|account[_\-]?key"
    r"|shared[_\-]?(?:access[_\-]?)?key|secret[_\-]?key|(?:en|de)cryption[_\-]?key|signing[_\-]?key|master[_\-]?key"
    r"|credential|(?:auth|access|refresh|id|bearer|session|security|deploy|personal|bot|api)[_\-]?token|client[_\-]?secret"
    r"|_authToken|x-amz-(?:signature|credential|security-token)"
)
_SECRET_TAIL = r"(?:s|[_\-]?(?:id|value|b64|base64|text|string))?"
#: ``name=value``, ``name: value``, ``"name": "value"``. ``--name value`` is `_FLAG`.
_ASSIGNED = re.compile(
    rf"(?i)(?P<quote>[\"']?)(?P<name>[\w.\-]*(?:{_SECRET_NAME}){_SECRET_TAIL})(?P=quote)"
    r"(?P<sign>\s*(?:=>|:=|[:=])\s*)"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s\"',;&|)}\]]+)"
)
#: Names that mean a secret in one place and a word of the trade in another (tokens, keys and queries): `_secretive`
#: decides by the value. In capitals they are variables, and any value but a number is one.
_WEAK = re.compile(
    r"(?P<quote>[\"']?)(?P<name>(?<![A-Za-z0-9])[\w.\-]*(?:(?i:token|auth|jwt|pat|session|cookie|signature|sig)|"
    r"(?i:[_\-]key)|KEY|[Pp]wd|PASS|PSK))(?P=quote)(?P<sign>\s*(?:=>|:=|[:=])\s*)"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s\"',;&|)}\]]+)"
)
_ASSIGNED_HINT = re.compile(r"[:=]")
_NAME_HINT = re.compile(rf"(?i){_SECRET_NAME}|token|auth|jwt|pat|session|cookie|sig|key|pwd|pass|psk")
_FLAG = re.compile(
    rf"(?i)(?P<flag>(?<![\w\-])--?(?:[\w\-]*(?:{_SECRET_NAME}|token|auth|jwt|cookie|[_\-]key|pwd){_SECRET_TAIL}|key))"
    r"(?P<sign>=|\s+|\x00)(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s\"'\x00]+)"
)
_USER_FLAG = re.compile(
    r"(?P<flag>(?<![\w\-])(?:-u|--(?:user(?:name)?|login(?:-name)?)))(?P<sign>=|\s+|\x00)"
    r"(?P<value>[A-Za-z_][\w.\-@\\]*(?::\S+)?)"
)
_SSHPASS = re.compile(r"(?P<flag>\bsshpass\s+-p)(?P<sign>\s*)(?P<value>\"[^\"]*\"|'[^']*'|\S+)")
_HEADER = re.compile(
    r"(?i)(?P<flag>\b(?:proxy-)?authorization)(?P<sign>[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token|digest|negotiate|"
    r"aws4-hmac-sha256)\s+)?)(?P<value>[^\s\"'][^\"'\r\n\x00]*)"
)
_COOKIE = re.compile(r"(?i)(?P<flag>\b(?:set-)?cookie)(?P<sign>\s*:\s*)(?P<value>\S[^\"'\r\n\x00]*)")
_BEARER = re.compile(r"(?P<flag>\b[Bb](?:earer|EARER))(?P<sign>\s+)(?P<value>[A-Za-z0-9._~+/\-]{8,}=*)")
_URL_LOGIN = re.compile(r"(?P<flag>\b[A-Za-z][A-Za-z0-9+.\-]*)(?P<sign>://)(?P<value>[^\s/@\"'<>?#]+)(?=@)")
_WEBHOOK = re.compile(
    r"(?P<flag>hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks|api\.telegram\.org"
    r"|webhook\.office\.com)(?P<sign>/)(?P<value>[^\s\"'<>]+)"
)
#: Values that are no secret whatever their name is.
_NOTHING = frozenset(
    ["", "null", "none", "nil", "true", "false", "yes", "no", "undefined", "unset", "empty", "<unset>", "***", "xxx"]
)
_NUMBER = re.compile(r"[+\-]?(?:0[xX][0-9a-fA-F]+|\d[\d_,]*(?:\.\d*)?(?:[eE][+\-]?\d+)?)(?:[a-zA-Zµ%]{1,3})?")

#: JSON keys, in small letters, whose value says who or where, or opens something, or is an environment.
HOST_KEYS = frozenset(
    ["host", "hostname", "host_name", "nodename", "node_name", "computername", "computer_name", "machine_name", "fqdn"]
)
USER_KEYS = frozenset(["user", "username", "user_name", "login", "logname", "login_name", "userid", "owner", "author"])
ENVIRONMENT_KEYS = frozenset(
    ["env", "environ", "environment", "envs", "envvars", "env_vars", "environment_variables", "os.environ"]
)
SECRET_KEYS = re.compile(
    rf"(?i)[\w.\-]*(?:{_SECRET_NAME}){_SECRET_TAIL}|(?:[\w.\-]*[_\-])?(?:authorization|jwt|cookie|pwd|psk|passwd)|pass"
)
_PATH_KEYS = frozenset(["cwd", "pwd", "home", "workdir", "working_dir", "working_directory", "tracename"])
_COMMIT_KEYS = re.compile(r"(?i).*(?:commit|revision|sha\d*|hash|digest|version)|key")

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
_ENVIRONMENT = re.compile(
    r"(?<![\w.$/\-])(?P<export>(?:export|setenv|declare -x|typeset -x|set)\s+)?"
    r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)="
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s;\"'\x00]*)"
)
_SEPARATED = re.compile(r"(?:^|[;\r\n])\s*(?:export\s+|declare -x )?[A-Z_][A-Z0-9_]*=")
_ENTRIES = re.compile(r"(?:(?<=^)|(?<=[;\r\n]))(\s*)(?:export\s+|declare -x )?([A-Z_][A-Z0-9_]*=[^;\r\n]*)")
_SSH_VALUE = re.compile(r"(?:\s+[0-9a-fA-F:.]+)*")  # SSH_CONNECTION's value has blanks in it

#: Variables that name their host or user, for :meth:`Scrubber.learn_environment`.
_HOST_VARIABLES = re.compile(
    r"HOSTNAME|HOST|COMPUTERNAME|USERDOMAIN|SLURMD_NODENAME|SLURM_SUBMIT_HOST|SLURM_LAUNCH_NODE_IPADDR|PBS_O_HOST"
    r"|LSB_HOSTS|NODENAME|NODE_NAME|CONTAINER_NAME|POD_NAME|MASTER_ADDR|K8S_NODE_NAME"
)
_USER_VARIABLES = re.compile(
    r"USER|LOGNAME|USERNAME|SUDO_USER|SLURM_JOB_USER|SLURM_JOB_ACCOUNT|PBS_O_LOGNAME|NB_USER|JUPYTERHUB_USER|LSFUSER"
)
_SECRET_VARIABLE = re.compile(
    r"(?i)TOKEN(?!S|IZER)|SECRET|PASSW|PASSPHRASE|API_?KEY|ACCESS_?KEY|CREDENTIAL|PRIVATE|_KEY$|_PAT$|_PSK$|_DSN$|JWT|COOKIE"
)

# ---------------------------------------------------------------- paths

_STOP = r"\s/\"'`<>|;:,()\[\]{}=&?*#\x00\\"
_POSIX = re.compile(rf"(?:(?<=file://)|(?<=-[IL])|(?<=[^\w./~\])}}\-])|^)(?:~[A-Za-z][\w.\-]*|~)?(?:/[^{_STOP}]+)+/?")
_ANYWHERE = re.compile(rf"(?:/[^{_STOP}]+)*/(?:home|Users)/[^{_STOP}]+(?:/[^{_STOP}]+)*/?")
_WINDOWS = re.compile(
    r"(?<![A-Za-z0-9])(?:[A-Za-z]:(?P<s>\\{1,2}|/)(?=[^/\\\s])|\\\\(?=[A-Za-z0-9_.\-]+\\))"
    r"(?:[^\\/:*?\"<>|\r\n\x00]+(?:\\{1,2}|/))*[^\\/:*?\"<>|\s\x00,;)(\]\[]*"
)
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
    r"(?:(?:site|dist)-packages[/\\]|lib[/\\]{1,2}python\d[^/\\]*[/\\](?!(?:site|dist)-packages)"
    r"|torch[/\\]{1,2}(?:autograd|cuda|distributed|_dynamo|_functorch|_inductor|nn|optim|utils)[/\\]"
    r"|transformers[/\\]{1,2}(?=[\w./\\]+\.py$))"
)
_INDUCTOR = re.compile(r"(torchinductor_)[^/\\]*([/\\])")

# ---------------------------------------------------------------- people and machines

_EMAIL = re.compile(
    r"(?<![\w.+\-])[A-Za-z0-9][\w.+\-]*@[A-Za-z0-9][A-Za-z0-9\-]*(?:\.[A-Za-z0-9\-]+)*\.[A-Za-z]{2,24}(?![\w\-])"
)
_LOGIN = re.compile(
    r"(?<![\w.@\-])(?P<user>[A-Za-z_][\w.\-]*)@(?P<host>[A-Za-z0-9][\w.\-]*)(?=:(?:[~/]|\d{1,5}\b)|:?\s?[~#$](?:\s|$))"
    r"|(?<=\bssh )(?P<user2>[A-Za-z_][\w.\-]*)@(?P<host2>[A-Za-z0-9][\w.\-]*)"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = re.compile(rf"(?<![\w.\-])(?:{_OCTET}\.){{3}}{_OCTET}(?![\w\-]|\.\w)")
#: Versions have four parts as well.
_VERSION = re.compile(
    r"(?i)(?:version|ver|v|release|driver|cuda|cudnn|cublas|cupti|nccl|build|rev|so|toolkit|nsys|ncu|r)[\s:=.]*$"
)
_MAC = re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![\w:])")
_IPV6 = re.compile(
    r"(?i)(?<![\w:])(?:(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|fe80::[0-9a-f:]+|f[cd][0-9a-f]{2}:[0-9a-f]{1,4}:[0-9a-f:]+"
    r"|2[0-9a-f]{3}:(?:[0-9a-f]{1,4}:){1,6}:[0-9a-f:]*)(?![\w:])"
)
_PUBLIC_ADDRESSES = frozenset(["0.0.0.0", "127.0.0.1", "255.255.255.255", "127.0.1.1"])  # noqa: S104 - recognised, not bound
_FQDN = re.compile(
    r"(?<![\w.@/\-])(?:ip-\d{1,3}(?:-\d{1,3}){3}(?:\.[a-z0-9\-]+)*"
    r"|[a-z][a-z0-9\-]*(?:-[a-z0-9]+|\d)\.(?:[a-z0-9\-]+\.)+(?:com|org|edu|gov|internal|intranet|corp|lan|localdomain)"
    r"|[a-z0-9][a-z0-9\-]*\.(?:[a-z0-9\-]+\.)*svc\.cluster\.local)(?![\w\-]|\.\w)"
)

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
    token tokens cache index array vector matrix queue stack heap page pool graph graphs mask input output inputs outputs
    weight weights bias scale shape size dims rank ranks world epoch iter iteration warmup sample sampler loader dataset
    sync async wait lock send recv read write open close load store push pull start stop begin end init exit call calls
    launch empty zeros ones rand randn arange clone detach expand reshape permute transpose contiguous slice select
    split concat stack chunk where gather clamp round floor ceil sqrt rsqrt exp log sin cos tanh sigmoid dropout batch
    vector elementwise vectorized unrolled native operator lambda unsigned const struct class template static inline
    autograd engine function module modules session sessions client clients local remote global device devices
    """.split()
)
_PLAIN_WORD = re.compile(r"\d+|[0-9a-fA-F]{1,3}")


class Scrubber:
    """Puts placeholders in the place of secrets, the same for the same, for the whole of one file.

    Parameters
    ----------
    machine : bool
        Know this machine's names, its user and what its environment holds: traces are mostly looked at where they
        were captured.

    Attributes
    ----------
    removed : Counter
        How often each kind was replaced.
    """

    def __init__(self, *, machine: bool = True) -> None:
        self.removed: Counter[str] = Counter()
        self._numbers: dict[tuple[str, str], str] = {}
        self._taken: dict[str, set[int]] = {}
        self._words: dict[str, Kind] = {}  # in small letters
        self._literal: set[str] = set()  # secrets, as they stand
        self._roots: set[str] = set()  # folders, as they stand
        self._patterns: tuple[re.Pattern[str] | None, re.Pattern[str] | None] | None = None
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
        self._patterns = None
        if kind == "secret":
            if len(text) >= 6 and text.lower() not in _COMMON and not _NUMBER.fullmatch(text):
                self._literal.add(text)
        elif kind == "path":
            if text.startswith("/") and text.count("/") >= 2 and not _SYSTEM.fullmatch(text.split("/")[1]):
                self._roots.add(text.rstrip("/"))
        else:
            for word in {text, text.partition(".")[0]} if kind == "host" else {text}:
                lower = word.lower()
                if len(word) >= 4 and lower not in _COMMON and not _PLAIN_WORD.fullmatch(word) and " " not in word:
                    self._words.setdefault(lower, kind)

    def learn_environment(self, entries: Iterable[str] | Mapping[str, str]) -> None:
        """Learn from an environment's entries who and where it was, and its secrets.

        Parameters
        ----------
        entries : iterable of str, or mapping
            ``NAME=value`` each, in quotes or not; or values by name.
        """
        if isinstance(entries, Mapping):
            pairs = list(entries.items())
        else:
            pairs = [(name, value) for name, found, value in (e.partition("=") for e in entries) if found]
        for name, value in pairs:
            name, value = name.strip().removeprefix("export "), value.strip().strip("\"'")
            if _HOST_VARIABLES.fullmatch(name):
                self.learn("host", value)
            elif _USER_VARIABLES.fullmatch(name):
                self.learn("user", value)
            elif _SECRET_VARIABLE.search(name):
                if not value.startswith("/"):
                    self.learn("secret", value)
            elif name in ("HOME", "USERPROFILE", "PWD", "OLDPWD", "SLURM_SUBMIT_DIR", "VIRTUAL_ENV", "CONDA_PREFIX"):
                self.learn("path", value)
            self.learn_from(value)

    def learn_from(self, text: str) -> None:
        """Learn the users whose home folders a text names.

        Parameters
        ----------
        text : str
        """
        if "/" in text or "\\" in text:
            for name in _HOME.findall(text):
                self.learn("user", name)

    def _learn_machine(self) -> None:
        with contextlib.suppress(OSError):
            self.learn("host", socket.gethostname())
        with contextlib.suppress(KeyError, OSError, ImportError):  # no such user, in some containers
            self.learn("user", getpass.getuser())
        with contextlib.suppress(RuntimeError):
            self.learn("path", str(Path.home()))
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
        self.removed[kind] += 1
        key = (kind, secret)
        if key not in self._numbers:
            taken = self._taken.setdefault(kind, set())
            number = len(taken) + 1
            while number in taken:
                number += 1
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
        if not value:
            return value
        given = value
        if "[" in value:
            self._note_placeholders(value)
        literal, words = self._known()
        if literal is not None:
            value = literal.sub(lambda m: self.placeholder("secret", m[0]), value)
        if "PRIVATE KEY" in value:
            value = _PRIVATE_KEY.sub(lambda m: self.placeholder("secret", m[0]), value)
        if "=" in value:
            value = self._without_environment(value)
        if "://" in value:
            value = self._each(_URL_LOGIN, value)
            value = self._each(_WEBHOOK, value)
        if _TOKEN_HINT.search(value):
            value = _TOKEN.sub(lambda m: self.placeholder("secret", m[0]), value)
        if _NAME_HINT.search(value):
            value = self._without_assigned(value)
        if "-u" in value or "--login" in value:
            value = _USER_FLAG.sub(self._login_flag, value)
        if "sshpass" in value:
            value = self._each(_SSHPASS, value)
        if "earer" in value or "EARER" in value:
            value = self._each(_BEARER, value, _likely)
        value = self._without_hex(value)
        if "/" in value:
            value = _POSIX.sub(lambda m: self._path(m[0], free=True), value)
            if "/home/" in value or "/Users/" in value:
                value = _ANYWHERE.sub(lambda m: self._path(m[0], free=True), value)
        if "\\" in value or ":/" in value:
            value = _WINDOWS.sub(lambda m: self._path(m[0], free=True), value)
        if "@" in value:
            value = _EMAIL.sub(lambda m: self.placeholder("email", m[0]), value)
            value = _LOGIN.sub(self._login, value)
        if "." in value or ":" in value:
            value = self._without_addresses(value)
        if words is not None:
            value = words.sub(lambda m: self.placeholder(self._words[m[0].lower()], m[0].lower()), value)
        return given if value == given else value

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
        given = value
        if re.match(r"/[^/]|[A-Za-z]:[\\/]|\\\\|~", value) and "\x00" not in value:
            value = self._path(value, free=False)
        return self.text(value) if value == given else self._named(value)

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
        if isinstance(given, str):
            return self.keyed(key, given)
        if isinstance(given, Mapping):
            if key.lower() in ENVIRONMENT_KEYS and given:
                self.removed["environment"] += len(given)
                return {}
            return {
                (self.text(name) if isinstance(name, str) else name): self.value(
                    item, name if isinstance(name, str) else ""
                )
                for name, item in given.items()
            }
        if isinstance(given, list | tuple):
            if key.lower() in ENVIRONMENT_KEYS and given:
                self.removed["environment"] += len(given)
                return []
            return self.arguments([self.value(item, key) for item in given])
        if isinstance(given, int | float) and not isinstance(given, bool) and key and SECRET_KEYS.fullmatch(key):
            return self.placeholder("secret", str(given))
        return given

    def keyed(self, key: str, text: str) -> str:
        """Replace every secret in a text that stands under a key.

        Parameters
        ----------
        key : str
        text : str

        Returns
        -------
        str
        """
        lower = key.lower()
        if not text or PLACEHOLDER.fullmatch(text):
            return text
        if lower in ENVIRONMENT_KEYS:
            return self.placeholder("environment", text)
        if key and SECRET_KEYS.fullmatch(key) and text.lower() not in _NOTHING:
            return self.placeholder("secret", text)
        if lower in HOST_KEYS:
            return self.placeholder("host", text.lower())
        if lower in USER_KEYS and not _NUMBER.fullmatch(text):
            return self.placeholder("user", text.lower())
        if lower in _PATH_KEYS:
            return self.path(text)
        if key and _COMMIT_KEYS.fullmatch(key) and re.fullmatch("[0-9a-f]{40}", text):
            return text
        return self.text(text)

    def arguments(self, given: list[Any]) -> list[Any]:
        """Replace the values of options that say that a secret follows, in a command line's words.

        Parameters
        ----------
        given : list
            Words; anything that is no text stays.
        """
        out = list(given)
        for i, (flag, word) in enumerate(zip(given, given[1:], strict=False)):
            if not (isinstance(flag, str) and isinstance(word, str) and flag.startswith("-") and "=" not in flag):
                continue
            found = _FLAG.fullmatch(f"{flag} x") or _USER_FLAG.fullmatch(f"{flag} x")
            if found and word and not PLACEHOLDER.fullmatch(word) and not _NUMBER.fullmatch(word) and word[0] != "-":
                out[i + 1] = self.placeholder("user" if found.re is _USER_FLAG else "secret", word)
        return out

    # -- rules ---------------------------------------------------------------------------------------------------

    def _known(self) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
        if self._patterns is None:
            literal = "|".join(re.escape(s) for s in sorted(self._literal, key=lambda s: (-len(s), s)))
            words = "|".join(re.escape(w) for w in sorted(self._words, key=lambda w: (-len(w), w)))
            self._patterns = (
                re.compile(literal) if literal else None,
                re.compile(rf"(?i)(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])") if words else None,
            )
        return self._patterns

    def _named(self, value: str) -> str:
        words = self._known()[1]
        if words is None:
            return value
        return words.sub(lambda m: self.placeholder(self._words[m[0].lower()], m[0].lower()), value)

    def _note_placeholders(self, value: str) -> None:
        """A file that was scrubbed before has placeholders of its own."""
        for kind, number in PLACEHOLDER.findall(value):
            mine = f"[{kind} {number}]" if number else f"[{kind}]"
            if mine not in self._numbers.values():
                self._taken.setdefault(kind, set()).add(int(number or 1))

    def _each(
        self, pattern: re.Pattern[str], value: str, when: Callable[[str], bool] | None = None, kind: Kind = "secret"
    ) -> str:
        """Replace the group `value` of what a pattern finds, where `when` says so."""

        def replaced(match: re.Match[str]) -> str:
            found = match["value"]
            quote = found[0] if found[:1] in "\"'" and found[-1:] == found[:1] and len(found) > 1 else ""
            inner = found[1:-1] if quote else found
            if not inner or PLACEHOLDER.search(inner) or inner.lower() in _NOTHING or (when and not when(inner)):
                return match[0]
            start, end = match.span("value")
            at = match.start()
            return match[0][: start - at] + quote + self.placeholder(kind, inner) + quote + match[0][end - at :]

        return pattern.sub(replaced, value)

    def _without_assigned(self, value: str) -> str:
        lower = value.lower()
        if "authorization" in lower:
            value = self._each(_HEADER, value)
        if "cookie" in lower:
            value = self._each(_COOKIE, value)
        if _ASSIGNED_HINT.search(value):
            value = self._each(_ASSIGNED, value)

            def weak(match: re.Match[str]) -> str:
                name = match["name"]
                variable = name.isupper() and "=" in match["sign"]
                sure = variable or name.startswith("-") or name in ("pwd", "Pwd")
                return self._each(_WEAK, match[0], _no_number if sure else _secretive)

            value = _WEAK.sub(weak, value)
        if "-" in value:
            value = self._each(_FLAG, value, _no_number)
        return value

    def _without_environment(self, value: str) -> str:
        if "\x00" in value:
            if any(_ENTRY.match(piece) for piece in value.split("\x00")):
                return self.placeholder("environment", value)
        elif len(_SEPARATED.findall(value)) >= 3:
            value = _ENTRIES.sub(lambda m: m[1] + self.placeholder("environment", m[2]), value)
        return self._entries(value)

    def _entries(self, value: str) -> str:
        out, at = [], 0
        for match in _ENVIRONMENT.finditer(value):
            if match.start() < at:
                continue
            name, found = match["name"], match["value"]
            quoted = found[:1] == '"' and name.isupper() and len(name) > 1
            if not (match["export"] or quoted or _VARIABLE.fullmatch(name)) or PLACEHOLDER.fullmatch(
                found.strip("\"'")
            ):
                continue
            end = match.end()
            if name.startswith("SSH_"):
                tail = _SSH_VALUE.match(value, end)
                end = tail.end() if tail else end
            out += [value[at : match.start()], self.placeholder("environment", value[match.start() : end])]
            at = end
        return "".join([*out, value[at:]]) if out else value

    def _without_hex(self, value: str) -> str:
        if len(value) < 40 or "<" in value or "::" in value:
            return value

        def replaced(match: re.Match[str]) -> str:
            return match[0] if _COMMIT.search(value[: match.start()]) else self.placeholder("secret", match[0])

        return _BARE_HEX.sub(replaced, value)

    def _login_flag(self, match: re.Match[str]) -> str:
        user, colon, word = match["value"].partition(":")
        if colon:
            if PLACEHOLDER.search(word):
                return match[0]
            return f"{match['flag']}{match['sign']}{self.placeholder('user', user)}:{self.placeholder('secret', word)}"
        if match["flag"] == "-u" or PLACEHOLDER.search(user):  # python -u script.py
            return match[0]
        return f"{match['flag']}{match['sign']}{self.placeholder('user', user.lower())}"

    def _login(self, match: re.Match[str]) -> str:
        user, host = match["user"] or match["user2"], match["host"] or match["host2"]
        return f"{self.placeholder('user', user.lower())}@{self.placeholder('host', host.lower())}"

    def _without_addresses(self, value: str) -> str:
        def address(match: re.Match[str]) -> str:
            if match[0] in _PUBLIC_ADDRESSES or _VERSION.search(value[: match.start()]):
                return match[0]
            return self.placeholder("address", match[0])

        if value.count(".") >= 3:
            value = _IPV4.sub(address, value)
        if value.count(":") >= 2:
            value = _MAC.sub(lambda m: self.placeholder("address", m[0]), value)
            value = _IPV6.sub(lambda m: self.placeholder("address", m[0]), value)
        if "." in value or "ip-" in value:
            value = _FQDN.sub(lambda m: self.placeholder("host", m[0]), value)
        return value

    def _path(self, given: str, *, free: bool) -> str:
        """Shorten a path; `free`: found in a text, where what looks like one may be a name in a model."""
        if PLACEHOLDER.search(given):
            return given
        slash = "\\" if "\\" in given else "/"
        parts = [p for p in re.split(r"[/\\]+", given) if p]
        if not parts or _SYSTEM_PATH.match(given):
            return given
        windows = given[0] not in "/~"
        if not windows and given[0] == "/":
            if _SYSTEM.fullmatch(parts[0]) and not given.startswith("/dev/shm") and "home" not in parts:  # noqa: S108
                return given
            if free and not self._leads_to_people(given, parts):
                return given
        if given[0] == "~" and len(parts) == 1 and free:
            return given
        inductor = _INDUCTOR.search(given)
        if inductor:
            return self.placeholder("path", given[: inductor.end()]) + slash + inductor[1] + given[inductor.end() - 1 :]
        library = _LIBRARY.search(given)
        if library and library.end() < len(given):
            return self.placeholder("path", given[: library.start()].rstrip("/\\")) + slash + given[library.start() :]
        end = slash if given[-1] in "/\\" else ""
        if not end and len(parts) > 1 and _FILE.fullmatch(parts[-1]):
            folder = given[: -len(parts[-1])].rstrip("/\\")
            return self.placeholder("path", folder) + slash + parts[-1]
        return self.placeholder("path", given.rstrip("/\\")) + end

    def _leads_to_people(self, given: str, parts: list[str]) -> bool:
        if any(given == root or given.startswith(root + "/") for root in self._roots):
            return True
        if _ROOTS.fullmatch(parts[0]) and (len(parts) > 1 or given.endswith("/")):
            return True
        if any(p in ("home", "Users", "site-packages", "dist-packages") for p in parts[:-1]):
            return True
        return len(parts) > 1 and _FILE.fullmatch(parts[-1]) is not None


def _no_number(value: str) -> bool:
    return not _NUMBER.fullmatch(value)


def _secretive(value: str) -> bool:
    """Whether a value looks like random characters: not a number, a word, or words and a number."""
    if len(value) < 8 or not re.fullmatch(r"[A-Za-z0-9+/_=.~%$!*\-]+", value) or _NUMBER.fullmatch(value):
        return False
    kinds = re.findall(r"[A-Za-z]+|\d+", value)
    changes = sum(a[0].isdigit() != b[0].isdigit() for a, b in zip(kinds, kinds[1:], strict=False))
    both = any(k[0].isdigit() for k in kinds) and any(k[0].isalpha() for k in kinds)
    mixed = any(re.search("[a-z][A-Z]+[a-z]", k) for k in kinds)
    return changes >= 3 or (len(value) >= 16 and both) or (len(value) >= 20 and mixed and "_" not in value)


def _likely(value: str) -> bool:
    """Whether the word after "bearer" is a credential."""
    return len(value) >= 16 or any(c.isdigit() for c in value)


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
    if text[:1] not in ("{", "["):
        return scrubber.text(text)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return scrubber.text(text)
    clean = scrubber.value(found)
    return text if clean == found else json.dumps(clean, ensure_ascii=False, separators=(",", ":"))
