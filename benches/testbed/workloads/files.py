"""Whole files written by some threads, and read cold by others."""

from ..measure import Run
from ..targets import Files
from . import workload

GIB = 1 << 30


def written_and_read(run: Run, files: Files, threads: int, item: str = "") -> None:
    """Writes until all is stored; reads and checks cold."""
    work = run.target.write(files, threads)
    with run.phase("write", files.count, item, files.bytes, until_unmounted=True) as phase:
        phase.seconds = work() or 0
    work = run.target.read(files, threads)
    run.go_cold()
    with run.phase("read", files.count, item, files.bytes) as phase:
        phase.seconds = work() or 0


@workload
def job12(run: Run) -> None:
    """NSDF-FUSE jobs 1 and 2: 8 files of 1 GiB, one writer, one reader."""
    written_and_read(run, Files(1, 8, run.scaled(GIB)), threads=1)


@workload
def job34(run: Run) -> None:
    """NSDF-FUSE jobs 3 and 4: 8 files of 1 GiB, eight writers, eight readers."""
    written_and_read(run, Files(1, 8, run.scaled(GIB)), threads=8)


@workload
def job56(run: Run) -> None:
    """NSDF-FUSE jobs 5 and 6: 16 x 2,048 files of 64 KiB, sixteen writers, sixteen readers."""
    written_and_read(run, Files(16, run.scaled(2048), 64 << 10), threads=16, item="file")


@workload
def bigcsv(run: Run) -> None:
    """One file of 10 GB that compresses (a table as text)."""
    written_and_read(run, Files(1, 1, run.scaled(10_000_000_000), "csv"), threads=1)


@workload
def bigrandom(run: Run) -> None:
    """One file of 10 GB that does not compress."""
    written_and_read(run, Files(1, 1, run.scaled(10_000_000_000)), threads=1)


@workload
def juicebench(run: Run) -> None:
    """`juicefs bench`: 100 files of 128 KiB (1,000 at full scale, for time to tell) by one thread."""
    written_and_read(run, Files(1, run.scaled(1000, least=100), 128 << 10), threads=1, item="file")
