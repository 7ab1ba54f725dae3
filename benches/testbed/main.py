"""The command line and the rounds."""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .install import install
from .measure import Run
from .plots import write_plots
from .process import Failed, sh
from .report import markdown, tables
from .server import Endpoint, Network, Server
from .targets import Target, all_targets
from .workloads import STANDALONE, WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
EPILOG = """Each measurement is of one workload on one target with a volume, a bucket and caches of its own. Rounds go over all
workloads, and each workload over all targets in turn, the order shifted by one in every round. The first of --targets is
the one that ratios are of. Needs root (mounts, caches) and a Linux with control groups of version 2; run nothing beside it.

examples:
  benches/run --install
  benches/run --targets rfs,juicefs --workloads job12,job56,mdtest --rounds 3 --scale 0.125
  benches/run --targets rfs,juicefs --once s3fs,geesefs,bare,local --platform both --latency 20ms --bandwidth 100
  benches/run --report bench-results other-results      # the tables and plots of finished runs, put together
"""


def arguments() -> argparse.Namespace:
    """The command line."""
    ap = argparse.ArgumentParser(prog="benches/run", description="Workloads on filesystems over an object store, side by side.",
                                 epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = ap.add_argument_group("what to do instead of measuring")
    what.add_argument("--list", action="store_true", help="show targets (and what is missing for them) and workloads")
    what.add_argument("--install", action="store_true", help="install what package registries offer (apt, pip, go)")
    what.add_argument("--report", nargs="+", type=Path, metavar="DIR", help="put results of runs together, into --out")
    what = ap.add_argument_group("what to measure")
    what.add_argument("--targets", default="rfs,juicefs", help="names, separated by commas (default: %(default)s)")
    what.add_argument("--once", default="", metavar="TARGETS", help="more targets, in the first round only")
    what.add_argument("--once-workloads", default="", metavar="WORKLOADS", help="what --once targets run (default: all)")
    what.add_argument("--workloads", default="job12,job34,job56,mdtest", help="names, separated by commas (default: %(default)s)")
    what.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    what.add_argument("--scale", type=float, default=0.125, help="1 is the published size (default: %(default)s)")
    what.add_argument("--limit", type=int, default=600, metavar="SECONDS", help="most for one measurement (default: %(default)s)")
    what = ap.add_argument_group("the store")
    what.add_argument("--platform", choices=["near", "far", "both"], default="near",
                      help="near: the server on loopback; far: behind --latency and --bandwidth (default: %(default)s)")
    what.add_argument("--latency", type=milliseconds, default=20, metavar="TIME", help="that each request takes longer (default: 20ms)")
    what.add_argument("--bandwidth", type=int, default=0, metavar="MIB", help="a second in each direction; 0 is no limit")
    what.add_argument("--server", choices=["versitygw", "seaweedfs"], default="versitygw", help="what to start (default: %(default)s)")
    what.add_argument("--endpoint", metavar="URL", help="an S3 server that runs already; AWS_ACCESS_KEY_ID and "
                      "AWS_SECRET_ACCESS_KEY are its user, who may make buckets; requests are not counted then")
    what = ap.add_argument_group("programs and places")
    what.add_argument("--rfs", type=Path, help="the rfs program (default: a release build of this tree)")
    what.add_argument("--load", type=Path, help="the rfs-load program (likewise)")
    what.add_argument("--engine", type=Path, help="the rfs-engine program (likewise)")
    what.add_argument("--rfs-mount-arg", dest="rfs_mount_args", action="append", default=[], metavar="ARG",
                      help="one more argument of `rfs mount`; may be given several times")
    what.add_argument("--tree", type=Path, default=default_tree(), help="where `tree` takes its files from (default: %(default)s)")
    what.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="where volumes and caches lie (default: %(default)s)")
    what.add_argument("--out", type=Path, default=Path("bench-results"), help="results.json, report.md, *.svg (default: %(default)s)")
    return ap.parse_args()


def milliseconds(text: str) -> int:
    """`20`, `20ms` or `1s`."""
    found = re.fullmatch(r"(\d+)(ms|s)?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not a time such as 20ms")
    return int(found[1]) * (1000 if found[2] == "s" else 1)


def default_tree() -> Path:
    """Sources of many files that are here anyway: those of crates, or else this project."""
    found = sorted(Path.home().glob(".cargo/registry/src/*"))
    return found[0] if found else ROOT


class Results:
    """What was measured, on disk after each measurement."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path: Path = options.out / "results.json"
        options.out.mkdir(parents=True, exist_ok=True)
        self.results: list[dict[str, Any]] = []
        self.facts = {
            "date": time.strftime("%Y-%m-%d"), "machine": f"{os.cpu_count()} cores, {memory_gib()} GiB, {platform.platform()}",
            "disk": describe_disk(os.statvfs(options.work)), "scale": options.scale, "rounds": options.rounds, "server": options.endpoint or options.server,
            "far": Network("far", options.latency, options.bandwidth).describe() if options.platform != "near" else "not measured",
        }

    def add(self, **result: Any) -> None:
        """Keeps one result."""
        self.results.append(result)
        self.path.write_text(json.dumps({"facts": [self.facts], "results": self.results}, indent=1))


def describe_disk(disk: os.statvfs_result) -> str:
    """How much is free, and whether that is enough: caches of several targets leave a tenth free, and do without if there is no more."""
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    too_little = " (TOO LITTLE: some targets will not cache anything)" if free < 0.15 * size else ""
    return f"{free >> 30} of {size >> 30} GiB free{too_little}"


def memory_gib() -> int:
    """Of this machine."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30))


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Fails what takes longer."""
    def late(*_: object) -> None:
        raise Failed(f"not done within {seconds} s")
    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def measure(options: argparse.Namespace, server: Server, cls: type[Target], name: str) -> dict[str, Any]:
    """One workload on one new volume of one target: its phases, up to the one that failed, and that failure."""
    target = cls(server, options)
    run = Run(options, server, target)
    try:
        with time_limit(options.limit):
            target.open()
            WORKLOADS[name](run)
        return {"phases": run.result()}
    except (Failed, OSError, subprocess.SubprocessError, ValueError) as e:
        return {"phases": run.result(), "error": str(e) or type(e).__name__}
    finally:
        target.close()


def rounds(options: argparse.Namespace, network: Network, chosen: list[type[Target]], once: list[type[Target]], results: Results) -> None:
    """All rounds on one platform."""
    server = (Endpoint(options.endpoint, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]) if options.endpoint
              else Server(options.server, options.load, network))
    try:
        for number in range(options.rounds):
            for name in options.workloads:
                if name in STANDALONE:
                    continue
                shift = number % len(chosen)
                more = once if number == 0 and name in (options.once_workloads or options.workloads) else []
                for cls in chosen[shift:] + chosen[:shift] + more:
                    said = f"{time.strftime('%T')} {network.name}, round {number + 1}, {name}, {cls.name}"
                    print(said, file=sys.stderr, flush=True)
                    result = measure(options, server, cls, name)
                    if "error" in result:
                        print(f"  failed: {result['error'][:1500]}", file=sys.stderr)
                    results.add(platform=network.name, round=number, workload=name, target=cls.name, **result)
    finally:
        server.close()


def alone(options: argparse.Namespace, results: Results) -> None:
    """The workloads that need no target."""
    for number in range(options.rounds):
        for name in options.workloads:
            if name in STANDALONE:
                print(f"{time.strftime('%T')} round {number + 1}, {name}", file=sys.stderr, flush=True)
                for target, rates in STANDALONE[name](options).items():
                    phases = [{"name": operation, "count": 1, "item": "operation", "seconds": 1 / rate} for operation, rate in rates.items()]
                    results.add(platform="here", round=number, workload=name, target=target, phases=phases)


def together(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of several runs as one; no round of one pairs with a round of another."""
    merged, first = [], 0
    for run in runs:
        merged += [{**result, "round": first + result["round"]} for result in run]
        first = max((result["round"] + 1 for result in merged), default=0)
    return merged


def report(facts: list[dict[str, Any]], results: list[dict[str, Any]], directory: Path) -> str:
    """Writes report.md and the plots."""
    describe = {name: (function.__doc__ or "").splitlines()[0] for name, function in {**WORKLOADS, **STANDALONE}.items()}
    text = markdown(facts, results, describe)
    (directory / "report.md").write_text(text)
    write_plots(tables(results), directory)
    return text


def build(options: argparse.Namespace) -> None:
    """Builds the programs that were not named."""
    packages = {"rfs": "rfs", "load": "rfs-load"} | ({"engine": "rfs-engine"} if "engine" in options.workloads else {})
    wanted = [name for name in packages if not getattr(options, name)]
    if wanted:
        flags = [flag for name in wanted for flag in ("--package", packages[name])]
        subprocess.run(["cargo", "build", "--quiet", "--release", *flags], cwd=ROOT, check=True)
        meta = json.loads(sh("cargo", "metadata", "--format-version", "1", "--no-deps", cwd=ROOT))
        for name in wanted:
            setattr(options, name, Path(meta["target_directory"]) / "release" / packages[name])


def pick(names: str, known: dict[str, Any], what: str) -> list[str]:
    """Names separated by commas, all of them known."""
    found = [name for name in names.split(",") if name]
    if unknown := [name for name in found if name not in known]:
        sys.exit(f"no {what} {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return found


def main() -> int:
    """Runs the testbed; 1 if a measurement failed."""
    options = arguments()
    # As Ctrl-C does: what was started is ended and unmounted.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    targets = all_targets()
    if options.list:
        for name, cls in sorted(targets.items()):
            why = cls.missing()
            print(f"target   {name:16} {(cls.__doc__ or '').splitlines()[0]}{f' (missing: {why})' if why else ''}")
        for name, function in sorted({**WORKLOADS, **STANDALONE}.items()):
            print(f"workload {name:16} {(function.__doc__ or '').splitlines()[0]}")
        return 0
    if options.install:
        install()
        return 0
    if options.report:
        runs = [json.loads((directory / "results.json").read_text()) for directory in options.report]
        options.out.mkdir(parents=True, exist_ok=True)
        print(report([fact for run in runs for fact in run["facts"]], together([run["results"] for run in runs]), options.out))
        return 0
    options.workloads = pick(options.workloads, {**WORKLOADS, **STANDALONE}, "workload")
    options.once_workloads = pick(options.once_workloads, WORKLOADS, "workload")
    chosen, once = ([targets[name] for name in pick(names, targets, "target")] for names in (options.targets, options.once))
    missing = {cls.name: why for cls in chosen + once if (why := cls.missing())}
    for name, why in missing.items():
        print(f"missing: {name}: {why}", file=sys.stderr)
    chosen, once = ([cls for cls in classes if cls.name not in missing] for classes in (chosen, once))
    if options.endpoint and options.platform != "near":
        sys.exit("--platform far needs a server that is started here: leave out --endpoint, or put the delay in front of it yourself")
    build(options)
    results = Results(options)
    print(f"disk: {results.facts['disk']}", file=sys.stderr)
    results.facts["versions"] = "; ".join(f"{cls.name}: {found}" for cls in chosen + once if (found := cls.version(options)))
    if missing:
        results.facts["missing"] = "; ".join(f"{name} ({why})" for name, why in missing.items())
    for network in networks(options) if set(options.workloads) - STANDALONE.keys() else []:
        rounds(options, network, chosen, once, results)
    alone(options, results)
    print(report([results.facts], results.results, options.out))
    return 1 if any("error" in result for result in results.results) else 0


def networks(options: argparse.Namespace) -> list[Network]:
    """The platforms that were chosen."""
    near, far = Network("near"), Network("far", options.latency, options.bandwidth)
    return {"near": [near], "far": [far], "both": [near, far]}[options.platform]
