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
import contextlib
import re
import socket
import struct
import threading
import time
import types
import urllib.parse
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["FaultProxy", "LogEntry"]

_HEAD_LIMIT_BYTES = 2**20
_CHUNK_BYTES = 64 * 1024


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


@dataclass(slots=True)
class _Rule:
    action: str
    method: str | None
    path: re.Pattern[str] | None
    times: int | None
    skip: int
    code: int = 0
    error: str = ""
    seconds: float = 0.0
    after_bytes: int = 0


@dataclass(slots=True)
class _Answer:
    """What the way back does with the answer of the request in progress."""

    drop: bool = False
    cut_after_bytes: int | None = None


class FaultProxy:
    """A proxy on loopback in front of one HTTP server, in a thread of this process.

    Every rule takes ``method`` (``PUT``, or ``PUT|POST``; None for all), ``path`` (a regular expression that
    is searched in path and query), ``times`` (requests that it applies to; None for all) and ``skip``
    (matching requests that pass before it applies). The first rule that matches decides.

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
        self._rules: list[_Rule] = []
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

    def status(
        self,
        code: int,
        error: str,
        *,
        method: str | None = None,
        path: str | None = None,
        times: int | None = None,
        skip: int = 0,
    ) -> None:
        """Answers with an HTTP status and S3's error document, such as 503 and ``SlowDown``.

        Args:
            code: HTTP status.
            error: ``Code`` in the document.
            method: Methods that it applies to, ``PUT`` or ``PUT|POST``; None for all.
            path: Regular expression that is searched in path and query; None for all.
            times: Requests that it applies to; None for all.
            skip: Matching requests that pass before it applies.
        """
        self._add("status", method, path, times, skip, code=code, error=error)

    def reset(
        self, *, method: str | None = None, path: str | None = None, times: int | None = None, skip: int = 0
    ) -> None:
        """Resets the connection before the request is passed on.

        Args:
            method: Methods that it applies to, ``PUT`` or ``PUT|POST``; None for all.
            path: Regular expression that is searched in path and query; None for all.
            times: Requests that it applies to; None for all.
            skip: Matching requests that pass before it applies.
        """
        self._add("reset", method, path, times, skip)

    def reset_body(
        self,
        after_bytes: int,
        *,
        method: str | None = None,
        path: str | None = None,
        times: int | None = None,
        skip: int = 0,
    ) -> None:
        """Resets both connections once this much of a request's body has been passed on.

        Args:
            after_bytes: Bytes of the body, as they are sent (with chunk headers where it is chunked).
            method: Methods that it applies to, ``PUT`` or ``PUT|POST``; None for all.
            path: Regular expression that is searched in path and query; None for all.
            times: Requests that it applies to; None for all.
            skip: Matching requests that pass before it applies.
        """
        self._add("reset_body", method, path, times, skip, after_bytes=after_bytes)

    def stall(
        self, *, method: str | None = None, path: str | None = None, times: int | None = None, skip: int = 0
    ) -> None:
        """Accepts the request and never answers.

        Args:
            method: Methods that it applies to, ``PUT`` or ``PUT|POST``; None for all.
            path: Regular expression that is searched in path and query; None for all.
            times: Requests that it applies to; None for all.
            skip: Matching requests that pass before it applies.
        """
        self._add("stall", method, path, times, skip)

    def delay(
        self,
        seconds: float,
        *,
        method: str | None = None,
        path: str | None = None,
        times: int | None = None,
        skip: int = 0,
    ) -> None:
        """Passes the request on after some seconds.

        Args:
            seconds: How long to wait first.
            method: Methods that it applies to, ``PUT`` or ``PUT|POST``; None for all.
            path: Regular expression that is searched in path and query; None for all.
            times: Requests that it applies to; None for all.
            skip: Matching requests that pass before it applies.
        """
        self._add("delay", method, path, times, skip, seconds=seconds)

    def drop_response(
        self, *, method: str | None = None, path: str | None = None, times: int | None = None, skip: int = 0
    ) -> None:
        """Lets the server carry the request out, and resets the connection in place of its answer.

        Args:
            method: Methods that it applies to, ``PUT`` or ``PUT|POST``; None for all.
            path: Regular expression that is searched in path and query; None for all.
            times: Requests that it applies to; None for all.
            skip: Matching requests that pass before it applies.
        """
        self._add("drop_response", method, path, times, skip)

    def truncate(
        self,
        after_bytes: int,
        *,
        method: str | None = None,
        path: str | None = None,
        times: int | None = None,
        skip: int = 0,
    ) -> None:
        """Passes this much of the answer on, its head included, and resets the connection.

        Args:
            after_bytes: Bytes of the answer, its head included.
            method: Methods that it applies to, ``PUT`` or ``PUT|POST``; None for all.
            path: Regular expression that is searched in path and query; None for all.
            times: Requests that it applies to; None for all.
            skip: Matching requests that pass before it applies.
        """
        self._add("truncate", method, path, times, skip, after_bytes=after_bytes)

    def clear(self) -> None:
        """Forgets all rules; requests that stall already go on doing so."""
        with self._lock:
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

    def _add(
        self,
        action: str,
        method: str | None,
        path: str | None,
        times: int | None,
        skip: int,
        *,
        code: int = 0,
        error: str = "",
        seconds: float = 0.0,
        after_bytes: int = 0,
    ) -> None:
        pattern = re.compile(path) if path is not None else None
        with self._lock:
            self._rules.append(_Rule(action, method, pattern, times, skip, code, error, seconds, after_bytes))

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self._port, limit=_HEAD_LIMIT_BYTES, reuse_address=True
        )
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def _refuse(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in list(self._connections):
            _reset(writer)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _match(self, method: str, target: str) -> _Rule | None:
        with self._lock:
            for rule in self._rules:
                if rule.method is not None and method not in rule.method.split("|"):
                    continue
                if rule.path is not None and not rule.path.search(target):
                    continue
                if rule.times == 0:
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                    continue
                if rule.times is not None:
                    rule.times -= 1
                return rule
        return None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        connection = _Connection(self, reader, writer)
        try:
            await connection.serve()
        except (OSError, EOFError, asyncio.CancelledError, asyncio.LimitOverrunError):
            pass  # either side went away, or the proxy went down
        finally:
            self._connections.discard(writer)
            self._tasks.discard(task)
            await connection.close()

    def _seen(self, method: str, target: str, action: str, body_bytes: int) -> None:
        with self._lock:
            self._log.append(LogEntry(time.monotonic(), method, target, action, body_bytes))


class _Connection:
    """One client's connection and the one to the server that belongs to it."""

    def __init__(self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._up: asyncio.StreamWriter | None = None
        self._back: asyncio.Task[None] | None = None
        self._answer = _Answer()

    async def serve(self) -> None:
        """Takes one request after the other until the client leaves or a rule ends the connection."""
        while True:
            head = await self._reader.readuntil(b"\r\n\r\n")
            words = head.split(b" ", 2)
            method, target = words[0].decode("latin-1"), words[1].decode("latin-1")
            length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
            body_bytes = int(length[1]) if length else 0
            rule = self._proxy._match(method, target)  # noqa: SLF001 - one object in two classes
            action = rule.action if rule else "pass"
            self._proxy._seen(method, target, action, body_bytes)  # noqa: SLF001
            if rule is not None:
                if action == "reset":
                    _reset(self._writer)
                    return
                if action == "stall":
                    await asyncio.Event().wait()
                if action == "status":
                    await self._refuse(rule, method, expects=b"100-continue" in head.lower())
                    return
                if action == "delay":
                    await asyncio.sleep(rule.seconds)
            self._answer.drop = action == "drop_response"
            self._answer.cut_after_bytes = rule.after_bytes if rule and action == "truncate" else None
            limit = rule.after_bytes if rule and action == "reset_body" else None
            if not await self._forward(head, body_bytes, limit):
                return

    async def close(self) -> None:
        """Ends the way back and closes both sides."""
        if self._back is not None:
            self._back.cancel()
            await asyncio.gather(self._back, return_exceptions=True)
        for writer in (self._up, self._writer):
            if writer is not None:
                writer.close()

    async def _refuse(self, rule: _Rule, method: str, *, expects: bool) -> None:
        fault = f"<Error><Code>{rule.error}</Code><Message>injected</Message></Error>"
        body = b"" if method == "HEAD" else f'<?xml version="1.0"?>{fault}'.encode()
        self._writer.write(
            f"HTTP/1.1 {rule.code} Injected\r\nContent-Type: application/xml\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        await self._writer.drain()
        if not expects:
            # A sender that is cut off while it sends sees a reset in place of the status.
            with contextlib.suppress(TimeoutError):
                while await asyncio.wait_for(self._reader.read(_CHUNK_BYTES), 0.3):
                    pass

    async def _forward(self, head: bytes, body_bytes: int, limit: int | None) -> bool:
        if self._up is None:
            up_reader, self._up = await asyncio.open_connection(*self._proxy._upstream)  # noqa: SLF001
            self._back = asyncio.create_task(self._pump(up_reader))
        self._up.write(head)
        chunked = re.search(rb"\r\ntransfer-encoding: *chunked", head, re.IGNORECASE) is not None
        sent_bytes = 0
        async for piece in self._body(body_bytes, chunked=chunked):
            if limit is not None and sent_bytes + len(piece) > limit:
                _reset(self._writer)
                _reset(self._up)
                return False
            self._up.write(piece)
            await self._up.drain()
            sent_bytes += len(piece)
        await self._up.drain()
        return True

    async def _body(self, body_bytes: int, *, chunked: bool) -> Any:
        if not chunked:
            while body_bytes:
                piece = await self._reader.read(min(body_bytes, _CHUNK_BYTES))
                if not piece:
                    raise EOFError
                body_bytes -= len(piece)
                yield piece
            return
        while True:
            line = await self._reader.readuntil(b"\r\n")
            yield line
            size = int(line.split(b";")[0], 16)
            if size:
                yield await self._reader.readexactly(size + 2)
                continue
            while line != b"\r\n":
                line = await self._reader.readuntil(b"\r\n")
                yield line
            return

    async def _pump(self, up_reader: asyncio.StreamReader) -> None:
        sent_bytes = 0
        while piece := await up_reader.read(_CHUNK_BYTES):
            # The interim answer to "Expect: 100-continue" only asks for the body: nothing was carried out
            # yet.
            interim = piece.startswith(b"HTTP/1.1 100") and piece.count(b"\r\n\r\n") == 1
            if self._answer.drop and not interim:
                _reset(self._writer)
                return
            cut = None if interim else self._answer.cut_after_bytes
            if cut is not None and sent_bytes + len(piece) > cut:
                self._writer.write(piece[: max(0, cut - sent_bytes)])
                await self._writer.drain()
                _reset(self._writer)
                return
            self._writer.write(piece)
            await self._writer.drain()
            sent_bytes += len(piece)
        self._writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with a reset instead of an orderly end."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if writer.transport is not None:
        writer.transport.abort()
