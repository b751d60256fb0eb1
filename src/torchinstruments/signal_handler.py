"""Catching SIGTERM below Python, so that it is noticed at once whatever the main thread does.

A handler in Python waits for the main thread, which may be blocked in a collective for ever, and shows in
`signal.getsignal`, where a trainer would find it and call it, or not install its own. So the kernel is given
one that writes a byte to a pipe and does nothing else: no interpreter, no lock, no stack is looked at, so it
may run at any moment and in any thread. It is a few instructions of machine code, since nothing that is
installed offers such a function: `faulthandler` walks the stacks of the program, and ended it by a
segmentation fault once in some 100,000 signals.

Where there is no code for the machine, or no page may be made executable, nothing is caught.
"""

import contextlib
import ctypes
import mmap
import os
import platform
import signal
import struct
import sys
from collections.abc import Callable

__all__ = ["WRITTEN", "SignalHandler", "machine_code"]

WRITTEN = b"\1"
"""What the handler writes."""

_SA_RESTART = 0x10000000


class _Action(ctypes.Structure):
    """``struct sigaction`` of the C libraries of Linux, on machines of 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )

    def address(self) -> int:
        """Returns the address of the handler; 0 is the default effect."""
        return self.handler or 0


class SignalHandler:
    """Writes to a pipe when SIGTERM comes, while that has no other effect than the default one.

    Args:
        descriptor: The writing end, which must not block. It has to stay open for as long as the process
            lives: the program may know this handler from a look at the kernel's table, and call it.

    Raises:
        OSError: The machine has no code here, or the system allows none to be made.
    """

    def __init__(self, descriptor: int) -> None:
        # Calls through it keep the interpreter's lock, so that no other Python thread comes between.
        self._sigaction = ctypes.PyDLL(None, use_errno=True).sigaction
        self._page = _executable(machine_code(platform.machine(), descriptor))
        self._ours = _Action(handler=_address(self._page), flags=_SA_RESTART)

    @property
    def is_installed(self) -> bool:
        """Whether SIGTERM is caught by this handler (any thread)."""
        return self._exchange(None).address() == self._ours.address()

    def install(self) -> None:
        """Catches the signal, where it has its default effect and Python knows of no handler (any thread)."""
        is_default_in_python = signal.getsignal(signal.SIGTERM) in {signal.SIG_DFL, None}
        if is_default_in_python and self._exchange(None).address() == 0:
            before = self._exchange(self._ours)
            if before.address() not in {0, self._ours.address()}:
                self._exchange(before)  # it came in between

    def remove(self) -> None:
        """Gives the default effect back; a handler of the program stays (any thread)."""
        if self.is_installed:
            before = self._exchange(_Action())
            if before.address() != self._ours.address():
                self._exchange(before)

    def _exchange(self, action: _Action | None) -> _Action:
        """Sets what SIGTERM does, or leaves it, and returns what it did by the kernel's account."""
        before = _Action()
        wanted = None if action is None else ctypes.byref(action)
        if self._sigaction(int(signal.SIGTERM), wanted, ctypes.byref(before)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return before


def machine_code(machine: str, descriptor: int) -> bytes:
    """Returns a function that writes `WRITTEN` to a descriptor by the kernel's call and returns.

    Args:
        machine: As `platform.machine` names it.
        descriptor: Below 65,536.

    Raises:
        OSError: There is none for this machine.
    """
    make = _CODE.get(machine)
    if make is None or sys.platform != "linux" or sys.maxsize < 2**32 or descriptor >= 2**16:
        raise OSError(f"no signal handler is known for {sys.platform} on {machine}")
    return make(descriptor)


def _x86_64(descriptor: int) -> bytes:
    return (
        (
            b"\xf3\x0f\x1e\xfa"  # endbr64
            b"\xb8\x01\x00\x00\x00"  # mov eax, 1: write
            b"\xbf"
            + struct.pack("<I", descriptor)
            + b"\x48\x8d\x35\x08\x00\x00\x00"  # mov edi, .. ; lea rsi, [rip+8]
            b"\xba\x01\x00\x00\x00"  # mov edx, 1
            b"\x0f\x05"  # syscall
            b"\xc3"  # ret
        )
        + WRITTEN
    )


def _aarch64(descriptor: int) -> bytes:
    instructions = (
        0xD503245F,  # bti c
        0xD2800000 | descriptor << 5,  # mov x0, ..
        0x100000A1,  # adr x1, .+20
        0xD2800022,  # mov x2, 1
        0xD2800808,  # mov x8, 64: write
        0xD4000001,  # svc 0
        0xD65F03C0,  # ret
    )
    return struct.pack(f"<{len(instructions)}I", *instructions) + WRITTEN


_CODE: dict[str, Callable[[int], bytes]] = {"x86_64": _x86_64, "aarch64": _aarch64}


def _executable(code: bytes) -> mmap.mmap:
    """Returns a page that holds code and can be executed, and not be written any more.

    Raises:
        OSError: The system allows none.
    """
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page.write(code)
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if mprotect(_address(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        number = ctypes.get_errno()
        with contextlib.suppress(BufferError):
            page.close()
        raise OSError(number, os.strerror(number))
    return page


def _address(page: mmap.mmap) -> int:
    """Returns where a page lies; it stays there as long as the object lives."""
    return ctypes.addressof(ctypes.c_char.from_buffer(page))
