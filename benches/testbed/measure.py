"""One workload on one target in one round: the phases and what each of them cost."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .access_log import kinds
from .process import PeakSampler, drop_caches, sh, touch_free_memory
from .server import Server
from .targets import Target

# Touched for a phase besides what it reads or writes.
MEMORY_OF_A_PHASE = 2 << 30


@dataclass
class Phase:
    """What one phase did and cost. `item` is empty where items of a size do not compare (a 1 GiB file)."""

    name: str
    count: int
    item: str
    seconds: float
    bytes: int | None = None
    cpu: float | None = None
    meta_cpu: float | None = None
    server_cpu: float | None = None
    peak_mib: float | None = None
    operations: dict[str, int] | None = None
    up: int | None = None
    down: int | None = None

    def rate(self) -> float:
        """MiB a second where only bytes compare, else items a second."""
        if self.bytes and not self.item:
            return self.bytes / self.seconds / (1 << 20)
        return self.count / self.seconds

    def requests(self) -> dict[str, int] | None:
        """Requests to the store by kind."""
        return None if self.operations is None else kinds(self.operations)


class Run:
    """Collects the phases of one workload on one target."""

    def __init__(self, options: Any, server: Server, target: Target) -> None:
        self.options, self.server, self.target = options, server, target
        self.scale: float = options.scale
        self.phases: list[Phase] = []

    def scaled(self, count: float, least: int = 1) -> int:
        """A published number times --scale."""
        return max(least, int(count * self.scale))

    def load(self, *args: object) -> dict[str, Any]:
        """Runs rfs-load; what it printed."""
        return json.loads(sh(self.options.load, *args))

    sh = staticmethod(sh)

    def rate(self, name: str, per_second: float, item: str = "operation") -> None:
        """A phase that a load program timed itself; costs are those of the phase around it."""
        self.phases.append(Phase(name, 1, item, 1 / per_second))

    @contextlib.contextmanager
    def phase(self, name: str, count: int = 1, item: str = "", size: int | None = None, until_unmounted: bool = False,
              ) -> Iterator[Phase]:
        """Measures what is done inside; with `until_unmounted` until all of it is stored and the target unmounted.

        What is done inside may set `seconds` (where a load program times itself; the unmount is added) and `count`.
        """
        target, phase = self.target, Phase(name, count, item, 0, size)
        # Enough for the bytes at the program, in the filesystem and in the server.
        touch_free_memory(3 * (size or 0) + MEMORY_OF_A_PHASE)
        with PeakSampler(target.groups()) as peak:
            mark, cpu = self.server.mark(), target.cpu_seconds()
            begin = time.monotonic()
            yield phase
            done = time.monotonic()
            if until_unmounted:
                target.unmount()
            phase.seconds = (phase.seconds or done - begin) + time.monotonic() - done
            spent, now = self.server.since(mark), target.cpu_seconds()
        if target.kind != "reference":
            phase.cpu, phase.meta_cpu, phase.peak_mib = now[0] - cpu[0], now[1] - cpu[1], peak.mib
            phase.server_cpu, phase.operations, phase.up, phase.down = spent.cpu, spent.operations, spent.up, spent.down
        self.phases.append(phase)

    def go_cold(self) -> None:
        """After an unmount: mounts with no cached data on this machine but the server's own."""
        self.target.forget_caches()
        self.target.go_cold()
        self.target.mount()

    def remount(self) -> None:
        """Mounts anew without what is in memory; what the target caches on the local disk stays."""
        self.target.unmount()
        drop_caches()
        self.target.mount()

    def result(self) -> list[dict[str, Any]]:
        """For the JSON file."""
        return [asdict(phase) for phase in self.phases]
