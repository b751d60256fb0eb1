"""The three functions that a training script calls: attach, detach, ask.

What is here checks arguments and puts the rooms together; nothing is measured, agreed or written here.
"""

import itertools
import math
import os
import re
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from torchinstruments import environment
from torchinstruments.config import UNSET, ErrorPolicy, HistoryConfig, RankPolicy, Unset
from torchinstruments.enrolment import Destination, RunPlan
from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.aligned import AlignedSampler
from torchinstruments.observe.applied import StepRelay
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.focus import select_focus
from torchinstruments.observe.observation import DEFAULT_SIGNALS
from torchinstruments.observe.observer import InertObserver, Observer, observer_of, refuse_second
from torchinstruments.observe.probe import RootProbe, refuse_scripted
from torchinstruments.observe.sampling import (
    SamplingPolicy,
    TimedSampler,
    describe,
    validate_sampler,
)
from torchinstruments.observe.selection import Layer, Selector, leaf_modules, select_layers
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.device_times import device_times
from torchinstruments.ranks.identity import new_process_id
from torchinstruments.ranks.loss_scale import DeclaredScale, ScalerWatch
from torchinstruments.ranks.optimizers import OptimizerWatch, unwrapped
from torchinstruments.ranks.policy import parse_policy
from torchinstruments.records import Identity, Signal
from torchinstruments.session import RunSession
from torchinstruments.sinks.composite import split_sinks
from torchinstruments.sinks.sink import Sink
from torchinstruments.statistics.histograms import HistogramReducer, histogram
from torchinstruments.statistics.reducers import Reducer, default_reducers, metric_names, validate_reducers
from torchinstruments.store.layout import safe_run_id
from torchinstruments.store.urls import check_url, is_remote, redact

__all__ = ["has_observer", "inject_observer", "remove_observer"]

DEFAULT_OUTPUT_DIR = "stats"

_channels = itertools.count()
_PLACEHOLDER = re.compile(r"\{[^{}/]*\}")


def inject_observer(
    model: nn.Module,
    *,
    output_dir: str | os.PathLike[str] | Unset = UNSET,
    storage_options: Mapping[str, object] | None = None,
    run_id: str | None = None,
    interval: timedelta | Unset = UNSET,
    sampler: SamplingPolicy | None = None,
    selector: Selector | Unset = UNSET,
    reducers: Sequence[Reducer] | Unset = UNSET,
    histograms: Sequence[HistogramReducer] | Unset = UNSET,
    histogram_selector: Selector | None = None,
    max_histogram_modules: int = 8,
    sink: Sink | None = None,
    history_config: HistoryConfig | Unset = UNSET,
    rank_policy: RankPolicy | str | Collection[int] | Callable[[Identity], bool] = RankPolicy.ALL,
    error_policy: ErrorPolicy | str = ErrorPolicy.WARN,
    capture_direct_forwards: bool = False,
    signals: Collection[Signal | str] | Unset = UNSET,
    optimizer: Optimizer | Sequence[Optimizer] | Unset = UNSET,
    scaler: GradScaler | float | Unset | None = UNSET,
    fingerprints: bool = False,
) -> Observer:
    """Attaches an observer to a model; call it on every rank, after the model was wrapped.

    Training stays bit for bit what it was. The first eligible forward of each interval becomes a sample: the
    outputs of the selected layers and, in its backward, the gradients with respect to them are reduced to
    scalars and kept. Call `remove_observer` at the end.

    Args:
        model: The model as the training loop calls it: plain, or wrapped by DDP, FSDP or ``torch.compile``.
        output_dir: Folder of the run, ``stats`` where it is not given: a path, or any URL that fsspec knows,
            ``s3://bucket/run``. It may hold ``{run_id}``. A folder that holds another run is left alone: this
            one goes beside it, and `Observer.url` has the truth.
        storage_options: For a URL: settings in fsspec's dialect. They are never written anywhere.
        run_id: Name of the run, equal on all ranks. A job that is started again under the same id goes on in
            the same folder. Else that of torchrun or Slurm, else one made by the leader.
        interval: Time between samples, one minute where neither it nor a sampler is given.
        sampler: Chooses the forwards to measure, in place of an interval.
        selector: Chooses layers by name and module; leaf modules where it is not given.
        reducers: What is computed of a tensor; the exact profile of nine statistics where it is not given.
        histograms: What is drawn of the layers in focus, on their sampled forwards and backwards; one of 64
            bins where it is not given, none with ``()``. They go into TensorBoard files in ``tensorboard/``.
        histogram_selector: Chooses the layers in focus by name and module among the selected ones, in place
            of the first ones.
        max_histogram_modules: How many layers are in focus at most.
        sink: Takes the samples too, beside the run's folder. A `DirectorySink`, alone or in a
            `CompositeSink`, stands for that folder, in place of ``output_dir`` and its companions.
        history_config: How the history is buffered and summarised.
        rank_policy: Which ranks observe: ``all``, ``rank0``, ``node`` (local rank 0 of each host), a
            collection of ranks, or a callable of the `records.Identity`.
        error_policy: What happens to errors while collecting: ``warn`` (once a kind), ``ignore``, or
            ``raise``, at the next root forward. They are counted and kept in every case.
        capture_direct_forwards: Whether calls of ``module.forward(...)`` that bypass ``module(...)`` are
            measured too.
        signals: What is measured of the selected layers, ``("output", "output_gradient")`` where it is not
            given: any of ``input``, ``output``, ``output_gradient``, ``parameter``, ``parameter_gradient``.
        optimizer: The one, or those, whose steps count, where not every optimizer of the model's parameters
            should. A wrapper of an optimizer stands for the one inside.
        scaler: What scales the loss: a gradient scaler, a number that the loop multiplies the loss with, or
            None for nothing. Where it is not given, a gradient scaler is found by itself.
        fingerprints: Whether a digest of every parameter and buffer is kept once an attempt that is sampled,
            by which replicas on different ranks can be compared.

    Returns:
        The observer; an inert one on a rank that does not observe, and where ``TORCHINSTRUMENTS_DISABLED`` is
        set.

    Raises:
        ObserverAlreadyAttachedError: The model has one already.
        ConfigurationError: An argument, or the launcher's variables, cannot work. The message names both
            where two conflict.
        StorageDeniedError: The store denies access; on all ranks alike.
        StorageNotFoundError: The bucket does not exist; on all ranks alike.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"model={model!r} is no torch.nn.Module; give the model that the training loop calls"
        )
    directory, others = split_sinks(sink)
    if directory is not None:
        _refuse_beside_directory(output_dir, storage_options, run_id, history_config)
        output_dir, storage_options, run_id = (
            directory.output_dir,
            directory.storage_options,
            directory.run_id,
        )
        history_config = directory.history_config
    destination = _destination(
        DEFAULT_OUTPUT_DIR if isinstance(output_dir, Unset) else output_dir, storage_options, run_id
    )
    chosen_sampler = _sampler(interval, sampler)
    chosen_reducers = default_reducers() if isinstance(reducers, Unset) else validate_reducers(reducers)
    chosen_histograms = _histograms(histograms)
    history = HistoryConfig() if isinstance(history_config, Unset) else history_config
    if not isinstance(history, HistoryConfig):
        raise ConfigurationError(
            f"history_config={history!r} is not possible; give a HistoryConfig(buffer_rows=..., window=...)"
        )
    policy = parse_policy(rank_policy)
    errors = _error_policy(error_policy)
    chosen_optimizers = _optimizers(optimizer)
    if not isinstance(capture_direct_forwards, bool):
        raise ConfigurationError(
            f"capture_direct_forwards={capture_direct_forwards!r} is not possible; give True or False"
        )
    chosen_signals = _signals(signals)
    declared_scale = _declared_scale(scaler)
    if not isinstance(fingerprints, bool):
        raise ConfigurationError(f"fingerprints={fingerprints!r} is not possible; give True or False")
    refuse_second(model)
    # Before anything is claimed: a corrected try shall find the folder as it was.
    refuse_scripted(model)
    selector_errors: list[tuple[str, BaseException]] = []

    def keep_selector_error(layer: str, error: BaseException) -> None:
        selector_errors.append((layer, error))

    chosen_selector = leaf_modules() if isinstance(selector, Unset) else selector
    layers = select_layers(model, chosen_selector, keep_selector_error)
    focus = select_focus(layers, histogram_selector, max_histogram_modules, keep_selector_error)
    if environment.is_disabled():
        return _attach_inert(model, destination.url)
    aligned = AlignedSampler(chosen_sampler) if type(chosen_sampler) is TimedSampler else None
    session = RunSession(
        process=new_process_id(),
        device=_device_of(model),
        destination=destination,
        plan=RunPlan(
            sampling=describe(chosen_sampler),
            signals=tuple([signal.value for signal in chosen_signals]),
            statistics=metric_names(chosen_reducers),
            history={"buffer_rows": history.buffer_rows, "window": history.window},
            policy=policy,
        ),
        history=history,
        error_policy=errors,
        channel=str(next(_channels)),
        sinks=others,
        aligned=aligned,
    )
    is_open = session.open()
    if not session.observing:
        return _attach_inert(model, session.url)
    return _attach(
        model,
        session,
        layers=layers,
        sampler=chosen_sampler,
        reducers=chosen_reducers,
        error_policy=errors,
        optimizers=chosen_optimizers,
        scaler=declared_scale,
        selector_errors=selector_errors,
        histograms=chosen_histograms,
        focus=focus if chosen_histograms else frozenset(),
        selector=chosen_selector,
        capture_direct_forwards=capture_direct_forwards,
        signals=frozenset(chosen_signals),
        fingerprints=fingerprints,
        aligned=aligned if session.world_size > 1 or not is_open else None,
    )


def remove_observer(model: nn.Module) -> None:
    """Detaches the model's observer and finishes its files; does nothing where there is none.

    Waits for at most a minute until everything is where readers look; `Observer.close` takes another
    time.

    Raises:
        Exception: With ``error_policy="raise"``, an error of collection that was not raised before.
    """
    observer = observer_of(model)
    if observer is not None:
        observer.close()


def has_observer(model: nn.Module) -> bool:
    """Returns whether the model is observed in this process. An inert observer does not observe."""
    observer = observer_of(model)
    return observer is not None and observer.observing


def _attach_inert(model: nn.Module, url: str) -> Observer:
    observer = InertObserver(url)
    observer.attach(model)
    return observer


def _attach(
    model: nn.Module,
    session: RunSession,
    *,
    layers: Sequence[Layer],
    sampler: SamplingPolicy,
    reducers: Sequence[Reducer],
    error_policy: ErrorPolicy,
    optimizers: Sequence[Optimizer] | None,
    scaler: DeclaredScale,
    selector_errors: Sequence[tuple[str, BaseException]],
    histograms: Sequence[HistogramReducer],
    focus: frozenset[int],
    selector: Selector,
    capture_direct_forwards: bool,
    signals: frozenset[Signal],
    fingerprints: bool,
    aligned: AlignedSampler | None,
) -> Observer:
    model_ref = weakref.ref(model)

    def parameters() -> Iterable[torch.Tensor]:
        present = model_ref()
        return () if present is None else present.parameters()

    faults = Faults(error_policy, session.put_error)
    device = device_times(_first_device(model), faults.report_companion)
    now = time.perf_counter if device is None else device.now
    clock = StepClock(declared_optimizer=optimizers is not None, device=device)
    steps = StepRelay() if Signal.PARAMETER_GRADIENT in signals else None
    watch = OptimizerWatch(
        clock, parameters, optimizers, on_error=faults.report_companion, now=now, listener=steps
    )
    scale = ScalerWatch(
        clock,
        watch,
        declared=scaler,
        on_error=faults.report_companion,
        on_notice=faults.notice_companion,
        now=now,
    )
    probe = RootProbe(
        model,
        layers=layers,
        sampler=sampler,
        reducers=reducers,
        session=session,
        clock=clock,
        faults=faults,
        scale=scale,
        companions=(watch, scale),
        selector_errors=selector_errors,
        histograms=histograms,
        focus=focus,
        selector=selector,
        capture_direct_forwards=capture_direct_forwards,
        signals=signals,
        steps=steps,
        fingerprints=fingerprints,
        now=now,
        aligned=aligned,
    )
    session.finish_with(weakref.WeakMethod(probe.tell_open_attempt))
    session.count_with(probe.counters)
    observer = Observer(probe)
    try:
        observer.attach(model)
    except BaseException:
        session.close()
        raise
    # A model that is dropped without remove_observer must not leave its writer thread behind.
    weakref.finalize(model, _abandon, session, clock, now).atexit = False
    return observer


def _abandon(session: RunSession, clock: StepClock, now: Callable[[], float]) -> None:
    """Ends the run of a model that is gone, with the attempt that was open."""
    session.put_attempts(clock.close(now()))
    session.abandon()


def _destination(
    output_dir: object, storage_options: Mapping[str, object] | None, run_id: object
) -> Destination:
    if not isinstance(output_dir, (str, os.PathLike)) or not str(output_dir).strip():
        raise ConfigurationError(
            f"output_dir={output_dir!r} is no folder; give a path such as 'stats', or a URL such as "
            f"'s3://bucket/run'"
        )
    url = output_dir if isinstance(output_dir, str) else os.fspath(Path(output_dir))
    check_url(url)
    unknown = next((name for name in _PLACEHOLDER.findall(url) if name != "{run_id}"), None)
    if unknown is not None:
        raise ConfigurationError(
            f"output_dir={redact(url)!r} has the placeholder {unknown}, which stands for nothing; {{run_id}} "
            f"is the only one, so write the name itself, without braces"
        )
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise ConfigurationError(
            f"storage_options of type {type(storage_options).__name__} is not possible; give a dict in "
            f"fsspec's dialect, such as {{'key': ..., 'secret': ...}}"
        )
    if storage_options and not is_remote(url):
        raise ConfigurationError(
            f"storage_options was given, but output_dir={url!r} is a local folder, which takes none; leave "
            f"storage_options out, or give a URL"
        )
    if run_id is None:
        return Destination(url, storage_options, None)
    if not isinstance(run_id, str):
        raise ConfigurationError(f"run_id={run_id!r} is no text; give a name such as 'run-7'")
    try:
        return Destination(url, storage_options, safe_run_id(run_id))
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _refuse_beside_directory(
    output_dir: object, storage_options: object, run_id: object, history_config: object
) -> None:
    """Refuses arguments that a `DirectorySink` has too, whatever their values."""
    given = {
        "output_dir": not isinstance(output_dir, Unset),
        "storage_options": storage_options is not None,
        "run_id": run_id is not None,
        "history_config": not isinstance(history_config, Unset),
    }
    for name, is_given in given.items():
        if is_given:
            raise ConfigurationError(
                f"{name} and a DirectorySink conflict, since the DirectorySink has its own {name}; give "
                f"{name} to the DirectorySink alone, or leave the DirectorySink out"
            )


def _signals(signals: object) -> tuple[Signal, ...]:
    """Returns the signals that were asked for, each once, in the order of `Signal`."""
    if isinstance(signals, Unset):
        return tuple([signal for signal in Signal if signal in DEFAULT_SIGNALS])
    allowed = ", ".join(repr(signal.value) for signal in Signal)
    if isinstance(signals, str) or not isinstance(signals, Collection):
        raise ConfigurationError(
            f"signals={signals!r} is no collection of names; give a tuple such as "
            f"('output', 'output_gradient'), with any of {allowed}"
        )
    known = {signal.value: signal for signal in Signal}
    for one in signals:
        if not isinstance(one, str) or one not in known:
            raise ConfigurationError(f"signals has {one!r}, which is not possible; give any of {allowed}")
    if not signals:
        raise ConfigurationError(
            f"signals={signals!r} is empty, so that nothing would be measured; give any of {allowed}"
        )
    return tuple([signal for signal in Signal if signal in signals])


def _histograms(histograms: object) -> tuple[HistogramReducer, ...]:
    if isinstance(histograms, Unset):
        return (histogram(),)
    if not isinstance(histograms, Sequence) or not all(
        isinstance(one, HistogramReducer) for one in histograms
    ):
        raise ConfigurationError(
            f"histograms={histograms!r} is not possible; give a tuple of histogram(...), or () for none"
        )
    names = [one.name for one in histograms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"histograms has the name {twice!r} twice; give each its own name=")
    return tuple(histograms)


def _declared_scale(scaler: object) -> DeclaredScale:
    if scaler is None or isinstance(scaler, (Unset, GradScaler)):
        return scaler
    if isinstance(scaler, (int, float)) and not isinstance(scaler, bool):
        number = float(scaler)
        if math.isfinite(number) and number > 0:
            return number
    raise ConfigurationError(
        f"scaler={scaler!r} is not possible; give the torch.amp.GradScaler of the training loop, None where "
        f"nothing scales the loss, a positive number that the loop multiplies it with, or leave it out"
    )


def _sampler(interval: timedelta | Unset, sampler: SamplingPolicy | None) -> SamplingPolicy:
    if sampler is None:
        return TimedSampler() if isinstance(interval, Unset) else TimedSampler(interval)
    if not isinstance(interval, Unset):
        raise ConfigurationError(
            f"interval={interval!r} and sampler={sampler!r} conflict: a sampler decides alone; give one "
            f"of the two"
        )
    return validate_sampler(sampler)


def _optimizers(optimizer: object) -> tuple[Optimizer, ...] | None:
    if isinstance(optimizer, Unset):
        return None
    # A wrapper may be a sequence too, but a sequence of optimizers holds none by a name.
    given = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
    found = [unwrapped(one) for one in given]
    if not found or None in found:
        raise ConfigurationError(
            f"optimizer={optimizer!r} is no torch.optim.Optimizer; give one, or a sequence of them, or leave "
            f"it out to count the steps of every optimizer of the model"
        )
    return tuple([one for one in found if one is not None])


def _error_policy(value: object) -> ErrorPolicy:
    try:
        return ErrorPolicy(str(value))
    except ValueError:
        allowed = ", ".join(repr(policy.value) for policy in ErrorPolicy)
        raise ConfigurationError(f"error_policy={value!r} is not known; give one of {allowed}") from None


def _device_of(model: nn.Module) -> str:
    """Returns where the model's first parameter or buffer lies, ``""`` where it has none."""
    device = _first_device(model)
    return "" if device is None else str(device)


def _first_device(model: nn.Module) -> torch.device | None:
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        return tensor.device
    return None
