"""Several sinks as one."""

from collections.abc import Sequence
from typing import Any

import pytest

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Claim, Identity, ModuleRecord, RunRecord, Sample
from torchinstruments.sinks.composite import CompositeSink, split_sinks
from torchinstruments.sinks.destination import DirectorySink
from unit.store.material import claim, forward, identity, module, run_record


class Part:
    """Keeps the names of the calls, and fails at one of them."""

    def __init__(self, name: str, calls: list[str], fails_at: str = "") -> None:
        self.name = name
        self.calls = calls
        self.fails_at = fails_at

    def call(self, what: str, *arguments: object) -> None:
        """Keeps a call; raises where it should."""
        assert None not in arguments
        self.calls.append(f"{self.name}.{what}")
        if what == self.fails_at:
            raise RuntimeError(f"{self.name} broke at {what}")

    def place(self, identity: Identity, claim: Claim) -> None:
        """Keeps that it was called."""
        self.call("place", identity, claim)

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Keeps that it was called."""
        self.call("initialize", run, modules)

    def observe(self, sample: Sample) -> None:
        """Keeps that it was called."""
        self.call("observe", sample)

    def close(self) -> None:
        """Keeps that it was called."""
        self.call("close")


def test_everything_reaches_all_parts_in_order() -> None:
    """Also who this process is."""
    calls: list[str] = []
    sink = CompositeSink(Part("a", calls), Part("b", calls))
    sink.place(identity(), claim())
    sink.initialize(run_record(), (module(0),))
    sink.observe(forward(0))
    sink.close()
    assert calls == [
        f"{name}.{what}" for what in ("place", "initialize", "observe", "close") for name in "ab"
    ]


@pytest.mark.parametrize("where", ["place", "observe", "close"])
def test_a_part_that_fails_keeps_nothing_from_the_others(where: str) -> None:
    """What all of them raised comes out together afterwards."""
    calls: list[str] = []
    sink = CompositeSink(Part("a", calls, where), Part("b", calls), Part("c", calls, where))
    arguments: dict[str, tuple[Any, ...]] = {
        "place": (identity(), claim()),
        "observe": (forward(0),),
        "close": (),
    }

    with pytest.raises(ExceptionGroup, match=f"2 of 3 sinks failed at {where}") as raised:
        getattr(sink, where)(*arguments[where])

    assert calls == [f"a.{where}", f"b.{where}", f"c.{where}"]
    assert [str(error) for error in raised.value.exceptions] == [f"a broke at {where}", f"c broke at {where}"]


def test_where_one_cannot_begin_those_before_it_are_closed() -> None:
    """In reverse order; the first error comes out, with what the closing brought as a note."""
    calls: list[str] = []
    broken = Part("b", calls, "close")
    sink = CompositeSink(Part("a", calls), broken, Part("c", calls, "initialize"), Part("d", calls))
    with pytest.raises(RuntimeError, match="c broke at initialize") as raised:
        sink.initialize(run_record(), ())
    assert calls == ["a.initialize", "b.initialize", "c.initialize", "b.close", "a.close"]
    assert "b broke at close" in raised.value.__notes__[0]


def test_a_composite_of_nothing_is_refused() -> None:
    """It would deliver to nobody."""
    with pytest.raises(ConfigurationError, match="at least one"):
        CompositeSink()


@pytest.mark.parametrize("sink", [3, "stats", Part, object()])
def test_what_is_no_sink_is_refused(sink: Any) -> None:
    """A class in place of an object is a common mistake."""
    with pytest.raises(ConfigurationError, match="is no sink"):
        split_sinks(sink)
    with pytest.raises(ConfigurationError, match="is no sink"):
        CompositeSink(sink)


def test_splitting_flattens_and_finds_the_folder() -> None:
    """The parts are then isolated one by one, in the order in which they stand."""
    one, two, three = (Part(name, []) for name in "abc")
    directory = DirectorySink("stats")
    nested = CompositeSink(one, CompositeSink(directory, two), three)
    assert split_sinks(nested) == (directory, (one, two, three))
    assert split_sinks(directory) == (directory, ())
    assert split_sinks(one) == (None, (one,))
    assert split_sinks(None) == (None, ())


def test_two_folders_are_refused() -> None:
    """A run has one."""
    with pytest.raises(ConfigurationError, match=r"'a'.*'b'"):
        split_sinks(CompositeSink(DirectorySink("a"), DirectorySink("b")))
