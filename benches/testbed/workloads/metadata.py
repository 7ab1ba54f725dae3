"""Names and attributes."""

from ..measure import Run
from ..process import Failed
from . import workload


def mdtest_phases(run: Run, threads: int, items: int) -> None:
    """rfs-load times each phase; the costs are those of all phases together."""
    if run.target.kind == "store":
        raise Failed("a store has no directories")
    with run.phase("all phases", 1, "operation") as all_phases:
        report = run.load("mdtest", run.target.mount_point / "m", "--items", items, "--threads", threads)
        all_phases.count = report["ops"] * len(report["per_second"])
    for name, rate in report["per_second"].items():
        run.rate(name.replace("_", " "), rate)


@workload
def mdtest(run: Run) -> None:
    """mdtest: 20,000 directories and empty files made, looked at, opened, renamed and removed by one thread."""
    mdtest_phases(run, 1, run.scaled(20_000, least=500))


@workload
def mdtest4(run: Run) -> None:
    """mdtest by four threads, each in a directory of its own."""
    mdtest_phases(run, 4, run.scaled(10_000, least=250))
