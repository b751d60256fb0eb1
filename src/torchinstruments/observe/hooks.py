"""The callables that are put into a model's hook dictionaries.

They must not travel. A model is copied for an average of its weights, pickled, or saved as a whole, and its
hooks go with it: the copy would be observed as well, or could not be made at all. So a copy of any of these
is a callable that does nothing, and a pickle of one needs this package no more than the model did.

Each returns at once while a compiler traces it. That test stands in ``__call__`` itself, before anything else
is touched, so that a traced hook is an empty one. The root's pre-hook tells on the way that its model is
traced, by a function that is run and not traced (`engine.run_while_traced`).

A shallow copy of a module has the very dictionaries of the module, and so its hooks. They leave it alone.

Deep in a recursion of the program there may be no room for what a hook does, nor for the report of that. It
is only counted then, where whoever the hook belongs to finds it.
"""

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Protocol

import torch
from torch import compiler, nn
from torch.utils.hooks import RemovableHandle

from torchinstruments.observe.selection import Layer
from torchinstruments.observe.stack import is_copy
from torchinstruments.ranks.tracing import runs_for_a_compiler
from torchinstruments.statistics.isolation import unintercepted

__all__ = [
    "GradientHook",
    "HookThatStays",
    "LayerHook",
    "LayerPreHook",
    "ParameterHook",
    "RootPostHook",
    "RootPreHook",
    "do_nothing",
    "move_to_end",
    "put_back",
    "root_pre_hook",
    "take_out",
]


class _Counting(Protocol):
    """Who is told of hooks that did nothing, since the stack had no room."""

    num_too_deep: int


class _RootObserver(_Counting, Protocol):
    """Who sees the calls of the attached model."""

    raised: int
    """The id of the exception that it raises on purpose, 0 where it does not."""

    def root_started(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Takes the begin of a call (training thread, hot path)."""
        ...

    def root_ended(self, module: nn.Module, output: object) -> None:
        """Takes the end of a call (training thread, hot path)."""
        ...

    def root_exported(self) -> None:
        """Takes that ``torch.export`` traces a call; it never raises (exporting thread)."""
        ...

    def root_compiled(self) -> None:
        """Takes that ``torch.compile`` traces a call; it never raises (compiling thread)."""
        ...


def do_nothing(*_args: object) -> None:
    """Stands where a copied hook would stand."""


class _LayerObserver(_Counting, Protocol):
    """Who measures the inputs and outputs of layers during one forward."""

    def receive(self, layer: Layer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Takes the arguments of a call; it never raises (training thread, hot path)."""
        ...

    def observe(self, layer: Layer, output: object) -> None:
        """Takes an output; it never raises (training thread, hot path)."""
        ...


class _GradientObserver(_Counting, Protocol):
    """Who measures the gradients of one sample."""

    def arrived(self, number: int, gradient: torch.Tensor | None) -> None:
        """Takes a target's gradient, or that it has none; it never raises (autograd thread, hot path)."""
        ...


class _ParameterObserver(_Counting, Protocol):
    """Who measures the gradients of parameters."""

    def accumulated(self, target: int) -> None:
        """Takes that a gradient has come; it never raises (autograd thread, hot path)."""
        ...


class HookThatStays:
    """A callable whose copies and pickles do nothing."""

    __slots__ = ()

    def __copy__(self) -> Callable[..., None]:
        return do_nothing

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        # From the standard library alone: it takes any arguments and returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")


_OF_MODULES = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}
"""What a module holds its hooks in, and what else it notes of them."""

_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""What a tensor holds its hooks in; None where it has none."""


def take_out(place: nn.Module | torch.Tensor, hook: object) -> None:
    """Removes a hook, whether it is there or not (any thread).

    A hook is found by itself and not by the handle that placing it returns: an interrupt may come between
    the two, and so whoever places hooks notes them first.

    Args:
        place: Module or tensor where it may be.
        hook: The hook.
    """
    if isinstance(place, nn.Module):
        own = vars(place)
        for kind, marks in _OF_MODULES.items():
            for key in _keys_of(own[kind], hook):
                own[kind].pop(key, None)
                for mark in marks:
                    own[mark].pop(key, None)
        return
    with unintercepted():
        for kind in _OF_TENSORS:
            held: dict[int, object] = getattr(place, kind, None) or {}
            for key in _keys_of(held, hook):
                held.pop(key, None)


def put_back(tensor: torch.Tensor, hook: object) -> None:
    """Puts a post-accumulate hook back that was taken out of a tensor (training thread).

    It comes behind those that are there. The tensor may need no gradient any more, and would take no new hook
    then.

    Args:
        tensor: Had it.
        hook: The hook; nothing happens where it is there.
    """
    with unintercepted():
        held: dict[int, object] | None = getattr(tensor, "_post_accumulate_grad_hooks", None)
        if held is not None and not _keys_of(held, hook):
            held[RemovableHandle(held).id] = hook


def move_to_end(module: nn.Module, hook: object) -> None:
    """Puts a forward hook behind those of tools that came later (training thread, hot path)."""
    held = module._forward_hooks  # noqa: SLF001 - has no public order
    if isinstance(held, OrderedDict):
        for key in _keys_of(held, hook):
            held.move_to_end(key)


def _keys_of(held: Mapping[int, object], hook: object) -> list[int]:
    """Returns under which keys a hook is held."""
    return [key for key, found in list(held.items()) if found is hook]


class RootPreHook(HookThatStays):
    """Permanent forward pre-hook of the attached model.

    Args:
        observer: Told of its calls.
        model: The model; held weakly.
    """

    __slots__ = ("_model", "_observer")

    def __init__(self, observer: _RootObserver, model: nn.Module) -> None:
        self._observer = observer
        self._model = weakref.ref(model)

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object] | None = None
    ) -> None:
        """Is called before the model's forward (training thread, hot path)."""
        if compiler.is_dynamo_compiling() or runs_for_a_compiler():
            if compiler.is_exporting():
                self._observer.root_exported()
            else:
                self._observer.root_compiled()
            return
        try:
            own = self._model()
            if module is own or not is_copy(module, own):
                self._observer.root_started(module, args, kwargs or {})
        except RecursionError as error:
            if id(error) == self._observer.raised:
                raise
            self._observer.num_too_deep += 1


def root_pre_hook(observer: _RootObserver, model: nn.Module) -> RootPreHook:
    """Returns the pre-hook of an observer, whose code is nobody else's (attaching or compiling thread).

    A compiler keeps what it has made of a piece of code. A hook that shared its code with an earlier
    observer's would not be traced again, and so could not tell of it.

    Args:
        observer: Told of calls, and of being traced.
        model: Whose calls they are; held weakly.
    """
    call = RootPreHook.__call__
    fresh = FunctionType(
        call.__code__.replace(), call.__globals__, call.__name__, call.__defaults__, call.__closure__
    )
    own: type[RootPreHook] = type("RootPreHook", (RootPreHook,), {"__slots__": (), "__call__": fresh})
    return own(observer, model)


class RootPostHook(HookThatStays):
    """Permanent forward hook of the attached model, called after an exception too.

    Args:
        observer: Told of its calls.
        model: The model; held weakly.
    """

    __slots__ = ("_model", "_observer")

    def __init__(self, observer: _RootObserver, model: nn.Module) -> None:
        self._observer = observer
        self._model = weakref.ref(model)

    def __call__(self, module: nn.Module, _args: object, output: object) -> None:
        """Is called after the model's forward (training thread, hot path)."""
        if compiler.is_dynamo_compiling() or runs_for_a_compiler():
            return
        try:
            own = self._model()
            if module is own or not is_copy(module, own):
                self._observer.root_ended(module, output)
        except RecursionError:
            self._observer.num_too_deep += 1


class LayerPreHook(HookThatStays):
    """Forward pre-hook of one layer, attached as a `LayerHook` is; it takes keyword arguments too.

    Args:
        forward: Takes the arguments.
        layer: Who was given them.
        thread: Whose forward it is.
    """

    __slots__ = ("_forward", "_layer", "_thread")

    def __init__(self, forward: _LayerObserver, layer: Layer, thread: int) -> None:
        self._forward = forward
        self._layer = layer
        self._thread = thread

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object] | None = None
    ) -> None:
        """Is called before the layer's forward (training thread, hot path)."""
        try:
            if compiler.is_dynamo_compiling() or runs_for_a_compiler():
                return
            if threading.get_ident() == self._thread and not is_copy(module, self._layer.watched):
                self._forward.receive(self._layer, args, kwargs or {})
        except RecursionError:
            self._forward.num_too_deep += 1


class LayerHook(HookThatStays):
    """Forward hook of one layer, attached for one sampled forward of one thread.

    Args:
        forward: Takes the output.
        layer: Whose output it is.
        thread: Whose forward it is. Another thread may call the same module at the same time.
    """

    __slots__ = ("_forward", "_layer", "_thread")

    def __init__(self, forward: _LayerObserver, layer: Layer, thread: int) -> None:
        self._forward = forward
        self._layer = layer
        self._thread = thread

    def __call__(self, module: nn.Module, _args: object, output: object) -> None:
        """Is called after the layer's forward (training thread, hot path)."""
        try:
            if compiler.is_dynamo_compiling() or runs_for_a_compiler():
                return
            if threading.get_ident() == self._thread and not is_copy(module, self._layer.watched):
                self._forward.observe(self._layer, output)
        except RecursionError:
            self._forward.num_too_deep += 1


class GradientHook(HookThatStays):
    """Hook of one output tensor; it never changes the gradient and holds no tensor.

    Args:
        sample: Takes the gradient.
        number: Which of its outputs this is.
    """

    __slots__ = ("_number", "_sample")

    __torch_unserializable__ = True
    """Tells torch not to warn when the tensor is saved; the hook is left behind."""

    def __init__(self, sample: _GradientObserver, number: int) -> None:
        self._sample = sample
        self._number = number

    def __call__(self, gradient: torch.Tensor | None) -> None:
        """Is called with the tensor's gradient, None for an undefined one (autograd thread, hot path)."""
        try:
            if not (compiler.is_dynamo_compiling() or runs_for_a_compiler()):
                self._sample.arrived(self._number, gradient)
        except RecursionError:
            self._sample.num_too_deep += 1


class ParameterHook(HookThatStays):
    """Post-accumulate hook of one parameter while the backward of a sampled forward is awaited.

    A parameter outlives every graph, so that a hook of it must keep nothing alive.

    Args:
        gradients: Takes that the gradient came; held weakly.
        target: Which of its parameters this is.
    """

    __slots__ = ("_gradients", "_target")

    def __init__(self, gradients: _ParameterObserver, target: int) -> None:
        self._gradients = weakref.ref(gradients)
        self._target = target

    def __call__(self, _parameter: torch.Tensor) -> None:
        """Is called when the parameter's gradient has been added to (autograd thread, hot path)."""
        gradients = self._gradients()
        if gradients is None:
            return
        try:
            if not (compiler.is_dynamo_compiling() or runs_for_a_compiler()):
                gradients.accumulated(self._target)
        except RecursionError:
            gradients.num_too_deep += 1
