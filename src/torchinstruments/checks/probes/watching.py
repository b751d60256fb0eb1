"""What all probes share: `Probe.watch`, and the sites at which they see values.

Inside ``with probe.watch(model):`` every call of the model in this thread is a watched forward. Hooks and a
function mode are there for that block; outside of it a forward pays for nothing. What a probe computes stays
on the device until somebody asks for it.
"""

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import nn

from torchinstruments.checks.findings import MAX_NAMES, CheckWarning, Unavailable
from torchinstruments.checks.layer_watch import LayerWatch, matches
from torchinstruments.checks.probes.function_mode import (
    FunctionWatch,
    PauseSlot,
    may_run_fused,
    pause_slots,
)
from torchinstruments.checks.probes.selectors import (
    FunctionSelector,
    ModuleSelector,
    Selector,
    plain_name,
)
from torchinstruments.errors import CheckLifecycleError, ConfigurationError
from torchinstruments.observe.engine import is_capturing_graph, is_in_backward, tracing
from torchinstruments.observe.fused import FusedRegion
from torchinstruments.observe.leaves import tensors_in
from torchinstruments.observe.root import RootWatch
from torchinstruments.observe.selection import Layer
from torchinstruments.observe.stack import callers
from torchinstruments.observe.wrappers import core_of
from torchinstruments.records import Absent, Reason, Scope, error_text
from torchinstruments.statistics.admission import admit
from torchinstruments.statistics.isolation import functions_off, isolated
from torchinstruments.warning_place import warn_user

__all__ = ["MAX_SITES", "Probe", "Site"]

MAX_SITES = 4_096
"""Sites of one probe; values of further ones are counted and not looked at."""

_MAX_REASONS = 100
_INSIDE_FUSED = Reason.INSIDE_FUSED.value
_INSIDE_COMPILED = Reason.INSIDE_COMPILED.value


class Site(Protocol):
    """What a probe keeps of one place of the model."""

    def take(self, tensor: torch.Tensor, forward: int) -> None:
        """Takes a value (training thread, hot path).

        Args:
            tensor: Detached, plain, strided, real, with at least one entry.
            forward: Which watched forward it belongs to, from 0.
        """
        ...


_SiteT = TypeVar("_SiteT", bound=Site)


class Probe(Generic[_SiteT]):
    """A probe of some values of a forward. `RangeProbe`, `LivenessProbe` and `SinkProbe` are such.

    Args:
        selectors: Which values.
    """

    name = "probe"

    def __init__(self, selectors: Sequence[Selector]) -> None:
        self._selectors = tuple(selectors)
        self._sites: dict[tuple[Selector, str], _SiteT] = {}
        self._scopes: dict[tuple[Selector, str], Scope] = {}
        self._num_matched: Counter[Selector] = Counter()
        self._reasons: dict[str, Counter[str]] = {}
        self._num_forwards = 0
        self._is_watching = False
        self._warned: set[Selector] = set()

    @property
    def num_forwards(self) -> int:
        """Forwards that were watched, of all blocks."""
        return self._num_forwards

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Selectors that matched no value in any watched forward, as they were written."""
        return tuple([str(selector) for selector in self._selectors if not self._num_matched[selector]])

    @property
    def unavailable(self) -> tuple[Unavailable, ...]:
        """What could not be looked at, by reason, with selectors that matched nothing."""
        entries = [
            Unavailable(self.name, reason, tuple(list(names)[:MAX_NAMES]), len(names), names.total())
            for reason, names in sorted(self._reasons.items())
        ]
        missing = self.unmatched
        if missing:
            entries.append(
                Unavailable(
                    self.name, "selector_matched_nothing", missing[:MAX_NAMES], len(missing), len(missing)
                )
            )
        return tuple(entries)

    @contextlib.contextmanager
    def watch(self, model: nn.Module) -> Generator[Self]:
        """Watches every call of a model that this thread makes inside the ``with`` block.

        Blocks may follow each other; what they see adds up. At the end of a block with forwards one warning
        names the selectors that have matched nothing so far.

        Args:
            model: What the program calls: the model, or its wrapper.

        Raises:
            ConfigurationError: It is no module.
            CheckLifecycleError: The probe watches already.
        """
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"watch({type(model).__name__}) is not possible; give an nn.Module")
        if isinstance(model, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"watch({type(model).__name__}) is not possible: a scripted module takes no hooks; "
                f"watch the one that it was made of"
            )
        if self._is_watching:
            raise CheckLifecycleError(
                "this probe watches already; end that block first, or make another probe"
            )
        before = self._num_forwards
        watch = _Watch(self, model)
        self._is_watching = True
        try:
            watch.place()
            yield self
        finally:
            watch.remove()
            self._is_watching = False
        if self._num_forwards > before:
            self._tell_unmatched()
        else:
            self.note("no_forward: the model was not called in a block", "(model)")

    def new_site(self, selector: Selector, label: str) -> _SiteT:
        """Returns what is kept of a site that was not seen before (training thread, hot path)."""
        raise NotImplementedError

    def note(self, reason: str, name: str) -> None:
        """Counts something that could not be looked at (training thread, hot path)."""
        if reason in self._reasons or len(self._reasons) < _MAX_REASONS:
            names = self._reasons.setdefault(reason, Counter())
            if name in names or len(names) < MAX_SITES:
                names[name] += 1

    def take(self, selector: Selector, label: str, tensor: torch.Tensor) -> None:
        """Takes a value at a site (training thread, hot path).

        Args:
            selector: What it was selected by.
            label: Of the site.
            tensor: As the program has it.
        """
        self._num_matched[selector] += 1
        key = (selector, label)
        if key not in self._sites and len(self._sites) >= MAX_SITES:
            self.note(f"too_many_sites: only {MAX_SITES} are looked at", str(selector))
            return
        if is_capturing_graph():
            self.note(Reason.GRAPH_CAPTURE.value, label)
            return
        with functions_off(), isolated(tensor):
            admitted = admit(tensor)
            if isinstance(admitted, Absent):
                self.note(admitted.reason, label)
                return
            local, scope = admitted
            if local.numel() == 0:
                self.note(Reason.EMPTY.value, label)
                return
            if self._scopes.setdefault(key, scope) is not scope:
                self._scopes[key] = Scope.UNKNOWN
            if key not in self._sites:
                self._sites[key] = self.new_site(selector, label)
            self._sites[key].take(local, self._num_forwards)

    def forward_ended(self) -> None:
        """Counts a watched forward (training thread)."""
        self._num_forwards += 1

    def scope_of(self, selector: Selector, label: str) -> Scope:
        """Returns what the numbers of a site cover: all of its tensors, or this rank's part of them."""
        return self._scopes.get((selector, label), Scope.LOCAL)

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """What it was given."""
        return self._selectors

    def _tell_unmatched(self) -> None:
        """Warns once of each selector that matches nothing."""
        silent = [
            selector
            for selector in self._selectors
            if not self._num_matched[selector] and selector not in self._warned
        ]
        if not silent:
            return
        self._warned.update(silent)
        shown = ", ".join(str(selector) for selector in silent)
        message = f"torchinstruments: {shown} matched nothing in {self._num_forwards} watched forwards"
        # A filter of the program's may make it an exception; the properties say the same.
        with contextlib.suppress(CheckWarning):
            warn_user(message, CheckWarning)


class _Watch:
    """One block of watching."""

    def __init__(self, probe: Probe[Any], model: nn.Module) -> None:
        self._probe = probe
        self._model = model
        self._thread = threading.get_ident()
        self._depth = 0
        self._ordinals: Counter[str] = Counter()
        self._functions = tuple([one for one in probe.selectors if isinstance(one, FunctionSelector)])
        self._modules = tuple([one for one in probe.selectors if isinstance(one, ModuleSelector)])
        self._layers = LayerWatch(model, self._wants, self)
        self._root = RootWatch(model, takes_input=False)
        self._mode: FunctionWatch | None = None
        self._pauses: list[PauseSlot] = []
        self._names = {
            id(module): layer.name for layer in self._layers.all for module in (layer.module, layer.watched)
        }
        self._num_inside: Counter[int] = Counter()
        self.num_too_deep = 0
        """Hooks that the stack had no room for."""
        self.raised = 0
        """No exception of it is meant for the program."""

    def place(self) -> None:
        """Puts hooks in place (training thread)."""
        # Before the root's hooks, so that what the model itself returns is still inside the forward.
        self._layers.place()
        for layer in self._layers.chosen:
            if layer.name in self._layers.unseen:
                self._probe.note(self._layers.unseen[layer.name], layer.name or "(model)")
        if self._functions:
            self._mode = FunctionWatch(self)
            self._pauses = pause_slots(self._model, self._layers.parts, self._mode, self)
            for slot in self._pauses:
                slot.install()
        self._root.attach(self._model, self)

    def remove(self) -> None:
        """Takes everything out again (training thread)."""
        self._root.remove()
        for slot in reversed(self._pauses):
            slot.remove()
        self._layers.remove()
        if self._mode is not None:
            self._mode.switch_off()
        if self.num_too_deep:
            self._probe.note("stack_too_deep", "(model)")

    def root_started(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:  # noqa: ARG002 - a seam
        """Takes the begin of a forward (training thread, hot path)."""
        if not self._is_own():
            self._probe.note("other_thread: only the thread that entered the block is watched", "(model)")
            return
        if is_in_backward():
            return
        if tracer := tracing():
            self._probe.note(f"traced: by {tracer}, which records and computes no values", "(model)")
            return
        self._depth += 1
        if self._depth == 1:
            self._ordinals.clear()
            if self._mode is not None and not self._is_hidden(module):
                self._mode.switch_on()

    def root_ended(self, module: nn.Module, output: object) -> None:  # noqa: ARG002 - a seam
        """Takes the end of a forward (training thread, hot path)."""
        if not self._is_own() or is_in_backward() or self._depth == 0 or tracing():
            return
        self._depth -= 1
        if self._depth == 0:
            if self._mode is not None:
                self._mode.switch_off()
            self._probe.forward_ended()

    def root_exported(self) -> None:
        """Does nothing: an export is no forward (exporting thread)."""

    def root_compiled(self) -> None:
        """Does nothing: what is compiled runs later (compiling thread)."""

    def receive(self, layer: Layer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Does nothing: probes look at outputs (training thread, hot path)."""

    def observe(self, layer: Layer, output: object) -> None:
        """Looks at an output of a module; it never raises (training thread, hot path)."""
        if self._depth == 0 or is_in_backward():
            return
        self._num_inside[layer.index] += 1
        try:
            label = self._label(layer.name or "(model)")
            for selector in self._modules:
                if matches(selector.pattern, layer):
                    self._take(selector, label, output)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._failed(layer.name, error)

    def num_calls(self, region: FusedRegion) -> int:
        """Returns how many calls were seen inside a region so far (training thread, hot path)."""
        return sum(self._num_inside[layer.index] for layer in region.inside)

    def region_ended(self, region: FusedRegion, num_calls_before: int) -> None:
        """Notes that a call ran fused, without the modules inside (training thread, hot path)."""
        if self._depth and not region.module.training and self.num_calls(region) == num_calls_before:
            for layer in region.inside:
                self._probe.note(_INSIDE_FUSED, layer.name)

    def called(self, function: object, result: object) -> None:
        """Looks at what a function returned; it never raises (training thread, hot path)."""
        if is_in_backward():
            return
        try:
            name = plain_name(str(getattr(function, "__name__", "")))
            wanted = [selector for selector in self._functions if selector.matches(function, name)]
            if not wanted:
                return
            where = next(callers(sys._getframe(1)), self._model)  # noqa: SLF001 - nothing else tells
            label = self._label(f"{self._names.get(id(core_of(where)), '') or '(model)'}:{name}")
            for selector in wanted:
                self._take(selector, label, result)
        except Exception as error:  # noqa: BLE001 - nothing may leave a mode
            self._failed("(function)", error)

    def paused(self, module: nn.Module, *, is_compiled: bool) -> None:
        """Notes where functions are not seen (training thread, hot path)."""
        name = self._names.get(id(module), "") or "(model)"
        self._probe.note(_INSIDE_COMPILED if is_compiled else _INSIDE_FUSED, name)

    def _take(self, selector: Selector, label: str, output: object) -> None:
        """Hands every tensor of an output to the probe."""
        leaves = tensors_in(output)
        for path, tensor in leaves.tensors:
            self._probe.take(selector, label if path == "output" else f"{label}[{path}]", tensor)
        if not leaves.tensors:
            self._probe.note(Reason.NO_TENSOR_OUTPUT.value, label)
        if leaves.truncated:
            self._probe.note(f"truncated: {leaves.truncated}", label)
        for path, error in leaves.unreadable:
            self._probe.note(Reason.UNREADABLE_OUTPUT.with_error(error), f"{label}[{path}]")

    def _label(self, name: str) -> str:
        """Returns the label of a call: the second one in a forward has ``#1``."""
        ordinal = self._ordinals[name]
        self._ordinals[name] += 1
        return f"{name}#{ordinal}" if ordinal else name

    def _wants(self, layer: Layer) -> bool:
        return any(matches(selector.pattern, layer) for selector in self._modules)

    def _is_hidden(self, module: nn.Module) -> bool:
        """Returns whether functions inside the model cannot be seen, and notes so.

        Its slot of calls lies outside of its hooks, and so cannot switch off what these switch on.
        """
        is_compiled = id(module) in self._layers.parts.around
        if is_compiled or may_run_fused(module):
            self.paused(module, is_compiled=is_compiled)
            return True
        return False

    def _is_own(self) -> bool:
        return threading.get_ident() == self._thread

    def _failed(self, name: str, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._probe.note(f"probe_error: {type(error).__name__}: {error_text(error)}"[:200], name)
