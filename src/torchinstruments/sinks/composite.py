"""Several sinks as one, and what `inject_observer` makes of its ``sink``."""

from collections.abc import Callable, Sequence
from typing import final

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Claim, Identity, ModuleRecord, RunRecord, Sample
from torchinstruments.sinks.destination import DirectorySink
from torchinstruments.sinks.sink import RankAware, Sink

__all__ = ["CompositeSink", "split_sinks"]

_METHODS = ("initialize", "observe", "close")


@final
class CompositeSink:
    """Gives every sample to several sinks, in order (a `Sink`).

    Given to `inject_observer` it is taken apart, and the sinks are isolated from each other one by one; a
    `DirectorySink` among them takes the place of the arguments that name the run's folder.

    Called by itself it tries all of them, and what some raised comes out together at the end. A sink that
    cannot begin ends the beginning: those before it are closed again.

    Args:
        *sinks: At least one.

    Attributes:
        sinks: As given.

    Raises:
        ConfigurationError: There is none, or one lacks a method of `Sink`.
    """

    def __init__(self, *sinks: Sink) -> None:
        if not sinks:
            raise ConfigurationError("CompositeSink() has nothing to deliver to; give it at least one sink")
        for sink in sinks:
            _check(sink)
        self.sinks: tuple[Sink, ...] = sinks

    def place(self, identity: Identity, claim: Claim) -> None:
        """Tells those that want to know who this process is (writer thread).

        Raises:
            ExceptionGroup: What they raised.
        """
        self._try_all("place", [_placing(sink, identity, claim) for sink in self.sinks])

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Begins all of them, or none (writer thread).

        Raises:
            Exception: What the first that could not begin raised.
        """
        begun: list[Sink] = []
        try:
            for sink in self.sinks:
                sink.initialize(run, modules)
                begun.append(sink)
        except BaseException as error:
            for sink in reversed(begun):
                try:
                    sink.close()
                except Exception as another:  # noqa: BLE001 - a sink may be anybody's code
                    error.add_note(f"closing {type(sink).__name__} failed after that: {another!r}")
            raise

    def observe(self, sample: Sample) -> None:
        """Gives a sample to all of them (writer thread).

        Raises:
            ExceptionGroup: What they raised.
        """
        self._try_all("observe", [_observing(sink, sample) for sink in self.sinks])

    def close(self) -> None:
        """Closes all of them (writer thread).

        Raises:
            ExceptionGroup: What they raised.
        """
        self._try_all("close", [sink.close for sink in self.sinks])

    def _try_all(self, what: str, calls: Sequence[Callable[[], None]]) -> None:
        errors: list[Exception] = []
        for call in calls:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - a sink may be anybody's code
                errors.append(error)
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {len(self.sinks)} sinks failed at {what}", errors)


def split_sinks(sink: object) -> tuple[DirectorySink | None, tuple[Sink, ...]]:
    """Takes apart what a user gave as ``sink`` (attaching thread).

    Args:
        sink: None, a sink, a `DirectorySink`, or a `CompositeSink` of such, nested at will.

    Returns:
        The run's folder, where one was named; and the other sinks in order.

    Raises:
        ConfigurationError: Something is no sink, or more than one folder is named.
    """
    directories: list[DirectorySink] = []
    others: list[Sink] = []
    waiting: list[object] = [] if sink is None else [sink]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, CompositeSink):
            waiting[:0] = one.sinks
        elif isinstance(one, DirectorySink):
            directories.append(one)
        else:
            others.append(_check(one))
    if len(directories) > 1:
        raise ConfigurationError(
            f"a run has one folder, but {directories[0]!r} and {directories[1]!r} were given; leave one out, "
            f"and copy the folder after the run where it is wanted twice"
        )
    return (directories[0] if directories else None), tuple(others)


def _check(sink: object) -> Sink:
    missing = [name for name in _METHODS if not callable(getattr(sink, name, None))]
    if isinstance(sink, type) or missing:
        lacks = "is a class" if isinstance(sink, type) else f"has no method {missing[0]}"
        raise ConfigurationError(
            f"{sink!r} is no sink, since it {lacks}; give an object with initialize(run, modules), "
            f"observe(sample) and close()"
        )
    return sink  # pyrefly: ignore[bad-return] - what it has was looked at above


def _placing(sink: Sink, identity: Identity, claim: Claim) -> Callable[[], None]:
    def place() -> None:
        if isinstance(sink, RankAware):
            sink.place(identity, claim)

    return place


def _observing(sink: Sink, sample: Sample) -> Callable[[], None]:
    def observe() -> None:
        sink.observe(sample)

    return observe
