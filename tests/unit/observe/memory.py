"""A session that keeps everything in memory, and an observer over it: what the tests of this room need."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from torchinstruments.config import ErrorPolicy
from torchinstruments.observe.applied import StepRelay
from torchinstruments.observe.compiled import NOTHING_COMPILED, compiled_parts
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.focus import select_focus
from torchinstruments.observe.observation import DEFAULT_SIGNALS
from torchinstruments.observe.observer import Observer
from torchinstruments.observe.probe import RootProbe
from torchinstruments.observe.sampling import AlwaysSampler, SamplingPolicy
from torchinstruments.observe.selection import Selector, leaf_modules, select_layers
from torchinstruments.observe.session_protocol import Companion, ScaleSource
from torchinstruments.observe.stance import Forcing
from torchinstruments.ranks.clock import StepClock
from torchinstruments.records import (
    AttemptRecord,
    ChecksRecord,
    ClosedAttempt,
    Counters,
    DeferredFingerprints,
    DeferredSample,
    ErrorRecord,
    FingerprintRecord,
    HistogramRecord,
    Measurement,
    ModuleRecord,
    Sample,
    Signal,
)
from torchinstruments.statistics.histograms import HistogramReducer
from torchinstruments.statistics.reducers import Reducer, default_reducers


class MemorySession:
    """Keeps what an observer leaves with it."""

    def __init__(self, *, begins: bool = True) -> None:
        self.deliveries: list[DeferredSample] = []
        self.attempts: list[AttemptRecord] = []
        self.fingerprints: list[FingerprintRecord] = []
        self.modules: tuple[ModuleRecord, ...] = ()
        self.errors: list[ErrorRecord] = []
        self.checks: list[ChecksRecord] = []
        self.begins = begins
        self.keeps_histograms = True
        self.num_begun = 0
        self.num_closed = 0
        self.sink_error: BaseException | None = None

    @property
    def url(self) -> str:
        """A fixed one."""
        return "memory://run"

    @property
    def world_size(self) -> int:
        """One."""
        return 1

    def begin(self) -> bool:
        """Counts, and answers as it was told to."""
        self.num_begun += 1
        return self.begins

    def wants_histograms(self) -> bool:
        """Answers as it was told to."""
        return self.keeps_histograms

    def put_sample(self, sample: DeferredSample) -> None:
        """Keeps a delivery."""
        self.deliveries.append(sample)

    def put_attempts(self, attempts: Sequence[ClosedAttempt]) -> None:
        """Keeps attempts."""
        self.attempts.extend(attempt.resolve() for attempt in attempts)

    def put_fingerprints(self, fingerprints: DeferredFingerprints) -> None:
        """Keeps fingerprints."""
        self.fingerprints.extend(fingerprints.resolve())

    def put_modules(self, modules: tuple[ModuleRecord, ...]) -> None:
        """Keeps the catalog."""
        self.modules = modules

    def put_checks(self, checks: ChecksRecord) -> None:
        """Keeps what checks have found."""
        self.checks.append(checks)

    def put_error(self, error: ErrorRecord) -> None:
        """Keeps an error."""
        self.errors.append(error)

    def counters(self, observed: Counters) -> Counters:
        """Adds the scalars that were delivered as rows."""
        return replace(observed, rows=sum(delivery.num_scalars for delivery in self.deliveries))

    def pending_error(self) -> BaseException | None:
        """Gives the error that a test put there, once."""
        error, self.sink_error = self.sink_error, None
        return error

    def flush(self, timeout_s: float | None = None) -> bool:
        """Succeeds but for a timeout of zero."""
        return timeout_s is None or timeout_s > 0

    def close(self, timeout_s: float | None = None) -> bool:
        """Counts, and succeeds but for a timeout of zero."""
        self.num_closed += 1
        return timeout_s is None or timeout_s > 0

    def samples(self) -> list[Sample]:
        """All deliveries, resolved."""
        return [delivery.resolve() for delivery in self.deliveries]

    def outputs(self) -> list[Measurement]:
        """All measured outputs, in the order of delivery."""
        return [m for sample in self.samples() for m in sample.measurements if m.signal is Signal.OUTPUT]

    def gradients(self) -> list[Measurement]:
        """All gradients, in the order of delivery."""
        return self.of(Signal.OUTPUT_GRADIENT)

    def of(self, signal: Signal, stage: str = "") -> list[Measurement]:
        """All measurements of one signal and stage, in the order of delivery."""
        return [
            m
            for sample in self.samples()
            for m in sample.measurements
            if m.signal is signal and m.stage == stage
        ]

    def histograms(self) -> list[HistogramRecord]:
        """All histograms, in the order of delivery."""
        return [h for sample in self.samples() for h in sample.histograms]


def no_selector_error(name: str, error: BaseException) -> None:
    """Fails the test."""
    raise AssertionError(f"the selector failed in {name}") from error


def observe(
    model: nn.Module,
    session: MemorySession,
    *,
    sampler: SamplingPolicy | None = None,
    selector: Selector | None = None,
    reducers: Sequence[Reducer] | None = None,
    policy: ErrorPolicy = ErrorPolicy.WARN,
    clock: StepClock | None = None,
    scale: ScaleSource | None = None,
    companions: Sequence[Companion] = (),
    on_selector_error: Callable[[str, BaseException], None] = no_selector_error,
    histograms: Sequence[HistogramReducer] = (),
    histogram_selector: Selector | None = None,
    max_histogram_modules: int = 8,
    capture_direct_forwards: bool = False,
    fingerprints: bool = False,
    signals: Collection[Signal] = DEFAULT_SIGNALS,
    steps: StepRelay | None = None,
    force_eager: bool = False,
    agreed: bool = False,
) -> Observer:
    """Attaches an observer that measures every forward."""
    chosen = selector or leaf_modules()
    parts = NOTHING_COMPILED if force_eager else compiled_parts(model)
    layers = select_layers(model, chosen, on_selector_error, parts)
    faults = Faults(policy, session.put_error)
    probe = RootProbe(
        model,
        layers=layers,
        sampler=sampler or AlwaysSampler(),
        reducers=default_reducers() if reducers is None else reducers,
        session=session,
        clock=clock or StepClock(),
        faults=faults,
        scale=scale,
        companions=companions,
        histograms=histograms,
        focus=select_focus(layers, histogram_selector, max_histogram_modules, on_selector_error),
        selector=chosen,
        capture_direct_forwards=capture_direct_forwards,
        fingerprints=fingerprints,
        signals=frozenset(signals),
        steps=steps,
        forcing=Forcing(faults, agreed=agreed) if force_eager else None,
    )
    observer = Observer(probe)
    observer.attach(model)
    return observer


def value(measurement: Measurement, metric: str = "mean") -> float:
    """The number of one metric."""
    number = measurement.values[measurement.metrics.index(metric)]
    assert number is not None, measurement.reasons
    return number


def num_hooks(model: nn.Module) -> int:
    """Forward hooks and pre-hooks in the whole model."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def traces(model: nn.Module) -> dict[str, list[str]]:
    """What a telemetry package may leave in modules below the model: hooks, and entries like a forward."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        own = [key for key in ("forward", "__getstate__", "_compiled_call_impl") if key in vars(module)]
        hooks = [key for key in ("_forward_hooks", "_forward_pre_hooks") if vars(module)[key]]
        if module is not model and own + hooks:
            found[name] = own + hooks
    return found


class Recorder(nn.Module):
    """Applies a function, so that a test can put anything into a forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    @override
    def forward(self, *args: torch.Tensor) -> Any:
        """Returns what the function makes of the input."""
        return self.function(*args)
