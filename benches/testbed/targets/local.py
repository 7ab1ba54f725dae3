"""The local directory: what no network filesystem can beat for long."""

from ..process import sh
from . import Target


class Local(Target):
    """The disk below the other targets; unmounting is syncfs(2)."""

    name = "local"
    kind = "reference"

    def mount(self) -> None:
        pass

    def unmount(self) -> None:
        sh("sync", "--file-system", self.mount_point)
