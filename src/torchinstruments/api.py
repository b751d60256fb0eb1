"""The three functions that a training script calls: attach, detach, ask.

What is here checks arguments and puts the rooms together; nothing is measured, agreed or written here.
"""

import itertools
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from torchinstruments import environment
from torchinstruments.arguments import (
    DEFAULT_OUTPUT_DIR,
    check_flag,
    check_model,
    check_text,
    compiled_mode_of,
    destination_of,
    error_policy_of,
    histograms_of,
    history_of,
    optimizers_of,
    policy_of,
    reducers_of,
    refuse_beside_directory,
    sampler_of,
    scale_of,
    signals_of,
    sinks_of,
)
from torchinstruments.config import UNSET, CompiledMode, ErrorPolicy, HistoryConfig, RankPolicy, Unset
from torchinstruments.enrolment import RunPlan
from torchinstruments.observe.aligned import AlignedSampler
from torchinstruments.observe.applied import StepRelay
from torchinstruments.observe.compiled import NOTHING_COMPILED, compiled_parts
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.focus import select_focus
from torchinstruments.observe.observer import InertObserver, Observer, observer_of, refuse_second
from torchinstruments.observe.probe import RootProbe, refuse_scripted
from torchinstruments.observe.sampling import (
    SamplingPolicy,
    TimedSampler,
)
from torchinstruments.observe.selection import Layer, Selector, leaf_modules, select_layers
from torchinstruments.observe.stance import Forcing, is_agreed, refuse_disagreement
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.declared_scale import DeclaredScale
from torchinstruments.ranks.device_times import device_times
from torchinstruments.ranks.identity import discover, new_process_id
from torchinstruments.ranks.loss_scale import ScalerWatch
from torchinstruments.ranks.mesh import MeshPlace, mesh_place
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.ranks.policy import Policy
from torchinstruments.records import Identity, Signal
from torchinstruments.session import RunSession
from torchinstruments.sinks.sink import Sink
from torchinstruments.statistics.histograms import HistogramReducer
from torchinstruments.statistics.reducers import Reducer

__all__ = ["has_observer", "inject_observer", "remove_observer"]

_channels = itertools.count()


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
    compiled: CompiledMode | str = CompiledMode.BOUNDARY,
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
        compiled: What is observed of a compiled model: with ``boundary`` each compiled region as a whole;
            with ``force_eager`` every layer, for which sampled forwards and their backwards run eagerly, in
            the whole process. Between several ranks that needs ``rank_policy="all"`` and an
            `EveryNStepsSampler` or `AlwaysSampler`.
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
    check_model(model)
    directory, others = sinks_of(sink)
    if directory is not None:
        refuse_beside_directory(output_dir, storage_options, run_id, history_config)
        output_dir, storage_options, run_id = (
            directory.output_dir,
            directory.storage_options,
            directory.run_id,
        )
        history_config = directory.history_config
    destination = destination_of(
        DEFAULT_OUTPUT_DIR if isinstance(output_dir, Unset) else output_dir, storage_options, run_id
    )
    chosen_sampler, sampling = sampler_of(interval, sampler)
    chosen_reducers, statistics = reducers_of(reducers)
    chosen_histograms = histograms_of(histograms)
    history = history_of(history_config)
    policy = policy_of(rank_policy)
    errors = error_policy_of(error_policy)
    chosen_optimizers = optimizers_of(optimizer)
    check_flag("capture_direct_forwards", capture_direct_forwards)
    chosen_signals = signals_of(signals)
    mode = compiled_mode_of(compiled)
    if mode is CompiledMode.FORCE_EAGER:
        identity = discover("", "")
        refuse_disagreement(policy, chosen_sampler, 1 if identity is None else identity.world_size)
    declared_scale = scale_of(scaler)
    check_flag("fingerprints", fingerprints)
    check_text("selector", selector)
    check_text("histogram_selector", histogram_selector)
    check_text("max_histogram_modules", max_histogram_modules)
    refuse_second(model)
    # Before anything is claimed: a corrected try shall find the folder as it was.
    refuse_scripted(model)
    selector_errors: list[tuple[str, BaseException]] = []

    def keep_selector_error(layer: str, error: BaseException) -> None:
        selector_errors.append((layer, error))

    chosen_selector = leaf_modules() if isinstance(selector, Unset) else selector
    parts = compiled_parts(model) if mode is CompiledMode.BOUNDARY else NOTHING_COMPILED
    layers = select_layers(model, chosen_selector, keep_selector_error, parts)
    focus = select_focus(layers, histogram_selector, max_histogram_modules, keep_selector_error)
    if environment.is_disabled():
        return _attach_inert(model, destination.url)
    aligned = AlignedSampler(chosen_sampler) if type(chosen_sampler) is TimedSampler else None
    session = RunSession(
        process=new_process_id(),
        device=_device_of(model),
        destination=destination,
        plan=RunPlan(
            sampling=sampling,
            signals=tuple([signal.value for signal in chosen_signals]),
            statistics=statistics,
            history={"buffer_rows": history.buffer_rows, "window": history.window},
            policy=policy,
        ),
        history=history,
        error_policy=errors,
        channel=str(next(_channels)),
        sinks=others,
        aligned=aligned,
        mesh=partial(_mesh_place_of, weakref.ref(model)),
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
        mode=mode,
        policy=policy,
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
    mode: CompiledMode,
    policy: Policy,
) -> Observer:
    model_ref = weakref.ref(model)
    faults = Faults(error_policy, session.put_error)
    device = device_times(_first_device(model), faults.report_companion)
    now = time.perf_counter if device is None else device.now
    clock = StepClock(declared_optimizer=optimizers is not None, device=device)
    steps = StepRelay() if Signal.PARAMETER_GRADIENT in signals else None
    watch = OptimizerWatch(
        clock, model_ref, optimizers, on_error=faults.report_companion, now=now, listener=steps
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
        forcing=_forcing(mode, policy, sampler, faults),
    )
    session.finish_with(weakref.WeakMethod(probe.tell_open_attempt))
    session.pause_with(weakref.WeakMethod(probe.pause))
    session.fetch_with(probe.attempts.overdue)
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


def _forcing(mode: CompiledMode, policy: Policy, sampler: SamplingPolicy, faults: Faults) -> Forcing | None:
    """Returns what forces sampled forwards, where that was asked for.

    A process whose rank is not known yet may turn out to be one of several.
    """
    if mode is not CompiledMode.FORCE_EAGER:
        return None
    return Forcing(faults, agreed=is_agreed(policy, sampler, world_size=2))


def _device_of(model: nn.Module) -> str:
    """Returns where the model's first parameter or buffer lies, ``""`` where it has none."""
    device = _first_device(model)
    return "" if device is None else str(device)


def _mesh_place_of(model: weakref.ref[nn.Module]) -> MeshPlace:
    """Returns where this rank lies in the mesh of a model, which may be gone by then."""
    present = model()
    return MeshPlace() if present is None else mesh_place(present)


def _first_device(model: nn.Module) -> torch.device | None:
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        return tensor.device
    return None
