"""A proxy that breaks HTTP on purpose, to see what a program does when its object store fails.

It listens on loopback and passes bytes on unchanged, so that signatures made for its address hold. Rules
break single requests: answer with an error, reset the connection, stall, lose the answer of a request that
was carried out. Standard library only.

::

    with FaultProxy(store.endpoint) as proxy:
        proxy.status(503, "SlowDown", times=2)            # the next two requests
        proxy.drop_response(method="PUT", times=1)        # carried out, but the client never hears
        ...                                               # use proxy.url as the endpoint
        assert [entry.action for entry in proxy.log] == ["status", "status", ...]
"""

import asyncio
import threading
import time
import types
import urllib.parse
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Self, Unpack

from torchinstruments.testing.fault_connection import HEAD_LIMIT_BYTES, Connection, reset
from torchinstruments.testing.fault_rules import Fault, FaultRules, Which

__all__ = ["FaultProxy", "LogEntry"]


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One request that arrived.

    Attributes:
        at_s: Monotonic time of its arrival, in seconds.
        method: ``GET``, ``PUT``, ...
        target: Path and query, as sent.
        action: Name of the rule that it met, or ``pass``.
        body_bytes: Length of its body, where it declared one.
    """

    at_s: float
    method: str
    target: str
    action: str
    body_bytes: int


class FaultProxy:
    """A proxy on loopback in front of one HTTP server, in a thread of this process.

    Every rule takes the keywords of `Which`. The first rule that matches decides.

    Args:
        upstream: Address of the server, ``http://127.0.0.1:8333``.

    Attributes:
        url: Address of the proxy: the endpoint to give to the program under test; ``""`` before it listens.

    Raises:
        ValueError: The upstream is not of that form.
    """

    def __init__(self, upstream: str) -> None:
        address = urllib.parse.urlsplit(upstream)
        if address.scheme != "http" or address.hostname is None or address.port is None:
            raise ValueError(f"the proxy needs an upstream like http://127.0.0.1:8333, not {upstream!r}")
        self._upstream = (address.hostname, address.port)
        self._rules = FaultRules()
        self._log: list[LogEntry] = []
        self._lock = threading.Lock()
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="fault-proxy")
        self._port = 0
        self.url = ""

    def __enter__(self) -> Self:
        """Starts to listen.

        Returns:
            The proxy, whose `url` is set.

        Raises:
            OSError: No port of loopback can be listened on.
        """
        self._thread.start()
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Stops listening, resets what is open, and ends the thread.

        Args:
            kind: Of the exception that ends the block, which goes on its way.
            error: That exception.
            traceback: Where it was raised.
        """
        self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def log(self) -> list[LogEntry]:
        """Every request so far, in the order of arrival (any thread)."""
        with self._lock:
            return list(self._log)

    def status(self, code: int, error: str, **which: Unpack[Which]) -> None:
        """Answers with an HTTP status and S3's error document, such as 503 and ``SlowDown``.

        Args:
            code: HTTP status.
            error: ``Code`` in the document.
            **which: To which requests.
        """
        self._rules.add(Fault("status", code=code, error=error), **which)

    def reset(self, **which: Unpack[Which]) -> None:
        """Resets the connection before the request is passed on.

        Args:
            **which: To which requests.
        """
        self._rules.add(Fault("reset"), **which)

    def reset_body(self, after_bytes: int, **which: Unpack[Which]) -> None:
        """Resets both connections once this much of a request's body has been passed on.

        Args:
            after_bytes: Bytes of the body, as they are sent (with chunk headers where it is chunked).
            **which: To which requests.
        """
        self._rules.add(Fault("reset_body", after_bytes=after_bytes), **which)

    def stall(self, **which: Unpack[Which]) -> None:
        """Accepts the request and never answers.

        Args:
            **which: To which requests.
        """
        self._rules.add(Fault("stall"), **which)

    def delay(self, delay_s: float, **which: Unpack[Which]) -> None:
        """Passes the request on after some seconds.

        Args:
            delay_s: How long to wait first.
            **which: To which requests.
        """
        self._rules.add(Fault("delay", delay_s=delay_s), **which)

    def drop_response(self, **which: Unpack[Which]) -> None:
        """Lets the server carry the request out, and resets the connection in place of its answer.

        Args:
            **which: To which requests.
        """
        self._rules.add(Fault("drop_response"), **which)

    def truncate(self, after_bytes: int, **which: Unpack[Which]) -> None:
        """Passes this much of the answer on, its head included, and resets the connection.

        Args:
            after_bytes: Bytes of the answer, its head included.
            **which: To which requests.
        """
        self._rules.add(Fault("truncate", after_bytes=after_bytes), **which)

    def clear(self) -> None:
        """Forgets all rules; requests that stall already go on doing so."""
        self._rules.clear()

    def up(self) -> None:
        """Listens, on the same port as before where there was one.

        Raises:
            OSError: Another program took that port meanwhile.
        """
        if self._server is None:
            self._run(self._listen())

    def down(self) -> None:
        """Refuses connections from now on, and resets the open ones."""
        if self._server is not None:
            self._run(self._refuse())

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self._port, limit=HEAD_LIMIT_BYTES, reuse_address=True
        )
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def _refuse(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in list(self._connections):
            reset(writer)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        connection = Connection(self._upstream, self._decide, reader, writer)
        try:
            await connection.serve()
        except (OSError, EOFError, asyncio.CancelledError, asyncio.LimitOverrunError):
            pass  # either side went away, or the proxy went down
        finally:
            self._connections.discard(writer)
            self._tasks.discard(task)
            await connection.close()

    def _decide(self, method: str, target: str, body_bytes: int) -> Fault | None:
        """Logs a request, and returns what is done to it."""
        fault = self._rules.match(method, target)
        action = "pass" if fault is None else fault.action
        with self._lock:
            self._log.append(LogEntry(time.monotonic(), method, target, action, body_bytes))
        return fault
