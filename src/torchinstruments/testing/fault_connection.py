"""One connection through a fault proxy: it passes requests and answers on, or breaks them as it is told."""

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from torchinstruments.testing.fault_rules import Fault

__all__ = ["HEAD_LIMIT_BYTES", "Connection", "reset"]

HEAD_LIMIT_BYTES = 2**20
"""The longest head of a request that is taken."""

_CHUNK_BYTES = 64 * 1024
_CLOSE_S = 1.0
_PASS = Fault("pass")


@dataclass(slots=True)
class _Answer:
    """What the way back does with the answer of the request in progress."""

    drop: bool = False
    cut_after_bytes: int | None = None


class Connection:
    """One client's connection and the one to the server that belongs to it.

    Args:
        upstream: Host and port of the server.
        decide: Takes method, target and length of the body of each request, and says what is done to it.
        reader: From the client.
        writer: To the client.
    """

    def __init__(
        self,
        upstream: tuple[str, int],
        decide: Callable[[str, str, int], Fault | None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._upstream = upstream
        self._decide = decide
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
            fault = self._decide(method, target, body_bytes) or _PASS
            if fault.action == "reset":
                reset(self._writer)
                return
            if fault.action == "stall":
                await asyncio.Event().wait()
            if fault.action == "status":
                await self._refuse(fault, method, expects=b"100-continue" in head.lower())
                return
            if fault.action == "delay":
                await asyncio.sleep(fault.delay_s)
            self._answer.drop = fault.action == "drop_response"
            self._answer.cut_after_bytes = fault.after_bytes if fault.action == "truncate" else None
            limit = fault.after_bytes if fault.action == "reset_body" else None
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
                with contextlib.suppress(OSError, TimeoutError):
                    await asyncio.wait_for(writer.wait_closed(), _CLOSE_S)
                # What the other side does not take any more would keep the connection for ever.
                writer.transport.abort()
        await asyncio.sleep(0)

    async def _refuse(self, fault: Fault, method: str, *, expects: bool) -> None:
        document = f"<Error><Code>{fault.error}</Code><Message>injected</Message></Error>"
        body = b"" if method == "HEAD" else f'<?xml version="1.0"?>{document}'.encode()
        self._writer.write(
            f"HTTP/1.1 {fault.code} Injected\r\nContent-Type: application/xml\r\n"
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
            up_reader, self._up = await asyncio.open_connection(*self._upstream)
            self._back = asyncio.create_task(self._pump(up_reader))
        self._up.write(head)
        chunked = re.search(rb"\r\ntransfer-encoding: *chunked", head, re.IGNORECASE) is not None
        sent_bytes = 0
        async for piece in self._body(body_bytes, chunked=chunked):
            if limit is not None and sent_bytes + len(piece) > limit:
                reset(self._writer)
                reset(self._up)
                return False
            self._up.write(piece)
            await self._up.drain()
            sent_bytes += len(piece)
        await self._up.drain()
        return True

    async def _body(self, body_bytes: int, *, chunked: bool) -> AsyncIterator[bytes]:
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
                reset(self._writer)
                return
            cut = None if interim else self._answer.cut_after_bytes
            if cut is not None and sent_bytes + len(piece) > cut:
                self._writer.write(piece[: max(0, cut - sent_bytes)])
                await self._writer.drain()
                reset(self._writer)
                return
            self._writer.write(piece)
            await self._writer.drain()
            sent_bytes += len(piece)
        self._writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes a connection with a reset instead of an orderly end (the proxy's thread).

    Args:
        writer: Its stream.
    """
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if writer.transport is not None:
        writer.transport.abort()
