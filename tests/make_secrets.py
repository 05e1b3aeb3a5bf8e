"""Secrets of every usual form to plant in traces. None is real: they are made from a seed, so no file holds one."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

HOST, USER = "planted-node17", "plantedperson"
#: What identifies without a form of its own, and stands only where a profiler says so.
ORION, GRACE = "orionstation", "gracehopper9"

_LETTERS = string.ascii_letters + string.digits
_HEX = "0123456789abcdef"


@dataclass(frozen=True)
class Secret:
    """A text, and what of it must not survive."""

    text: str
    hidden: tuple[str, ...]


def tokens(seed: int = 5) -> dict[str, str]:
    """Keys as their providers make them."""
    chosen = random.Random(seed)

    def some(n: int, of: str = _LETTERS) -> str:
        # A digit, capitals and small letters in each, as in all real ones; never a letter before or after.
        return "".join(chosen.choice(of) for _ in range(n))

    capitals = string.ascii_uppercase + string.digits
    return {
        "AWS": "AKIA" + some(16, capitals),
        "AWS session": "ASIA" + some(16, capitals),
        "Google": "AIza" + some(35),
        "Google OAuth": "ya29." + some(60),
        "Azure storage": some(86) + "==",
        "Azure client": some(3) + "8Q~" + some(34),
        "GitHub": "ghp_" + some(36),
        "GitHub server": "ghs_" + some(36),
        "GitHub fine-grained": "github_pat_" + some(22) + "_" + some(59),
        "GitLab": "glpat-" + some(20),
        "Hugging Face": "hf_" + some(34, string.ascii_letters),
        "OpenAI": "sk-" + some(48),
        "OpenAI project": "sk-proj-" + some(60),
        "Anthropic": "sk-ant-api03-" + some(80),
        "Slack bot": "xoxb-" + some(12, string.digits) + "-" + some(24),
        "npm": "npm_" + some(36),
        "PyPI": "pypi-AgEIcHlwaS5vcmc" + some(60),
        "W&B": some(40, _HEX),
        "W&B new": "wandb_v1_" + some(60),
        "NVIDIA": "nvapi-" + some(64),
        "Stripe": "sk_live_" + some(24),
        "SendGrid": "SG." + some(22) + "." + some(43),
        "Databricks": "dapi" + some(32, _HEX),
        "Docker": "dckr_pat_" + some(27),
        "Vault": "hvs." + some(90),
        "JSON web token": "eyJ" + some(17) + ".eyJ" + some(40) + "." + some(43),
    }


def secrets(seed: int = 5) -> list[Secret]:
    """Everything, in plain, NUL-joined, quoted and command-line form."""
    found: list[Secret] = []

    def add(text: str, *hidden: str) -> None:
        found.append(Secret(text, hidden))

    for key in tokens(seed).values():
        for form in (
            *("{}", "step with {} in it", 'KEY="{}"', "export KEY={}", "A=1\0TOKEN={}\0LAST=2", "--token={}"),
            *("prog --api-key {} x", "'token': '{}'", "Authorization: Bearer {}", "https://host/x?token={}&y=1"),
        ):
            add(form.format(key), key)
    word = "hunter2-planted"
    for form in ("{}={}", "{}: {}", "--{}={}", "--{} {}", '{}="{}"', "export {}={}", "'{}': '{}'", '"{}":"{}"'):
        for name in ("password", "DB_PASSWORD", "api_key", "API_KEY", "aws_secret_access_key", "client_secret"):
            add(form.format(name, word), word)
    add(f"https://{USER}:{word}@example.com/x", USER, word)
    add(f"postgresql://app:{word}@db.internal:5432/x", word)
    add(f"https_proxy=http://app:{word}@proxy:3128", word)
    add(f"DefaultEndpointsProtocol=https;AccountName=x;AccountKey={'Qk9' * 14}==;EndpointSuffix=core", "Qk9Qk9")
    add("https://x.blob.core.windows.net/c?sv=2020&sig=abc%2Fdef123456ghi789&se=1", "abc%2Fdef123456ghi789")
    add("https://b.s3.amazonaws.com/k?X-Amz-Signature=deadbeef00112233&x=1", "deadbeef00112233")
    for kind in ("RSA ", "OPENSSH ", "EC ", ""):
        name = "PRIVATE KEY"
        add(f"-----BEGIN {kind}{name}-----\nMIIEplanted0\nZm9v\n-----END {kind}{name}-----", "MIIEplanted0", "Zm9v")
    add("-----BEGIN PRIVATE KEY-----\\nMIIEplanted1\\nZm9v", "MIIEplanted1")
    for path in (
        *(f"/home/{USER}/proj/train.py", f"/home/{USER}", f"/Users/{USER}/x/y", f"C:\\Users\\{USER}\\x.py"),
        *(f"C:\\\\Users\\\\{USER}\\\\x", f"C:/Users/{USER}/x.py", f"/scratch/{USER}/run", f"~{USER}/x"),
        *(f"/tmp/torchinductor_{USER}/ab/c.py", f"/mnt/nfs/home/{USER}/x", f"/global/u2/o/{USER}/apps/saxpy"),
        *(f"/weird/{USER}/train.py", f"/opt/{USER}/lib/python3.12/runpy.py", f"\\\\server\\share\\{USER}\\x"),
    ):
        for form in ("{}", "open {}: no such file", 'File "{}", line 3', "in '{}'", "load({})", "x={}:/usr/bin"):
            add(form.format(path), USER)
    add(f"mail jane.{USER}@example.com now", USER)
    add(f"{USER}@{HOST}:~/x$ python train.py", USER, HOST)
    add(f"ssh {USER}@{HOST} nvidia-smi", USER, HOST)
    add(f"curl -u {USER}:{word} http://x", USER, word)
    add(f"--user={USER}", USER)
    add(f"sshpass -p {word} ssh x", word)
    for address in ("10.41.52.63", "192.168.41.7", "2001:db8:85a3::8a2e:370:7334", "00:1a:2b:3c:4d:5e"):
        for form in ("{}", "connect to {} now", "tcp://{}:29500" if "." in address else "[{}]"):
            add(form.format(address), address)
    add("SSH_CONNECTION=10.41.52.63 50123 10.41.52.64 22", "10.41.52.63", "10.41.52.64", "50123")
    add("SSH_CLIENT='10.41.52.63 50123 22'", "10.41.52.63")
    add("SLURM_JOB_NODELIST=gpunode[01-04]", "gpunode")
    add("SLURM_JOB_ACCOUNT=grant_4711x", "grant_4711x")
    add("ip-10-41-52-63.ec2.internal", "10-41-52")
    add("node-17.cluster.planted.example.org", "planted.example")
    add(f"HOSTNAME={HOST};USER={USER};PLAIN=plantedvalue;X=1", HOST, USER, "plantedvalue")
    add(f"USER={USER}\nHOME=/home/{USER}\nPLAIN=plantedvalue\nhello", USER, "plantedvalue")
    add("PLAIN=plantedvalue\0OTHER=x\0", "plantedvalue")
    add('PLAIN="plantedvalue"', "plantedvalue")
    add("export PLAIN=plantedvalue", "plantedvalue")
    return found


def words(planted: list[Secret]) -> set[str]:
    """All that must not survive."""
    return {word for one in planted for word in one.hidden}


def survivors(written: bytes, planted: list[Secret]) -> list[str]:
    """Hidden texts that are in some bytes all the same, however they are spelt there."""
    spelt = {word: {word, word.replace("\\", "\\\\"), word.replace("/", "\\/")} for word in words(planted)}
    return sorted(
        word
        for word, ways in spelt.items()
        if any(way.encode(code) in written for way in ways for code in ("utf-8", "utf-16-le", "utf-16-be"))
    )


#: Names that look like a secret and are none: they must come through unchanged.
HARMLESS = (
    *(
        "BATCH=32",
        "M=4096 N=4096 K=4096",
        "token=12",
        "decode token=first",
        "tokens=1024 batch=8",
        "key=value, query=x",
    ),
    *("cache_key=attn_3", "Q=1,K=2,V=3", "KEY=512", "--max-token 256", "--num-key-value-heads 8", "auth=none", "sig=3"),
    *(
        "/layer1/Conv + /layer1/relu/Relu",
        "/net/conv1/Conv",
        "/shared/Gather",
        "/model/layers.0/MatMul",
        "layer.3/attn",
    ),
    *("kernel<0x0123456789abcdef0123456789abcdef01234567>", "f<0123456789abcdef0123456789abcdef01234567, int>"),
    *(
        "gemm<ABCDEFabcdef0123456789ABCDEFabcdef0123456789ab==>",
        "void f<secret_t, password_hash>(int)",
        "m0100_a0_pass",
    ),
    "_ZN2at6native40_GLOBAL__N__0f1a8107_8_Shape_cu_49f7391c30CatArrayBatchedCopy_vectorizedINS1_10OpaqueTypeILj2EEEjLi1E",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, Array<char*, 3> >",
    *(
        "triton_poi_fused_add_mul_0d1d2d3de",
        "## Call CompiledFxGraph fuz3rzd5abcdefghijklmnopqrstuvwxyz234567abcdef ##",
    ),
    *("cuDNN 9.1.0.70", "libcublas.so.12.4.5.8", "nvidia-cublas-cu12==12.4.5.8", "version 10.2.1.243", "2023.4.4.54"),
    *("memcpy@GLIBC_2.2.5", "clock_nanosleep@@GLIBC_2", "A @ B", "x@y", "matmul(A@B)", "measure@*"),
    *(
        "std::max",
        "fade::add",
        "dead::beef",
        "12:30:45",
        "2025-11-21T10:00:00",
        "0000:57:00.0",
        "C:float",
        "~Foo",
        "~/",
    ),
    *("autograd::engine::evaluate_function: AddmmBackward0", "aten::empty, op_id = 990346", "nccl:all_reduce"),
    *("commit 0123456789abcdef0123456789abcdef01234567", "nn.Module: Linear_0", "torch/nn/modules/module.py(1501): f"),
    *(
        "/sys/kernel/eventlib",
        "linux-vdso.so.1",
        "kworker/0:0H-kblockd",
        "a/b/c",
    ),
    *(
        "CPU IP/backtrace",
        "GB/s",
        "and/or",
        "1/2",
        "pass=2",
        "Pass: 3 of 5",
        "bypass=fast",
        "bearer of news",
        "sk-learn",
    ),
    *(
        "hf_model_forward",
        "gh_action",
        "r8_kernel",
        "token_embedding: (32, 128)",
        "session 3",
        "secret: ",
        "path=",
        "x=1;y=2",
    ),
    *(
        "max",
        "norm",
        "signature: aten::add(Tensor)",
        "author: x",
        "http://localhost:8080",
        "127.0.0.1",
        "[lambda(float)]",
    ),
)
