"""PyTorch's own ``emit_nvtx`` on a machine without a GPU: its hooks for CUDA lead to Python functions.

A build of PyTorch without CUDA has all of ``emit_nvtx`` but the last call, which a small library provides. What it
pushes are the strings that a program on a GPU gives to Nsight Systems, made by PyTorch itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

_SOURCE = r"""
#include <torch/csrc/profiler/stubs/base.h>
namespace {
using namespace torch::profiler::impl;
struct Stubs : ProfilerStubs {
  void (*push)(const char*) = nullptr;
  void (*pop)() = nullptr;
  void record(c10::DeviceIndex*, ProfilerVoidEventStub*, int64_t*) const override {}
  float elapsed(const ProfilerVoidEventStub*, const ProfilerVoidEventStub*) const override { return 0; }
  void mark(const char*) const override {}
  void rangePush(const char* name) const override { push(name); }
  void rangePop() const override { pop(); }
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)>) const override {}
  void synchronize() const override {}
} stubs;
}
extern "C" void install(void (*push)(const char*), void (*pop)()) {
  stubs.push = push;
  stubs.pop = pop;
  registerCUDAMethods(&stubs);
}
"""
_PUSH, _POP = ctypes.CFUNCTYPE(None, ctypes.c_char_p), ctypes.CFUNCTYPE(None)


def build(folder: Path) -> Path | None:
    """Compile the library; None where there is no compiler, or one that this PyTorch's headers are too new for."""
    import torch

    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    source, library = folder / "stubs.cpp", folder / "stubs.so"
    source.write_text(_SOURCE)
    home = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{home / 'include'}", f"-L{home / 'lib'}"]
    command = [compiler, *flags, str(source), "-o", str(library), "-ltorch_cpu", "-lc10"]
    return library if subprocess.run(command, capture_output=True, check=False).returncode == 0 else None


@contextlib.contextmanager
def emitting(
    library: Path, push: Callable[[str], object], pop: Callable[[], object], *, shapes: bool = True
) -> Iterator[None]:
    """Run what is inside under ``emit_nvtx``, its ranges going to `push` and `pop`."""
    import torch

    def begin(name: bytes) -> None:
        push(name.decode())

    def end() -> None:
        pop()

    kept = _PUSH(begin), _POP(end)
    ctypes.CDLL(str(library)).install(*kept)
    wait, torch.cuda.synchronize = torch.cuda.synchronize, lambda *_: None
    try:
        with torch.autograd.profiler.emit_nvtx(record_shapes=shapes):
            yield
    finally:
        torch.cuda.synchronize = wait
        # The library stays registered: it must not call functions that are gone.
        _KEPT.append(kept)


_KEPT: list[object] = []
