"""A source tree: unpacked, listed, cloned, removed."""

import shutil
from functools import cache
from pathlib import Path

from ..measure import Run
from ..process import Failed, sh
from . import workload

GIT = ["git", "-c", "user.name=bench", "-c", "user.email=bench@example.invalid", "-c", "gc.auto=0", "-c", "core.fsync=none"]


@workload
def tree(run: Run) -> None:
    """A source tree of 20,000 files: untar, find, du, git clone, git status, rm -rf."""
    target = run.target
    if target.kind == "store":
        raise Failed("a store has no directories")
    count, corpus = _corpus(run.options.tree, run.options.work, run.scaled(20_000, least=300))
    with run.phase("untar until stored", count, "file", until_unmounted=True):
        run.sh("tar", "--extract", "--no-same-owner", "--file", corpus / "tree.tar", "--directory", target.mount_point)
    run.go_cold()
    # The programs are no part of the tree: they need not come from a cold disk.
    run.sh("find", corpus / "tree.tar", "-size", "+1000k")
    with run.phase("find cold", count, "file"):
        run.sh("find", target.mount_point, "-size", "+1000k")
    with run.phase("du", count, "file"):
        run.sh("du", "--summarize", target.mount_point)
    with run.phase("rm -rf", count, "file"):
        run.sh("rm", "-rf", target.mount_point / "tree")
    with run.phase("git clone until stored", count, "file", until_unmounted=True):
        run.sh(*GIT, "clone", "--quiet", f"file://{corpus}/tree", target.mount_point / "clone")
    run.go_cold()
    run.sh(*GIT, "ls-files", "--modified", "--", "no such file", cwd=corpus / "tree")
    with run.phase("git status cold", count, "file"):
        run.sh(*GIT, "status", "--porcelain", cwd=target.mount_point / "clone")


@cache
def _corpus(source: Path, work: Path, wanted: int) -> tuple[int, Path]:
    """Copies parts of `source` until they hold enough files, as a tar file and as a git repository; how many files."""
    corpus = work / f"rfs-bench-corpus-{wanted}"
    shutil.rmtree(corpus, ignore_errors=True)
    (corpus / "tree").mkdir(parents=True)
    count = 0
    for part in sorted(source.iterdir()):
        if count >= wanted:
            break
        if part.name in (".git", "target", "bench-results") or part.is_symlink():
            continue
        copy = corpus / "tree" / part.name
        if part.is_dir():
            shutil.copytree(part, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
            count += sum(1 for path in copy.rglob("*") if path.is_file())
        elif part.is_file():
            shutil.copy2(part, copy)
            count += 1
    if not count:
        raise Failed(f"no files in {source}: name another directory with --tree")
    sh("tar", "--create", "--file", corpus / "tree.tar", "--directory", corpus, "tree")
    sh(*GIT, "init", "--quiet", corpus / "tree")
    sh(*GIT, "add", "--all", "--force", cwd=corpus / "tree")
    sh(*GIT, "commit", "--quiet", "--message", "all", cwd=corpus / "tree")
    return count, corpus
