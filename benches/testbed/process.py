"""Running programs, and what the kernel says they cost."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

# Not touched, so that nothing is swapped out or forgotten for it.
MEMORY_LEFT_ALONE = 1 << 30


class Failed(Exception):
    """A command failed, or a target cannot do what was asked; the text tells."""


def sh(*argv: object, env: dict[str, str] | None = None, timeout: float = 1800, cwd: Path | None = None,
       group: "Group | None" = None) -> str:
    """Runs a command to its end, as one of `group`; its output. Failed on any other end than 0."""
    words = [str(word) for word in argv]
    enter = group.enter() if group else []
    try:
        done = subprocess.run([*enter, *words], env={**os.environ, **(env or {})}, cwd=cwd, timeout=timeout, check=False,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except subprocess.TimeoutExpired as e:
        raise Failed(f"{' '.join(words)}: not done after {timeout:.0f} s") from e
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if line.strip()), "")
        raise Failed(f"{Path(words[0]).name}: exit {done.returncode}: {first}\n{' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def program(name: str) -> str | None:
    """A program on PATH or where `go install` and `cargo install` put it."""
    home = Path.home()
    return shutil.which(name, path=f"{os.environ['PATH']}:{home}/go/bin:{home}/.cargo/bin")


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Waits until `condition()` holds; looks so often that it is no part of what is measured."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Failed(f"no {what} within {seconds} s")
        time.sleep(0.001)


def is_mounted(path: Path) -> bool:
    """Whether something is mounted exactly there."""
    with open("/proc/self/mountinfo") as lines:
        return any(line.split()[4] == str(path) for line in lines)


def drop_caches() -> None:
    """Forgets the kernel's cached pages, names and inodes."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def touch_free_memory(wanted: int) -> None:
    """Uses `wanted` bytes of the free memory once and frees them again.

    A virtual machine that gives free memory back to its host pays for the first use of each page after that: five times
    what it costs to copy into it. Which phase pays would be chance.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - MEMORY_LEFT_ALONE
    if (size := min(wanted, free)) > 0:
        sh(sys.executable, "-c", f"import mmap; mmap.mmap(-1, {size}, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE)")


class Group:
    """Processes that count as one: a control group, so that those which ended already and their children count too."""

    _number = 0

    def __init__(self, name: str) -> None:
        Group._number += 1
        self.dir = _cgroup_root() / f"rfs-bench-{os.getpid()}-{Group._number}-{name}"
        self.dir.mkdir()
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *argv: object, log: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts a long-running command in the group, its output appended to `log`."""
        with open(log, "ab") as out:
            process = subprocess.Popen([*self.enter(), *map(str, argv)], env={**os.environ, **(env or {})},
                                       stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        self.started.append(process)
        return process

    def enter(self) -> list[str]:
        """What, put before a command, makes it one of the group."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.dir / "cgroup.procs")]

    def pids(self) -> list[int]:
        """The live processes."""
        return [int(pid) for pid in (self.dir / "cgroup.procs").read_text().split()]

    def cpu_seconds(self) -> float:
        """User and system seconds of all that ever ran in the group."""
        fields = dict(line.split() for line in (self.dir / "cpu.stat").read_text().splitlines())
        return int(fields["usage_usec"]) / 1e6

    def forget_peaks(self) -> None:
        """Lets the peak of each process's memory begin anew."""
        for pid in self.pids():
            try:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            except OSError:
                pass  # it has ended

    def peak_mib(self) -> float:
        """The sum of the live processes' peaks of resident memory, in MiB."""
        return sum(_peak_kib(pid) for pid in self.pids()) / 1024

    def wait_empty(self, seconds: float, what: str) -> None:
        """Waits until no process is left."""
        for process in self.started:
            process.poll()
        wait_for(lambda: all(p.poll() is not None for p in self.started) and not self.pids(), seconds, what)

    def terminate(self, seconds: float, what: str, signal_number: int = signal.SIGTERM) -> None:
        """Asks all processes to end, and waits for it."""
        for pid in self.pids():
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                pass
        self.wait_empty(seconds, what)

    def close(self) -> None:
        """Ends what still runs, kindly first."""
        for signal_number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
            try:
                self.terminate(seconds, "end of its processes", signal_number)
                break
            except Failed:
                continue
        try:
            self.dir.rmdir()
        except OSError:
            pass  # a process that cannot be killed (a hung mount) keeps it; the next test does not mind


class PeakSampler:
    """The peak of a group's memory while inside, also of processes that end meanwhile."""

    INTERVAL = 0.1

    def __init__(self, groups: list[Group]) -> None:
        self.groups, self.mib = groups, 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _sample(self) -> None:
        self.mib = max(self.mib, sum(group.peak_mib() for group in self.groups))

    def _run(self) -> None:
        while not self._done.wait(self.INTERVAL):
            self._sample()

    def __enter__(self) -> "PeakSampler":
        for group in self.groups:
            group.forget_peaks()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._sample()


def _peak_kib(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    except OSError:
        pass  # it has ended
    return 0


def _cgroup_root() -> Path:
    with open("/proc/mounts") as lines:
        for line in lines:
            fields = line.split()
            if fields[2] == "cgroup2":
                return Path(fields[1])
    raise Failed("CPU is counted by control groups of version 2, and none are mounted")
