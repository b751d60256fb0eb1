"""How samples leave for the session: what they brought, or that they are missed.

Where they go from there is the session's business.
"""

import itertools
import time

from torchinstruments.observe.aligned import Due
from torchinstruments.observe.capture import SampledForward
from torchinstruments.observe.counts import Counts
from torchinstruments.observe.layers import ObservedLayers
from torchinstruments.observe.observation import Delivery, SampleFacts
from torchinstruments.observe.session_protocol import Session
from torchinstruments.records import GradSync, SampleState, ScaleProvenance

__all__ = ["Handover"]


class Handover:
    """Leaves the samples of one model with its session, and counts them.

    Args:
        session: Takes them, and the catalog.
        counts: Counts them.
        layers: What is observed of the model.
    """

    def __init__(self, session: Session, counts: Counts, layers: ObservedLayers) -> None:
        self._session = session
        self._counts = counts
        self._layers = layers
        self.ordinals = itertools.count()
        """Number the samples."""

    def tell_catalog(self) -> None:
        """Leaves the catalog with the session (training thread)."""
        self._session.put_modules(self._layers.catalog.records())

    def end_sample(self, sampled: SampledForward, *, failed: bool) -> None:
        """Hands over what a sampled forward brought, or that it is lost, where something raises."""
        is_delivered = False
        try:
            if not sampled.claim_end():
                sampled.detach()
                return
            delivery, gradients = sampled.end(failed=failed)
            self._counts.add(samples=1)
            is_delivered = True
            self.deliver(delivery)
            if gradients is not None:
                gradients.forward_ended(delivery.facts)
        except BaseException:
            sampled.detach()
            if not is_delivered:
                self.miss(sampled.facts())
            raise
        if self._layers.catalog.fired(sampled.order, time.monotonic()):
            self.tell_catalog()

    def miss_planned(self, due: Due) -> None:
        """Delivers what other ranks measure and this one did not (training thread, hot path)."""
        for place in due.missed:
            facts = SampleFacts(
                next(self.ordinals),
                place.position,
                place.started_at_us,
                GradSync.UNKNOWN,
                len(self._layers.current),
                0,
            )
            self.miss(facts)
        if due.num_lost:
            self._counts.add(missed=due.num_lost)

    def miss(self, facts: SampleFacts) -> None:
        """Delivers a sample that could not be taken."""
        self._counts.add(missed=1)
        self._session.put_sample(
            Delivery(
                facts=facts,
                state=SampleState.MISSED,
                backward_index=None,
                settled=True,
                collection_s=0.0,
                errors=0,
                parts=(),
                absence_metrics=(),
                scale_provenance=ScaleProvenance.UNKNOWN,
            )
        )

    def deliver(self, delivery: Delivery) -> None:
        """Hands a delivery to the session (training or autograd thread, hot path)."""
        self._counts.add(collection_s=delivery.collection_s)
        self._session.put_sample(delivery)

    def give_up(self, sampled: SampledForward) -> None:
        """Ends the sample of a call that never said that it is over."""
        self.end_sample(sampled, failed=True)
