"""What is measured. A workload is a function of (run, target); `run.phase` measures one phase of it.

Write phases end when the target is unmounted, that is when everything is durable in the store. Shapes are those that were
published (NSDF-FUSE's six jobs, mdtest, `juicefs bench`), times --scale.
"""
import shutil
import sys

WORKLOADS = {}


def workload(function):
    WORKLOADS[function.__name__] = function
    return function


def whole_files(run, target, writers, readers, dirs, files, size, content="random"):
    """Writes files until durable, then reads them cold."""
    args = ["--dirs", dirs, "--files", files, "--size", size, "--content", content]
    with run.phase("write", work=dirs * files, bytes=dirs * files * size, until_unmounted=True):
        run.load("write", target.mount_point / "w", *args, "--threads", writers)
    target.forget_caches()
    run.drop_caches()
    target.mount()
    with run.phase("read", work=dirs * files, bytes=dirs * files * size):
        run.load("read", target.mount_point / "w", *args, "--threads", readers)


@workload
def job12(run, target):
    """NSDF-FUSE 1 and 2: 8 files of 1 GiB, one writer, one reader."""
    whole_files(run, target, 1, 1, 1, 8, int(run.scale * (1 << 30)))


@workload
def job34(run, target):
    """NSDF-FUSE 3 and 4: 8 files of 1 GiB, eight writers, eight readers."""
    whole_files(run, target, 8, 8, 1, 8, int(run.scale * (1 << 30)))


@workload
def job56(run, target):
    """NSDF-FUSE 5 and 6: 16 x 2,048 files of 64 KiB, sixteen writers, sixteen readers."""
    whole_files(run, target, 16, 16, 16, max(1, int(2048 * run.scale)), 65536)


@workload
def bigcsv(run, target):
    """One 10 GB text file."""
    whole_files(run, target, 1, 1, 1, 1, int(run.scale * 10_000_000_000), content="csv")


@workload
def juicebench(run, target):
    """`juicefs bench`: 1 file of 1 GiB and 100 files of 128 KiB."""
    whole_files(run, target, 1, 1, 1, max(1, int(100 * run.scale * 10)), 128 << 10)


@workload
def mdtest(run, target):
    """mdtest: directories and empty files, one process."""
    items = max(100, int(20_000 * run.scale))
    report = run.load("mdtest", target.mount_point / "m", "--items", items)
    for name, rate in report["per_second"].items():
        run.figure(name, rate, "1/s")


@workload
def random4k(run, target):
    """4 KiB random overwrites of a 256 MiB file until durable, then random reads cold."""
    size, count = 256 << 20, max(100, int(20_000 * run.scale))
    run.load("write", target.mount_point / "r", "--files", 1, "--size", size)
    target.remount_cold()
    file = target.mount_point / "r/d0000/f000000"
    with run.phase("write4k", work=count, until_unmounted=True):
        run.load("random-write", file, "--size", size, "--count", count)
    target.forget_caches()
    run.drop_caches()
    target.mount()
    with run.phase("read4k", work=count // 4):
        run.load("random-read", file, "--size", size, "--count", count // 4)


PANDAS = """
import sys, pandas
frame = pandas.DataFrame({"a": range(1000), "b": [i / 7 for i in range(1000)]})
for i in range(int(sys.argv[2])):
    frame.to_csv(sys.argv[1], index=False)
"""


@workload
def pandas(run, target):
    """100 times: a small table is written over the last one."""
    with run.phase("overwrite", work=100):
        run.sh(sys.executable, "-c", PANDAS, target.mount_point / "table.csv", 100)


@workload
def tree(run, target):
    """cp -r, find, du, rm -rf of this project's own dependencies' sources, or any tree (--tree)."""
    source = run.options.tree
    with run.phase("copy", work=1):
        run.sh("cp", "-r", source, target.mount_point / "t")
    with run.phase("find", work=1):
        run.sh("find", target.mount_point / "t", "-size", "+1000k")
    with run.phase("remove", work=1):
        run.sh("rm", "-rf", target.mount_point / "t")
