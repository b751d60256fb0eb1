"""The arguments of `inject_observer`, each checked by itself before anything is claimed.

What a user's object raises while it is read becomes a `ConfigurationError` that names the argument.
"""

import os
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from torchinstruments.config import CompiledMode, ErrorPolicy, HistoryConfig, Unset
from torchinstruments.errors import ConfigurationError, TorchInstrumentsError
from torchinstruments.observe.observation import DEFAULT_SIGNALS
from torchinstruments.observe.sampling import SamplingPolicy, TimedSampler, describe, validate_sampler
from torchinstruments.rank_place import Destination
from torchinstruments.ranks.declared_scale import DeclaredScale, declared_scale_of
from torchinstruments.ranks.optimizers import unwrapped
from torchinstruments.ranks.policy import Policy, parse_policy
from torchinstruments.records import Signal
from torchinstruments.sinks.composite import split_sinks
from torchinstruments.sinks.destination import DirectorySink
from torchinstruments.sinks.sink import Sink
from torchinstruments.statistics.histograms import HistogramReducer, histogram
from torchinstruments.statistics.reducers import Reducer, default_reducers, metric_names, validate_reducers
from torchinstruments.store.layout import safe_run_id
from torchinstruments.store.urls import check_url, is_remote, redact

__all__ = [
    "DEFAULT_OUTPUT_DIR",
    "check_flag",
    "check_model",
    "check_text",
    "compiled_mode_of",
    "scale_of",
    "destination_of",
    "error_policy_of",
    "histograms_of",
    "history_of",
    "optimizers_of",
    "policy_of",
    "reducers_of",
    "refuse_beside_directory",
    "sampler_of",
    "signals_of",
    "sinks_of",
]

DEFAULT_OUTPUT_DIR = "stats"

_PLACEHOLDER = re.compile(r"\{[^{}/]*\}")


def check_model(model: object) -> None:
    """Refuses what is no module (attaching thread)."""
    with _reading("model", model):
        if not isinstance(model, nn.Module):
            raise ConfigurationError(
                f"model={model!r} is no torch.nn.Module; give the model that the training loop calls"
            )


def check_flag(name: str, value: object) -> None:
    """Refuses what is neither True nor False (attaching thread)."""
    with _reading(name, value):
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name}={value!r} is not possible; give True or False")


def check_text(name: str, value: object) -> None:
    """Refuses what has no text, before a message about it needs one (attaching thread)."""
    with _reading(name, value):
        repr(value)


def destination_of(
    output_dir: object, storage_options: Mapping[str, object] | None, run_id: object
) -> Destination:
    """Returns where the run goes (attaching thread)."""
    with _reading("output_dir", output_dir):
        url = _url(output_dir)
    with _reading("storage_options", storage_options):
        _check_options(storage_options, url)
    if run_id is None:
        return Destination(url, storage_options, None)
    with _reading("run_id", run_id):
        if not isinstance(run_id, str):
            raise ConfigurationError(f"run_id={run_id!r} is no text; give a name such as 'run-7'")
        try:
            return Destination(url, storage_options, safe_run_id(run_id))
        except ValueError as error:
            raise ConfigurationError(str(error)) from None


def _url(output_dir: object) -> str:
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
    return url


def _check_options(storage_options: object, url: str) -> None:
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


def refuse_beside_directory(
    output_dir: object, storage_options: object, run_id: object, history_config: object
) -> None:
    """Refuses arguments that a `DirectorySink` has too, whatever their values (attaching thread)."""
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


def history_of(history_config: object) -> HistoryConfig:
    """Returns how the history is buffered (attaching thread)."""
    if isinstance(history_config, Unset):
        return HistoryConfig()
    with _reading("history_config", history_config):
        if not isinstance(history_config, HistoryConfig):
            raise ConfigurationError(
                f"history_config={history_config!r} is not possible; give a HistoryConfig(buffer_rows=..., "
                f"window=...)"
            )
    return history_config


def reducers_of(reducers: Sequence[Reducer] | Unset) -> tuple[tuple[Reducer, ...], tuple[str, ...]]:
    """Returns the reducers and the names of their metrics (attaching thread)."""
    with _reading("reducers", reducers):
        chosen = default_reducers() if isinstance(reducers, Unset) else validate_reducers(reducers)
        return chosen, metric_names(chosen)


def signals_of(signals: object) -> tuple[Signal, ...]:
    """Returns the signals that were asked for, each once, in the order of `Signal` (attaching thread)."""
    if isinstance(signals, Unset):
        return tuple([signal for signal in Signal if signal in DEFAULT_SIGNALS])
    allowed = ", ".join(repr(signal.value) for signal in Signal)
    known = {signal.value for signal in Signal}
    with _reading("signals", signals):
        if isinstance(signals, str) or not isinstance(signals, Collection):
            raise ConfigurationError(
                f"signals={signals!r} is no collection of names; give a tuple such as "
                f"('output', 'output_gradient'), with any of {allowed}"
            )
        given = list(signals)
        for one in given:
            if not isinstance(one, str) or one not in known:
                raise ConfigurationError(f"signals has {one!r}, which is not possible; give any of {allowed}")
        if not given:
            raise ConfigurationError(
                f"signals={signals!r} is empty, so that nothing would be measured; give any of {allowed}"
            )
        return tuple([signal for signal in Signal if signal in given])


def histograms_of(histograms: object) -> tuple[HistogramReducer, ...]:
    """Returns the histograms that were asked for (attaching thread)."""
    if isinstance(histograms, Unset):
        return (histogram(),)
    with _reading("histograms", histograms):
        given = list(histograms) if isinstance(histograms, Sequence) else [None]
        chosen = [one for one in given if isinstance(one, HistogramReducer)]
        if len(chosen) < len(given):
            raise ConfigurationError(
                f"histograms={histograms!r} is not possible; give a tuple of histogram(...), or () for none"
            )
    names = [one.name for one in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"histograms has the name {twice!r} twice; give each its own name=")
    return tuple(chosen)


def scale_of(scaler: object) -> DeclaredScale:
    """Returns what scales the loss (attaching thread)."""
    with _reading("scaler", scaler):
        return declared_scale_of(scaler)


def sampler_of(
    interval: timedelta | Unset, sampler: SamplingPolicy | None
) -> tuple[SamplingPolicy, Mapping[str, object]]:
    """Returns the sampler and what ``run.json`` says of it (attaching thread)."""
    if sampler is None:
        with _reading("interval", interval):
            chosen = TimedSampler() if isinstance(interval, Unset) else TimedSampler(interval)
            return chosen, describe(chosen)
    with _reading("sampler", sampler):
        if not isinstance(interval, Unset):
            raise ConfigurationError(
                f"interval={interval!r} and sampler={sampler!r} conflict: a sampler decides alone; give one "
                f"of the two"
            )
        chosen = validate_sampler(sampler)
        return chosen, describe(chosen)


def optimizers_of(optimizer: object) -> tuple[Optimizer, ...] | None:
    """Returns the optimizers whose steps count; None where every one does (attaching thread)."""
    if isinstance(optimizer, Unset):
        return None
    with _reading("optimizer", optimizer):
        # A wrapper may be a sequence too, but a sequence of optimizers holds none by a name.
        given = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
        found = [unwrapped(one) for one in given]
        chosen = [one for one in found if one is not None]
        if not found or len(chosen) < len(found):
            raise ConfigurationError(
                f"optimizer={optimizer!r} is no torch.optim.Optimizer; give one, or a sequence of them, or "
                f"leave it out to count the steps of every optimizer of the model"
            )
    return tuple(chosen)


def error_policy_of(value: object) -> ErrorPolicy:
    """Returns what happens to errors while collecting (attaching thread)."""
    with _reading("error_policy", value):
        text = str(value)
        if text not in set(ErrorPolicy):
            allowed = ", ".join(repr(policy.value) for policy in ErrorPolicy)
            raise ConfigurationError(f"error_policy={value!r} is not known; give one of {allowed}")
        return ErrorPolicy(text)


def compiled_mode_of(value: object) -> CompiledMode:
    """Returns what is observed of compiled models (attaching thread)."""
    with _reading("compiled", value):
        text = str(value)
        if text not in set(CompiledMode):
            allowed = ", ".join(repr(mode.value) for mode in CompiledMode)
            raise ConfigurationError(f"compiled={value!r} is not known; give one of {allowed}")
        return CompiledMode(text)


def sinks_of(sink: object) -> tuple[DirectorySink | None, tuple[Sink, ...]]:
    """Returns the run's folder, where a sink names it, and the other sinks (attaching thread)."""
    with _reading("sink", sink):
        return split_sinks(sink)


def policy_of(rank_policy: object) -> Policy:
    """Returns which ranks observe (attaching thread)."""
    with _reading("rank_policy", rank_policy):
        return parse_policy(rank_policy)


@contextmanager
def _reading(name: str, value: object) -> Generator[None]:
    """Has what a user's object raises while it is read name the argument (attaching thread).

    Args:
        name: Of the argument.
        value: What was given for it.

    Raises:
        ConfigurationError: The object raised something that is no error of this package.
    """
    try:
        yield
    except TorchInstrumentsError:
        raise
    except Exception as error:
        kind = type(value).__name__
        raise ConfigurationError(
            f"{name} was given an object of type {kind}, which cannot be read: {_told(error)}; give another "
            f"one, or leave {name} out"
        ) from error


def _told(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except Exception:  # noqa: BLE001 - an error may be as odd as what raised it
        return type(error).__name__
