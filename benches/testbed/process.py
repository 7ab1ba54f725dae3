"""Running programs, and what the kernel says they cost."""
import os
import signal
import subprocess
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A command failed; the text holds its output."""


def sh(*argv, env=None, timeout=3600, cwd=None):
    """Runs a command to its end; its output. Failed on any other end than 0."""
    done = subprocess.run([str(a) for a in argv], env=dict(os.environ, **(env or {})), cwd=cwd, timeout=timeout,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise Failed("%s: exit %d\n%s%s" % (" ".join(map(str, argv)), done.returncode, done.stdout[-3000:], done.stderr[-3000:]))
    return done.stdout


def start(*argv, log, env=None):
    """Starts a long-running command with its output in `log`."""
    out = open(log, "ab")
    return subprocess.Popen([str(a) for a in argv], env=dict(os.environ, **(env or {})), stdin=subprocess.DEVNULL,
                            stdout=out, stderr=out, start_new_session=True)


def stop(process, seconds=60):
    """Ends a process that `start` started, kindly first."""
    if process and process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(condition, seconds, what):
    """Waits until `condition()` holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Failed("no %s within %s s" % (what, seconds))
        time.sleep(0.05)


def is_mounted(path):
    path = str(path)
    with open("/proc/self/mountinfo") as f:
        return any(line.split()[4] == path for line in f)


def tree_of(pid):
    """A process and all its descendants."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        p = todo.pop()
        found.append(p)
        todo += children.get(p, [])
    return found


def cpu_seconds(pids):
    """User and system seconds of live processes and of their reaped children."""
    total = 0
    for pid in pids:
        try:
            fields = Path("/proc/%d/stat" % pid).read_text().rsplit(")", 1)[1].split()
            total += sum(map(int, fields[11:15]))
        except OSError:
            pass
    return total / TICKS


def peak_mib(pids):
    """Sum of the peak resident memory of live processes, in MiB."""
    total = 0
    for pid in pids:
        try:
            for line in Path("/proc/%d/status" % pid).read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) / 1024
        except OSError:
            pass
    return total


def drop_caches():
    """Forgets the kernel's cached pages, names and inodes."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
