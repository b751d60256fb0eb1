"""Errors are always counted and kept, and told as the policy says."""

import logging
import warnings

import pytest
import torch
from torch import nn
from typing_extensions import override

from torchinstruments.config import ErrorPolicy
from torchinstruments.observe.faults import Faults
from torchinstruments.records import ErrorRecord
from unit.observe.memory import MemorySession, observe


def drop(record: ErrorRecord) -> None:
    """Keeps nothing."""


def failed(text: str) -> ValueError:
    """Returns an error that was raised, with its traceback."""
    try:
        int(text)
    except ValueError as error:
        return error
    raise AssertionError(text)


def test_each_kind_is_warned_of_once_and_every_error_is_counted() -> None:
    """A kind is a probe and a type of exception."""
    kept: list[ErrorRecord] = []
    faults = Faults(ErrorPolicy.WARN, kept.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            faults.report("reducer", "fc", ValueError("bo\nom"))
        faults.report("reducer", "", TypeError("other"))
    end = "; training goes on, and further errors of this kind are only counted"
    assert [str(w.message) for w in caught] == [
        f"torchinstruments: reducer failed in fc: ValueError: bo om{end}",
        f"torchinstruments: reducer failed in the model: TypeError: other{end}",
    ]
    assert faults.counts == {"reducer": 4}
    assert [(record.module, record.type, record.message) for record in kept][-2:] == [
        ("fc", "ValueError", "bo om"),
        ("", "TypeError", "other"),
    ]


def test_ignore_is_silent_and_counts() -> None:
    """No warning is made."""
    faults = Faults(ErrorPolicy.IGNORE, drop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        faults.report("sampler", "", ValueError("x"))
        faults.warn("anything")
    assert faults.counts == {"sampler": 1}


def test_raise_keeps_the_first_error_once_and_without_its_frames() -> None:
    """Type and message stay, a note says where it comes from, and no activation hangs on a traceback."""
    faults = Faults(ErrorPolicy.RAISE, drop)
    faults.report("reducer", "fc", failed("first"))
    faults.report("reducer", "fc", ValueError("second"))
    pending = faults.take_pending()
    assert isinstance(pending, ValueError)
    assert "first" in str(pending)
    assert pending.__traceback__ is None
    assert pending.__notes__ == ["torchinstruments: reducer failed in fc"]
    assert faults.take_pending() is None


def test_where_warnings_are_errors_the_sentence_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is raised into training."""
    faults = Faults(ErrorPolicy.WARN, drop)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "torchinstruments"):
        warnings.simplefilter("error")
        faults.report("reducer", "fc", ValueError("boom"))
    assert "reducer failed in fc: ValueError: boom" in caplog.text


def test_an_error_that_cannot_be_read_or_kept_is_counted_all_the_same() -> None:
    """Neither a message that raises nor a keeper that raises gets out."""

    class UnreadableError(Exception):
        @override
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def broken(record: ErrorRecord) -> None:
        raise OSError("full")

    faults = Faults(ErrorPolicy.IGNORE, broken)
    faults.report("forward", "fc", UnreadableError())
    assert faults.total == 1


def test_a_notice_is_kept_counted_warned_of_once_and_never_raised() -> None:
    """Not even where errors are raised; one that is not worth a warning is only kept."""
    kept: list[ErrorRecord] = []
    faults = Faults(ErrorPolicy.RAISE, kept.append)
    with pytest.warns(RuntimeWarning, match="torchinstruments: three calls were missed"):
        faults.notice("bypassed", "", "three calls were missed")
    faults.notice("bypassed", "", "four calls were missed")
    faults.notice("tracing", "", "a trace", is_worth_a_warning=False)
    assert faults.take_pending() is None
    assert faults.counts == {"bypassed": 2, "tracing": 1}
    assert [(record.probe, record.message) for record in kept] == [
        ("bypassed", "three calls were missed"),
        ("bypassed", "four calls were missed"),
        ("tracing", "a trace"),
    ]


def test_messages_that_are_not_utf8_can_be_stored() -> None:
    """Of errors and of notices."""
    kept: list[ErrorRecord] = []
    faults = Faults(ErrorPolicy.IGNORE, kept.append)
    faults.report("reducer", "fc", OSError("a\udc80"))
    faults.notice("tracing", "", "b\udc81")
    assert [record.message for record in kept] == ["a\\udc80", "b\\udc81"]


def test_a_warning_shows_the_line_of_the_program(session: MemorySession) -> None:
    """Not one of this package, nor one of torch between the program and a hook."""

    def fails(tensor: torch.Tensor) -> dict[str, float]:
        raise ValueError("boom")

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    observe(model, session, reducers=[fails])
    with pytest.warns(RuntimeWarning, match="boom") as caught:
        exec(compile("\nmodel(x)", "train.py", "exec"), {"model": model, "x": torch.ones(1, 2)})
    assert (caught[0].filename, caught[0].lineno) == ("train.py", 2)
