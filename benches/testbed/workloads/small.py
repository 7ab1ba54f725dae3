"""Small reads and writes inside files."""

import json
import sys
import time

from ..measure import Run
from ..process import Failed, drop_caches, sh
from ..targets import Files
from . import workload

# Times itself: importing pandas takes longer than the writes.
PANDAS = """
import sys, time, pandas
frame = pandas.DataFrame({"a": range(1000), "b": [i / 7 for i in range(1000)]})
begin = time.monotonic()
for i in range(int(sys.argv[2])):
    frame.to_csv(sys.argv[1], index=False)
print(time.monotonic() - begin)
"""


@workload
def pandas(run: Run) -> None:
    """100 times: pandas writes a small table over the last one; the loop alone, and once more until stored."""
    if run.target.kind == "store":
        raise Failed("a store has no files to write over")
    for name, until_unmounted in (("overwrite", False), ("overwrite until stored", True)):
        with run.phase(name, 100, "file", until_unmounted=until_unmounted) as phase:
            phase.seconds = float(run.sh(sys.executable, "-c", PANDAS, run.target.mount_point / "table.csv", 100))


@workload
def fio4k(run: Run) -> None:
    """fio, 4 KiB at random in a file of 1 GiB: 40,000 reads cold, from the disk cache, without page cache, warm; 40,000 writes."""
    if run.target.kind == "store":
        raise Failed("a store cannot change a part of an object")
    size, count = run.scaled(1 << 30, least=64 << 20), run.scaled(40_000, least=500)
    run.target.write(Files(1, 1, size), 1)()
    run.target.unmount()
    run.go_cold()
    # The same blocks in each phase.
    for name, before in (("read cold", None), ("read from the disk cache", run.remount), ("read without page cache", drop_caches),
                         ("read warm", None)):
        if before:
            before()
        with run.phase(name, count, "operation") as phase:
            phase.seconds = _fio(run, "randread", 1, size, count, "--invalidate=0")
    run.target.unmount()
    run.go_cold()
    # Others than those that were read.
    with run.phase("write until stored", count, "operation", until_unmounted=True) as phase:
        _fio(run, "randwrite", 2, size, count, "--end_fsync=1", "--exec_prerun=date +%s.%N")
        # From the job's begin on; until fio has ended, the target stores on.
        phase.seconds = time.time() - float((run.target.dir / "bench.prerun.txt").read_text())


def _fio(run: Run, kind: str, seed: int, size: int, count: int, *more: str) -> float:
    """Runs fio on the file that rfs-load wrote; the seconds that its job took, without the program's own start."""
    report = sh("fio", "--name=bench", f"--filename={run.target.mount_point}/files/d0000/f000000", f"--rw={kind}", "--bs=4k",
                f"--size={size}", f"--io_size={count * 4096}", "--ioengine=psync", "--fadvise_hint=random", f"--randseed={seed}",
                "--output-format=json", *more, cwd=run.target.dir)
    # Some versions print notes before the report.
    job = json.loads(report[report.index("{"):])["jobs"][0]
    return job["read" if kind == "randread" else "write"]["runtime"] / 1000
