"""The S3 server on loopback, with an optional faraway network in front."""
import re
import shutil
import socket
import tempfile
from pathlib import Path

from .process import Failed, start, stop, wait_for

ACCESS, SECRET, BUCKET = "bench", "bench-secret", "bench"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def answers(port):
    with socket.socket() as s:
        s.settimeout(0.5)
        return s.connect_ex(("127.0.0.1", port)) == 0


class Server:
    """versitygw over a directory; `endpoint` is what targets use."""

    def __init__(self, load, latency_ms=0, mib_per_second=0, endpoint=None):
        self.dir = Path(tempfile.mkdtemp(prefix="rfs-bench-s3-"))
        self.process = self.proxy = None
        if endpoint:
            self.endpoint = endpoint
            return
        program = shutil.which("versitygw") or str(Path.home() / "go/bin/versitygw")
        if not Path(program).exists():
            raise Failed("no versitygw: run benches/run --install")
        (self.dir / "root" / BUCKET).mkdir(parents=True)
        self.log = self.dir / "access.log"
        self.log.touch()
        port = free_port()
        self.process = start(program, "--access", ACCESS, "--secret", SECRET, "--port", "127.0.0.1:%d" % port, "--quiet",
                             "--keep-alive", "--access-log", self.log, "posix", self.dir / "root", log=self.dir / "server.log")
        wait_for(lambda: answers(port), 20, "answer from versitygw")
        if latency_ms or mib_per_second:
            far = free_port()
            self.proxy = start(load, "proxy", "--listen", "127.0.0.1:%d" % far, "--to", "127.0.0.1:%d" % port,
                               "--latency-ms", latency_ms, "--mib-per-second", mib_per_second, log=self.dir / "proxy.log")
            wait_for(lambda: answers(far), 20, "answer from the proxy")
            port = far
        self.endpoint = "http://127.0.0.1:%d" % port

    @property
    def env(self):
        return {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true"}

    def mark(self):
        """A place in the access log."""
        return self.log.stat().st_size if self.process else 0

    def requests_since(self, mark):
        """Requests by kind since a mark."""
        counts = {}
        if self.process:
            with open(self.log, errors="replace") as f:
                f.seek(mark)
                for line in f:
                    kind = re.search(r"\b(?:REST|WEBSITE)\.([A-Z]+)\.|\"([A-Z]+) /", line)
                    if kind:
                        word = kind.group(1) or kind.group(2)
                        counts[word] = counts.get(word, 0) + 1
        return counts

    def close(self):
        stop(self.proxy)
        stop(self.process)
        shutil.rmtree(self.dir, ignore_errors=True)
