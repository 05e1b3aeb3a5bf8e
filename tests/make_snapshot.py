"""A caching allocator in miniature, event by event, that writes snapshots as PyTorch does and knows the truth.

It follows c10/cuda/CUDACachingAllocator.cpp step by step (best fit, splitting, merging, waiting for streams), with
plain lists: slow, and independent of how nsightkit reconstructs the same amounts from the events.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from nsightkit.errors import reading
from nsightkit.trace import snapshot, snapshot_child

MIB = 1 << 20
T0_US = 1_700_000_000_000_000


def tables(taken: Any) -> snapshot.Snapshot:
    """A snapshot as it is read, without a process that decodes a file."""
    with reading("snapshot"):
        return snapshot._checked_snapshot(Path("snapshot"), snapshot_child.tables(taken))


class Allocator:
    """One device's allocator; ``truth`` has a row after each event: allocated, active, requested, reserved."""

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.segments: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.truth: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]
        self.free_now: list[tuple[int, int, int]] = [(0, 0, 0)]  # in split segments, in whole ones, largest
        self.next_address = 0x7F0000000000
        self.annotations: list[dict[str, Any]] = []

    def _event(self, action: str, addr: int, size: int, stream: int = 0, frames: Any = (), **more: Any) -> None:
        where = {"device_free": more.pop("device_free")} if action == "oom" else {"addr": addr}
        event = {"action": action, **where, "size": size, "stream": stream, "time_us": T0_US + 7 * len(self.events)}
        self.events.append(event | {"frames": list(frames)} | more)
        self.truth.append(self.counted())
        self.free_now.append(self.spaces())

    def mark(self, name: str, stage: str, device: int = 0) -> None:
        """Record that a range begins (``START``) or ends (``END``) between two events."""
        at_us = T0_US + 7 * len(self.events) - 3
        self.annotations.append({"device": device, "time_us": at_us, "name": name, "stage": stage})

    def counted(self) -> tuple[int, int, int, int]:
        blocks = [b for s in self.segments for b in s["blocks"]]
        return (
            sum(b["size"] for b in blocks if b["state"] == "active_allocated"),
            sum(b["size"] for b in blocks if b["state"] != "inactive"),
            sum(b["requested_size"] for b in blocks if b["state"] != "inactive"),
            sum(s["total_size"] for s in self.segments),
        )

    def spaces(self) -> tuple[int, int, int]:
        split = whole = largest = 0
        for segment in self.segments:
            free = [b["size"] for b in segment["blocks"] if b["state"] == "inactive"]
            largest = max([largest, *free])
            if len(free) == len(segment["blocks"]):
                whole += sum(free)
            else:
                split += sum(free)
        return split, whole, largest

    def rounded(self, size: int) -> int:
        return max(-(-size // 512), 1) * 512

    def malloc(self, requested: int, stream: int = 0, frames: Any = (), **more: Any) -> int:
        size = self.rounded(requested)
        kind = "small" if size <= MIB else "large"
        segment, block = self._fit(size, kind, stream) or self._grow(size, kind, stream, frames)
        rest = block["size"] - size
        if kind == "small" or segment["is_expandable"]:
            splits = rest >= 512
        else:
            splits = rest > MIB
        if splits:
            at = segment["blocks"].index(block)
            block["size"] = size
            segment["blocks"].insert(at + 1, self._block(block["address"] + size, rest))
        block |= {"requested_size": requested, "state": "active_allocated", "frames": list(frames)}
        self._event("alloc", block["address"], requested, stream, frames, **more)
        return block["address"]

    @staticmethod
    def _block(address: int, size: int) -> dict[str, Any]:
        return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}

    def _fit(self, size: int, kind: str, stream: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
        found = [
            (b["size"], b["address"], s, b)
            for s in self.segments
            if (s["segment_type"], s["stream"]) == (kind, stream)
            for b in s["blocks"]
            if b["state"] == "inactive" and b["size"] >= size
        ]
        if not found:
            return None
        best = min(found, key=lambda f: f[:2])
        return best[2], best[3]

    def _grow(self, size: int, kind: str, stream: int, frames: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.expandable:
            page = 2 * MIB if kind == "small" else 20 * MIB
            same = [s for s in self.segments if (s["segment_type"], s["stream"]) == (kind, stream)]
            segment = same[-1] if same else None
            tail = segment["blocks"][-1] if segment and segment["blocks"][-1]["state"] == "inactive" else None
            more = -(-(size - (tail["size"] if tail else 0)) // page) * page
            if segment is None:
                segment = self._segment(self.next_address, 0, kind, stream)
                segment["is_expandable"] = True
                self.next_address += 1 << 40
            address = segment["address"] + segment["total_size"]
            segment["total_size"] += more
            if tail:
                tail["size"] += more
            else:
                tail = self._block(address, more)
                segment["blocks"].append(tail)
            self._event("segment_map", address, more, stream, frames)
            return segment, tail
        total = 2 * MIB if kind == "small" else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        segment = self._segment(self.next_address, total, kind, stream)
        # Neighbours in address space, as cudaMalloc likes to have them: blocks never merge across.
        self.next_address += total
        segment["blocks"].append(self._block(segment["address"], total))
        self._event("segment_alloc", segment["address"], total, stream, frames)
        return segment, segment["blocks"][0]

    def _segment(self, address: int, total: int, kind: str, stream: int) -> dict[str, Any]:
        segment = {
            "device": 0,
            "address": address,
            "total_size": total,
            "stream": stream,
            "segment_type": kind,
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [],
        }
        self.segments.append(segment)
        return segment

    def _find(self, address: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return next((s, b) for s in self.segments for b in s["blocks"] if b["address"] == address)

    def free(self, address: int, *, waits: bool = False, frames: Any = ()) -> None:
        segment, block = self._find(address)
        block["state"] = "active_pending_free"
        self._event("free_requested", address, block["requested_size"], segment["stream"], frames)
        if not waits:
            self.complete(address, frames=frames)

    def complete(self, address: int, frames: Any = ()) -> None:
        segment, block = self._find(address)
        requested = block["requested_size"]
        block |= {"state": "inactive", "requested_size": 0, "frames": []}
        merged: list[dict[str, Any]] = []
        for each in segment["blocks"]:
            if merged and merged[-1]["state"] == each["state"] == "inactive":
                merged[-1]["size"] += each["size"]
            else:
                merged.append(each)
        segment["blocks"] = merged
        self._event("free_completed", address, requested, segment["stream"], frames)

    def empty_cache(self) -> None:
        for segment in list(self.segments):
            last = segment["blocks"][-1]
            if segment["is_expandable"]:
                page = 2 * MIB if segment["segment_type"] == "small" else 20 * MIB
                size = last["size"] // page * page
                if last["state"] != "inactive" or not size:
                    continue
                last["size"] -= size
                segment["total_size"] -= size
                if not last["size"]:
                    segment["blocks"].pop()
                if not segment["blocks"]:
                    self.segments.remove(segment)
                self._event("segment_unmap", segment["address"] + segment["total_size"], size, segment["stream"])
            elif len(segment["blocks"]) == 1 and last["state"] == "inactive":
                self.segments.remove(segment)
                self._event("segment_free", segment["address"], segment["total_size"], segment["stream"])

    def oom(self, size: int, device_free: int, frames: Any = ()) -> None:
        self._event("oom", 0, size, 0, frames, device_free=device_free)

    def snapshot(self, keep: int | None = None) -> dict[str, Any]:
        """Give what ``torch.cuda.memory._snapshot`` would; the ring buffer kept the last `keep` events."""
        segments = []
        for segment in self.segments:
            active = [block for block in segment["blocks"] if block["state"] != "inactive"]
            allocated = [block for block in active if block["state"] == "active_allocated"]
            amounts = {
                "allocated_size": sum(block["size"] for block in allocated),
                "active_size": sum(block["size"] for block in active),
                "requested_size": sum(block["requested_size"] for block in active),
                "blocks": [dict(block) for block in segment["blocks"]],
            }
            segments.append(segment | amounts)
        sizes = {str(1 << i): 0 for i in range(16)}
        return {
            "segments": segments,
            "device_traces": [self.events if keep is None else self.events[len(self.events) - keep :]],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1,
                "expandable_segments": self.expandable,
                "roundup_power2_divisions": sizes,
            },
            "external_annotations": self.annotations,
        }


def random_program(seed: int, steps: int, **settings: Any) -> Allocator:
    """Allocate, free, wait and empty the cache at random, over sizes that exercise every rule."""
    chance = random.Random(seed)
    allocator = Allocator(**settings)
    live: list[int] = []
    waiting: list[int] = []
    for _ in range(steps):
        dice = chance.random()
        if dice < 0.52 or not live:
            sizes = {
                "tiny": (1, 2000),
                "small": (512, MIB),
                "odd": (MIB - 600, MIB + 600),
                "large": (MIB, 9 * MIB),
                "huge": (9 * MIB, 40 * MIB),
            }
            size = chance.randint(*sizes[chance.choice(tuple(sizes))])
            live.append(allocator.malloc(size, stream=chance.choice((0, 0, 0, 7))))
        elif dice < 0.94:
            address = live.pop(chance.randrange(len(live)))
            waits = chance.random() < 0.15
            allocator.free(address, waits=waits)
            if waits:
                waiting.append(address)
        elif dice < 0.97 and waiting:
            allocator.complete(waiting.pop(chance.randrange(len(waiting))))
        else:
            allocator.empty_cache()
    return allocator


TORCH = "/usr/lib/python3.11/site-packages/torch"


def frame(name: str, filename: str = "/home/someone/project/train.py", line: int = 1) -> dict[str, Any]:
    """Make a frame of a call stack as PyTorch records it."""
    return {"name": name, "filename": filename, "line": line}
