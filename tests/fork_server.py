"""A process that has torch and this package loaded, and forks for each program that a test wants to run.

A program begins within milliseconds and ends as any Python program does: at its last line, by an exception,
by ``sys.exit`` or by a signal, with everything that an interpreter does at its exit.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

__all__ = ["ForkServer", "Program"]

_SERVER = """
import json, os, sys
import torch, torch.distributed, torch.nn, torch.utils.data
import torchinstruments.api, torchinstruments.session

torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports most of the compiler

request = None
for line in iter(sys.stdin.readline, ""):
    request = json.loads(line)
    if "wait" in request:
        pid, status = os.waitpid(request["wait"], os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    else:
        answer = os.fork()
        if answer == 0:
            break
    print(json.dumps(answer), flush=True)
else:
    os._exit(0)
for name, descriptor, flags in (("/dev/null", 0, os.O_RDONLY), (request["out"], 1, os.O_WRONLY | os.O_CREAT),
                                (request["err"], 2, os.O_WRONLY | os.O_CREAT)):
    opened = os.open(name, flags, 0o600)
    os.dup2(opened, descriptor)
    os.close(opened)
sys.stdin = os.fdopen(os.dup(0))
os.environ.update(request["environ"])
sys.argv = ["program", *request["arguments"]]
torch.manual_seed(0)
exec(compile(request["program"], "program", "exec"), {"__name__": "__main__"})
"""


@dataclass(slots=True)
class Program:
    """A program that was started.

    Attributes:
        server: Who started it.
        pid: Its process.
        out: What it prints.
        err: What it prints to standard error.
        code: Its exit status as `subprocess` gives it, once it has ended.
    """

    server: "ForkServer"
    pid: int
    out: Path
    err: Path
    code: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status, or None while it runs."""
        if self.code is None:
            self.code = self.server.ask({"wait": self.pid})
        return self.code

    def wait(self, timeout_s: float = 60.0) -> int:
        """Returns the exit status."""
        end_s = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > end_s:
                self.kill()
                raise AssertionError(f"it did not end within {timeout_s:g} s: {self.err.read_text()}")
            time.sleep(0.01)
        return code

    def wait_for(self, said: str, timeout_s: float = 60.0) -> str:
        """Waits until it has printed a text; returns all that it has printed."""
        end_s = time.monotonic() + timeout_s
        while said not in (printed := self.out.read_text() if self.out.exists() else ""):
            assert self.poll() is None, (self.code, printed, self.err.read_text())
            assert time.monotonic() < end_s, (printed, self.err.read_text())
            time.sleep(0.01)
        return printed

    def send(self, number: int) -> None:
        """Sends it a signal, as long as it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it, and waits for that."""
        self.send(signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.005)


class ForkServer:
    """Starts programs out of one process that has loaded what they need."""

    def __init__(self) -> None:
        self._programs: list[Program] = []
        self._asking = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_programs()
        with self._process:
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate(timeout=60)

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Returns the server's answer (any thread)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._asking:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def start(
        self, program: str, folder: Path, *arguments: str, environ: Mapping[str, str] | None = None
    ) -> Program:
        """Starts a program.

        Args:
            program: Its text.
            folder: Takes what it prints.
            *arguments: For its ``sys.argv``.
            environ: Further variables.
        """
        stem = f"{len(self._programs):03d}"
        out, err = folder / f"{stem}.out", folder / f"{stem}.err"
        pid = self.ask(
            {
                "program": program,
                "out": str(out),
                "err": str(err),
                "arguments": arguments,
                "environ": dict(environ or {}),
            }
        )
        started = Program(self, pid, out, err)
        self._programs.append(started)
        return started

    def end_programs(self) -> None:
        """Ends whatever still runs."""
        for program in self._programs:
            program.kill()
