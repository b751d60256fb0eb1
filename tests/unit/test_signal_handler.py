"""The handler below Python: its code, and what it does with the kernel's table."""

import mmap
import os
import platform

import pytest

from torchinstruments.signal_handler import WRITTEN, SignalHandler, machine_code

CODE = {
    "x86_64": "f30f1efa b801000000 bf04030000 488d3508000000 ba01000000 0f05 c3 01",
    "aarch64": "5f2403d5 806080d2 a1000010 220080d2 080880d2 010000d4 c0035fd6 01",
}
"""As assemblers make it, for descriptor 0x0304; both were run in an emulator, which saw one write each."""


@pytest.mark.parametrize("machine", CODE)
def test_the_code_is_what_an_assembler_makes(machine: str) -> None:
    """One call of the kernel's write, of one byte that lies behind the code."""
    assert machine_code(machine, 0x0304).hex() == CODE[machine].replace(" ", "")
    assert machine_code(machine, 0x0304).endswith(WRITTEN)


@pytest.mark.parametrize(("machine", "descriptor"), [("riscv64", 3), ("", 3), ("x86_64", 2**16)])
def test_what_has_no_code_is_refused(machine: str, descriptor: int) -> None:
    """So that nothing is caught there."""
    with pytest.raises(OSError, match=f"no signal handler is known for linux on {machine}"):
        machine_code(machine, descriptor)


def test_where_no_page_may_be_executed_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protection that the kernel refuses is an error of the system, not a handler that kills the process."""
    monkeypatch.setattr(mmap, "PROT_EXEC", 1 << 20)
    with pytest.raises(OSError, match="Invalid argument"):
        SignalHandler(3)


def test_its_page_cannot_be_written() -> None:
    """Memory that is executed is never writable."""
    reading, writing = os.pipe()
    handler = SignalHandler(writing)
    address = f"{handler._ours.address():x}-"
    with open("/proc/self/maps") as maps:
        (line,) = [line for line in maps if line.startswith(address)]
    assert line.split()[1] == "r-xp"
    assert platform.machine() in CODE
    os.close(reading)
    os.close(writing)
