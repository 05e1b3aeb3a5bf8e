"""Secrets of the forms that nsightkit recognises, to plant in traces, and texts that only look like secrets.

None is real: the tokens are made from a seed, so no file holds one.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable
from dataclasses import dataclass

HOST, USER = "planted-node17", "plantedperson"
#: What identifies without a form of its own, and stands only where a profiler says so.
ORION, GRACE = "orionstation", "gracehopper9"


@dataclass(frozen=True)
class Secret:
    """A text, and what of it must not survive."""

    text: str
    hidden: tuple[str, ...]


_RANDOM = random.Random(5)
_LETTERS = string.ascii_letters + string.digits
WORD = "hunter2-planted"


def _some(count: int, letters: str = _LETTERS) -> str:
    return "".join(_RANDOM.choice(letters) for _ in range(count))


#: Keys as their providers make them.
TOKENS = (
    "AKIA" + _some(16, string.ascii_uppercase + string.digits),
    "ASIA" + _some(16, string.ascii_uppercase + string.digits),
    "ghp_" + _some(36),
    "github_pat_" + _some(22) + "_" + _some(59),
    "glpat-" + _some(20),
    "hf_" + _some(34, string.ascii_letters),
    "sk-" + _some(48),
    "sk-ant-api03-" + _some(80),
    "AIza" + _some(35),
    "xoxb-" + _some(12, string.digits) + "-" + _some(24),
    "npm_" + _some(36),
    "pypi-AgEIcHlwaS5vcmc" + _some(60),
    "nvapi-" + _some(64),
    "eyJ" + _some(17) + ".eyJ" + _some(40) + "." + _some(43),
)
#: Texts with something in them that must not survive.
SECRETS = (
    *(Secret(f"step with {token} in it", (token,)) for token in TOKENS),
    Secret(f"password={WORD}", (WORD,)),
    Secret(f'DB_PASSWORD="{WORD}"', (WORD,)),
    Secret(f"api_key: {WORD}", (WORD,)),
    Secret(f"prog --client-secret {WORD} x", (WORD,)),
    Secret(f"'aws_secret_access_key': '{WORD}'", (WORD,)),
    Secret(f"https://host/x?token={TOKENS[2]}&y=1", (TOKENS[2],)),
    Secret(f"Authorization: Bearer {TOKENS[5]}", (TOKENS[5],)),
    Secret(f"https://{USER}:{WORD}@example.com/x", (USER, WORD)),
    Secret(f"postgresql://app:{WORD}@db.internal:5432/x", (WORD,)),
    Secret("-----BEGIN RSA PRIVATE KEY-----\nMIIEplanted0\n-----END RSA PRIVATE KEY-----", ("MIIEplanted0",)),
    Secret(f"/home/{USER}/proj/train.py", (USER,)),
    Secret(f"open /scratch/{USER}/run: no such file", (USER,)),
    Secret(f"C:\\Users\\{USER}\\x.py", (USER,)),
    Secret(f"~{USER}/x", (USER,)),
    Secret(f"/tmp/torchinductor_{USER}/ab/c.py", (USER,)),
    Secret(f"/opt/{USER}/lib/python3.12/runpy.py", (USER,)),
    Secret(f"/weird/{USER}/train.py", (USER,)),
    Secret(f"file:///Users/{USER}/x", (USER,)),
    Secret(f"mail jane.{USER}@example.com now", (USER, "jane.")),
    Secret(f"{USER}@{HOST}:~/x$ python train.py", (USER, HOST)),
    Secret(f"ssh {USER}@{HOST} nvidia-smi", (USER, HOST)),
    Secret("connect to 10.41.52.63 now", ("10.41.52.63",)),
    Secret("tcp://192.168.41.7:29500", ("192.168.41.7",)),
    Secret("[2001:db8:85a3::8a2e:370:7334]", ("2001:db8:85a3::8a2e:370:7334",)),
    Secret("00:1a:2b:3c:4d:5e", ("00:1a:2b:3c:4d:5e",)),
    Secret("ip-10-41-52-63.ec2.internal", ("10-41-52",)),
    Secret("gpu17.cluster.corp", ("gpu17.cluster",)),
    Secret(f"step_{HOST}_3", (HOST,)),
    Secret("PLAIN=plantedvalue\0OTHER=x\0", ("plantedvalue",)),
)


def survivors(written: bytes, hidden: Iterable[str]) -> list[str]:
    """Hidden texts that are in some bytes all the same, however they are spelt there."""
    found = []
    for word in sorted(set(hidden)):
        spellings = {word, word.replace("\\", "\\\\"), word.replace("/", "\\/")}
        if any(spelling.encode(code) in written for spelling in spellings for code in ("utf-8", "utf-16-le")):
            found.append(word)
    return found


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
