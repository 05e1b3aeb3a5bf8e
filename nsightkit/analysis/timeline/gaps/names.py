"""What names of calls, ranges and operators say about a thread that a device waits for."""

from __future__ import annotations

import re

__all__ = [
    "ALLOCATES",
    "BEGIN_CAPTURE",
    "BLOCKING",
    "BUFFER_FULL",
    "BUILDS",
    "CHEAP",
    "COMPILES",
    "COPY",
    "DATA",
    "DATA_LOADING",
    "END_CAPTURE",
    "ENQUEUES",
    "FIRST_TIMES",
    "FOR_A_THREAD",
    "FREES",
    "LOADING",
    "OS_CHOSEN",
    "OS_WAIT",
    "STEP",
    "UNIFIED",
]

_OF_DATA = (
    r"(data|batch|sample|input)(e?s)?(?![a-z])(?![\s_-]*(?!from|for|async|wait|time|queue|iter|load|fetch|next)[a-z])"
)
#: Names of ranges and operators in which a program waits for its data. Weights, layers and embeddings are not data.
DATA_LOADING = (
    r"(?i)data[\s_-]*load|(?<![a-z])load(ing)?[\s_-]*(the[\s_-]*)?(next[\s_-]*)?" + _OF_DATA + r"|"
    r"(next|get|fetch|read|wait|prefetch)(ing)?[\s_-]*(for[\s_-]*)?(the[\s_-]*|next[\s_-]*)?" + _OF_DATA + r"|"
    r"(data|batch|sample|input)[\s_-]*(pipeline|wait|fetch|prefetch)|^(data|batch|dataset)([\s_-]*time)?$|"
    r"data[\s_-]*time\b|\b__next__\b|^next\(|collate"
)
DATA = re.compile(DATA_LOADING)

#: OS calls of the program's own choice: sleeps, and a person at a terminal.
OS_CHOSEN = re.compile(r"^(((clock_)?nanosleep|u?sleep)(64)?|getc|getw?char|gets|v?w?scanf)$")
#: OS calls in which a thread waits for another thread or process, a socket or a disk.
OS_WAIT = re.compile(
    r"^(e?poll|ppoll|epoll_p?wait\d*|p?select|futex|sem_(timed)?wait|sem_clockwait|pthread_cond_(timed|clock)?wait|pthread_join|pthread_mutex_(timed)?lock|"
    r"pthread_rwlock_(rd|wr)lock|pthread_barrier_wait|sigwait(info)?|sigtimedwait|wait(pid|id|3|4)?|"
    r"p?readv?\d*|pread64|fread|fget(w?c|w?s)|getdelim|getline|v?fw?scanf|recv(from|msg|mmsg)?|accept4?|connect|msgrcv|mq_(timed)?receive|"
    r"io_getevents|flock|fsync)(64)?$"
)
#: Those of them in which a thread may wait for another thread of its process.
FOR_A_THREAD = re.compile(r"^(futex|sem_|pthread_)")

#: Calls that return only when the GPU has caught up.
BLOCKING = re.compile(
    r"^(cuda|hip)(Device|Stream|Event|Thread|Context|Graph)Synchronize|^cu(Ctx|Stream|Event)Synchronize|"
    r"^(cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)|^(cuda|hip)(Malloc|Free)(?!.*Async)|^cuMem(Alloc|Free)(?!.*Async)"
)
ALLOCATES = re.compile(r"Malloc|Free|MemAlloc")
#: Calls that wait until the device is idle, and only then do what they are for.
FREES = re.compile(r"^(cuda|hip|cuMem)Free(?!.*(Async|Host))")
COPY = re.compile(r"^(cuda|hip|cu)Memcpy")
#: Pages of managed memory that move: nobody launches them, they stand in no stream.
UNIFIED = re.compile("^unified")
#: Calls that enqueue work, and those that cost next to nothing beside it unless they take long for once.
ENQUEUES = re.compile(r"Launch|^(cuda|hip|cu)(Memcpy|Memset).*Async|Event(Record|Query|Create|Destroy)|StreamWaitEvent")
CHEAP = re.compile(
    r"StreamIsCapturing|StreamGetCaptureInfo|StreamQuery|GetLastError|PeekAtLastError|GetDevice|SetDevice|CtxGet|CtxSet|"
    r"OccupancyMax|FuncGetAttribute|FuncSetAttribute|PointerGetAttribute"
)

#: Overhead records that CUPTI and Nsight Systems write about the driver and the loader, not about themselves:
#: what they load and compile for the first time, and a command buffer that is full because the GPU is behind.
LOADING = re.compile(r"(?i)(module|function)s? loading|driver compiler|^dl(open|close)\b")
BUFFER_FULL = re.compile(r"(?i)command buffer")
#: Calls that load or build code, or a graph; and the names under which compilers record themselves, and NCCL that it
#: sets up a communicator.
BUILDS = re.compile(
    r"^cu(Module|Library)Load|^(cuda|hip)(Module|Library)Load|^hipModuleLoad|^cuLink(Create|Add|Complete)|Graph(Exec)?Instantiate|"
    r"^(nvrtc|hiprtc)CompileProgram"
)
COMPILES = re.compile(
    r"(?i)\(dynamo_timed\)|CUDAGraphNode\.record|_compile\.(compile_inner|<locals>)|\b(inductor|backend|triton|jit|nvrtc)[\s_.:]*compil|"
    r"nvrtc::|\bcompile_?fx\b|\bcompile_?(kernel|fusion|program|module|graph)\b|::compile\w*|async_compile|triton\.compile|"
    r"\bautotun(e|ing)|cuda_?graph[\s_-]*captur|^ncclComm(Init|Split)|^Xla(Compile|EmitGpuAsm|Autotuner)"
)
BEGIN_CAPTURE, END_CAPTURE = re.compile("StreamBeginCapture"), re.compile("StreamEndCapture")
#: Calls that may have to set something up before they do what they are for.
FIRST_TIMES = re.compile(r"Launch(?!HostFunc)|Malloc|Free|Alloc|Create|Register|DeviceProp|Occupancy|SetDevice")
#: Ranges around whole steps of a program.
STEP = re.compile(r"(?i)step|iter|epoch|batch|train|loop|profil")
