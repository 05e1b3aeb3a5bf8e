"""Names of calls, ranges and operators, by their meaning for a device that waits for their thread."""

from __future__ import annotations

import re

_OF_DATA = (
    r"(data|batch|sample|input)(e?s)?(?![a-z])(?![\s_-]*(?!from|for|async|wait|time|queue|iter|load|fetch|next)[a-z])"
)
#: Names of ranges and operators in which a program waits for its data. Weights, layers and embeddings are not data.
DATA = re.compile(
    r"(?i)data[\s_-]*load|(?<![a-z])load(ing)?[\s_-]*(the[\s_-]*)?(next[\s_-]*)?" + _OF_DATA + r"|"
    r"(next|get|fetch|read|wait|prefetch)(ing)?[\s_-]*(for[\s_-]*)?(the[\s_-]*|next[\s_-]*)?" + _OF_DATA + r"|"
    r"(data|batch|sample|input)[\s_-]*(pipeline|wait|fetch|prefetch)|^(data|batch|dataset)([\s_-]*time)?$|"
    r"data[\s_-]*time\b|\b__next__\b|^next\(|collate"
)

ANY = re.compile(".")
#: Sleeps, which the program chose.
ASLEEP = re.compile(r"^((clock_)?nanosleep|u?sleep)(64)?$")
#: Input from a person at a terminal.
TERMINAL = re.compile(r"^(f?getw?[cs]|getw?char|v?w?scanf)$|std::cin\b")
#: OS calls in which a thread waits for another thread or process, a socket or a disk.
OS_WAIT = re.compile(
    r"^(e?poll|ppoll|epoll_p?wait\d*|p?select|futex|sem_(timed)?wait|sem_clockwait|pthread_cond_(timed|clock)?wait|"
    r"pthread_join|pthread_mutex_(timed)?lock|pthread_rwlock_(rd|wr)lock|pthread_barrier_wait|sigwait(info)?|"
    r"sigtimedwait|wait(pid|id|3|4)?|p?readv?\d*|pread64|fread|getdelim|getline|v?fw?scanf|recv(from|msg|mmsg)?|"
    r"accept4?|connect|msgrcv|mq_(timed)?receive|io_getevents|flock|fsync)(64)?$"
)
#: Those of them in which a thread may wait for another thread of its process.
FOR_A_THREAD = re.compile(r"^(futex|sem_|pthread_)")
#: Host calls of libraries that exchange data between processes; setting up a communicator is not among them.
MESSAGES = re.compile(r"^(P?MPI_(?!Init|Finalize)|uc[pst]_|nvshmemx?_|nccl(?!Comm)[A-Z])")

#: Calls that return only when the GPU has caught up.
BLOCKING = re.compile(
    r"^(cuda|hip)(Device|Stream|Event|Thread|Context|Graph)Synchronize|^cu(Ctx|Stream|Event)Synchronize|"
    r"^(cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)"
)
COPY = re.compile(r"^(cuda|hip|cu)Memcpy")
#: Pages of managed memory that move, without a launch and outside any stream.
UNIFIED = re.compile("^unified")
#: Calls that enqueue work, and cheap calls beside it.
ENQUEUES = re.compile(r"Launch|^(cuda|hip|cu)(Memcpy|Memset).*Async|Event(Record|Query|Create|Destroy)|StreamWaitEvent")
CHEAP = re.compile(
    r"StreamIsCapturing|StreamGetCaptureInfo|StreamQuery|GetLastError|PeekAtLastError|GetDevice|SetDevice|CtxGet|CtxSet|"
    r"OccupancyMax|FuncGetAttribute|FuncSetAttribute|PointerGetAttribute"
)

#: Overhead records about code that the driver loads or compiles; and all about the driver, a full queue included.
LOADS = re.compile(r"(?i)(module|function)s? loading|driver compiler|^dl(open|close)\b")
DRIVER = re.compile(LOADS.pattern + "|command buffer")
#: Calls that load or build code, and calls that build a graph.
BUILDS = re.compile(
    r"^cu(Module|Library)Load|^(cuda|hip)(Module|Library)Load|^cuLink(Create|Add|Complete)|^(nvrtc|hiprtc)CompileProgram"
)
SETS_UP = re.compile(
    r"Graph(Exec)?Instantiate|^ncclComm(Init|Split)|(?i:cuda_?graph[\s_-]*captur)|CUDAGraphNode\.record"
)
BEGIN_CAPTURE, END_CAPTURE = re.compile("StreamBeginCapture"), re.compile("StreamEndCapture")
#: Calls that may have to set something up before they do what they are for.
FIRST_TIMES = re.compile(r"Launch(?!HostFunc)|Malloc|Free|Alloc|Create|Register|DeviceProp|Occupancy|SetDevice")
