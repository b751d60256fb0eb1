"""The sinks of a run, each isolated from the others, and what becomes of what they are handed.

What a sink raises, an end of the program or a cancelled task too, is counted, told to the sinks that keep
errors and to the owner, and goes no further. So is what the program brings about elsewhere on this way: it
costs one item.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from torchinstruments.records import (
    ChecksRecord,
    Claim,
    DeferredFingerprints,
    DeferredSample,
    ErrorRecord,
    Identity,
    ModuleRecord,
    RunRecord,
    error_text,
)
from torchinstruments.sinks.outbox import (
    Attempts,
    BoundedOutbox,
    Dropped,
    Fingerprints,
    Item,
    Modules,
    describe,
)
from torchinstruments.sinks.sink import ChecksSink, RankAware, Sink, TelemetrySink
from torchinstruments.sinks.waiting_attempts import WaitingAttempts
from torchinstruments.sinks.yields import Yield

__all__ = ["Recipients", "named"]

_MAX_MESSAGE_CHARACTERS = 500


class Recipients:
    """Hands what waits in an outbox to sinks (writer thread, or the closing one when that has ended).

    Args:
        outbox: What waits.
        report: Told of every failure, as (probe, error).
        patience_s: How long attempts wait for what the host does not know yet of them.
    """

    def __init__(
        self, outbox: BoundedOutbox, report: Callable[[str, BaseException], None], patience_s: float
    ) -> None:
        self._outbox = outbox
        self._report = report
        self.waiting = WaitingAttempts(patience_s, self.fail)
        """Attempts that are not handed over yet."""
        self.modules: tuple[ModuleRecord, ...] = ()
        """The catalog as it is when the sinks begin."""
        self._sinks: list[Sink] = []
        self._keepers: list[TelemetrySink] = []
        self._place: tuple[Identity, Claim] | None = None
        self._dropped_told = Dropped()
        self._unresolved_rows = 0
        self._unkept_rows = 0
        self._lost_keeper = False
        self._yield = Yield()

    @property
    def rows_lost(self) -> int:
        """Rows of ``history`` that left the outbox and never reached a sink that keeps them (any thread)."""
        return self._unresolved_rows + self._unkept_rows

    @property
    def emptiness(self) -> str:
        """Why not one number of the samples so far has a value; ``""`` where one has (closing thread)."""
        return self._yield.emptiness()

    def initialize(self, run: RunRecord, sinks: Sequence[Sink], place: tuple[Identity, Claim] | None) -> None:
        """Tells the sinks of the run; one that could not even begin is left out from here on.

        Args:
            run: Which one.
            sinks: In the order in which they take samples.
            place: Who this process is and what the ranks agreed on, for the sinks that are `RankAware`.
        """
        self._sinks = list(sinks)
        self._place = place
        self._keepers = [sink for sink in self._sinks if isinstance(sink, TelemetrySink)]
        wanted = len(self._keepers)
        self._sinks = [sink for sink in self._sinks if self._begin(sink, run)]
        self._keepers = [sink for sink in self._sinks if isinstance(sink, TelemetrySink)]
        self._lost_keeper = len(self._keepers) < wanted

    def _begin(self, sink: Sink, run: RunRecord) -> bool:
        if (
            self._place is not None
            and isinstance(sink, RankAware)
            and not self._call(sink, sink.place, *self._place)
        ):
            return False
        return self._call(sink, sink.initialize, run, self.modules)

    def hand_over(self) -> None:
        """Gives the sinks what waits now; what comes meanwhile waits for the next round."""
        for _ in range(len(self._outbox)):
            item = self._outbox.take()
            if item is None:
                continue
            try:
                self._hand_over_one(item)
            except Exception as error:  # noqa: BLE001 - the next item goes on
                self._unresolved_rows += _num_rows(item)
                lost = RuntimeError(f"{_contents(item)} did not reach the sinks: {named(error)}")
                lost.__cause__ = error
                self.fail("sink", "", lost)
            except BaseException:
                self._unresolved_rows += _num_rows(item)
                raise
        dropped = self._outbox.dropped
        if dropped != self._dropped_told:
            error = BufferError(describe(self._dropped_told, dropped))
            self._dropped_told = dropped
            self.fail("sink", "", error)

    def _hand_over_one(self, item: Item) -> None:
        if isinstance(item, Attempts):
            self.waiting.put(item)
            self.hand_over_waiting(everything=False)
        elif isinstance(item, Fingerprints):
            self._hand_over_fingerprints(item.deferred)
        elif isinstance(item, Modules):
            for keeper in self._keepers:
                self._call(keeper, keeper.modules, item.records)
        elif isinstance(item, ChecksRecord):
            for keeper in self._keepers:
                if isinstance(keeper, ChecksSink):
                    self._call(keeper, keeper.checks, item)
        elif isinstance(item, ErrorRecord):
            self._keep(item)
        else:
            self._hand_over_sample(item)

    def hand_over_waiting(self, *, everything: bool) -> None:
        """Hands over the attempts that need not wait any longer, in their order."""
        for records in self.waiting.take_due(everything=everything):
            for keeper in self._keepers:
                self._call(keeper, keeper.attempts, records)

    def tick(self) -> None:
        """Lets the sinks that keep rows do what is due."""
        for keeper in self._keepers:
            self._call(keeper, keeper.tick)

    def drop_rest(self) -> int:
        """Counts what waits in the outbox as dropped; returns its scalars."""
        lost = 0
        while (item := self._outbox.take()) is not None:
            lost += _num_rows(item)
        self._unresolved_rows += lost
        return lost

    def leave(self) -> None:
        """Makes durable what was taken, where nothing marks the run's folder as closed."""
        for sink in self._sinks:
            if isinstance(sink, TelemetrySink):
                self._call(sink, sink.flush)
            else:
                self._call(sink, sink.close)

    def flush(self) -> bool:
        """Has what was taken made durable; returns whether it is."""
        durable = not self._lost_keeper
        for keeper in self._keepers:
            durable &= self._call(keeper, keeper.flush)
        return durable

    def _hand_over_sample(self, deferred: DeferredSample) -> None:
        try:
            sample = deferred.resolve()
        except BaseException as error:  # noqa: BLE001 - whatever a device did, training and the next sample go on
            self._unresolved_rows += deferred.num_scalars
            self.fail("reducer", "", error)
            return
        self._yield.add(sample)
        if self._lost_keeper:
            self._unkept_rows += deferred.num_scalars
        for sink in self._sinks:
            self._call(sink, sink.observe, sample)

    def _hand_over_fingerprints(self, deferred: DeferredFingerprints) -> None:
        try:
            records = deferred.resolve()
        except BaseException as error:  # noqa: BLE001 - whatever a device did, training and the next attempt go on
            lost = RuntimeError(f"{deferred.num_rows} fingerprints are lost: {type(error).__name__}: {error}")
            self.fail("fingerprint", "", lost)
            return
        for keeper in self._keepers:
            self._call(keeper, keeper.fingerprints, records)

    def finish(self, deadline_s: float, *, complete: bool) -> bool:
        """Closes the sinks, those that keep errors last.

        Args:
            deadline_s: Seconds of `time.monotonic` at which it has to be over.
            complete: Whether more is done than what is needed.

        Returns:
            Whether everything is where readers look.
        """
        for sink in self._sinks:
            if not isinstance(sink, TelemetrySink):
                self._call(sink, sink.close)
        arrived = not self._lost_keeper
        for keeper in self._keepers:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            arrived &= self._call(keeper, partial(keeper.finish, left_s, complete=complete))
        return arrived

    def _call(self, sink: Sink, function: Callable[..., object], *arguments: object) -> bool:
        """Calls a method of a sink; returns whether it neither raised nor answered False."""
        try:
            return function(*arguments) is not False
        except BaseException as error:  # noqa: BLE001 - a sink may be anybody's code
            self.fail("sink", type(sink).__name__, error)
            return False

    def fail(self, probe: str, where: str, error: BaseException) -> None:
        """Has an error kept and told (writer thread)."""
        text = error_text(error, _MAX_MESSAGE_CHARACTERS)
        self._keep(ErrorRecord(probe, where, type(error).__name__, text))
        self._report(probe, error)

    def _keep(self, record: ErrorRecord) -> None:
        """Gives an error to the sinks that keep errors; a failure at that is reported, but not kept."""
        for keeper in self._keepers:
            try:
                keeper.error(record)
            except BaseException as error:  # noqa: BLE001 - a sink may be anybody's code
                self._report("sink", error)


def _num_rows(item: Item) -> int:
    """Returns the rows of ``history`` that an item holds."""
    if isinstance(item, Attempts | Fingerprints | Modules | ChecksRecord | ErrorRecord):
        return 0
    return item.num_scalars


def _contents(item: Item) -> str:
    """Returns what an item holds, as a message says it."""
    if isinstance(item, Attempts):
        return f"{len(item.records)} attempts"
    if isinstance(item, Fingerprints):
        return f"{item.deferred.num_rows} fingerprints"
    if isinstance(item, Modules):
        return f"the catalog of {len(item.records)} modules"
    if isinstance(item, ChecksRecord):
        return "a report of checks"
    if isinstance(item, ErrorRecord):
        return "an error of collection"
    return f"a sample of {item.num_scalars} scalars"


def named(error: BaseException) -> str:
    """Returns an error as a message says it."""
    text = error_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
