"""Wrappers are known by their type."""

import gc
import weakref

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from torchinstruments.observe.wrappers import (
    core_of,
    is_compiled_in_place,
    is_compiled_wrapper,
    is_forward_compiled,
    wrapped_child,
)


def test_the_core_is_what_all_wrappers_wrap() -> None:
    """A compiled checkpoint wrapper around DataParallel has the model as its core."""
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = torch.compile(checkpoint_wrapper(nn.DataParallel(model)))
    assert isinstance(wrapped, nn.Module)
    assert core_of(wrapped) is model
    assert core_of(model) is model


def test_a_child_called_module_makes_no_wrapper() -> None:
    """Only the type counts."""
    holder = nn.Module()
    holder.module = nn.Linear(2, 2)
    assert wrapped_child(holder) is None
    assert wrapped_child(nn.DataParallel(holder)) == "module"


def test_a_class_that_was_looked_at_is_not_kept_alive() -> None:
    """A class that is made in a function may hold whatever that function held, tensors too."""
    kind = type("Local", (nn.Module,), {})
    kept = weakref.ref(kind)
    assert wrapped_child(kind()) is None
    del kind
    gc.collect()
    assert kept() is None


def test_the_two_forms_of_compiling_are_told_apart() -> None:
    """One makes a wrapper, the other changes the module itself."""
    wrapper = torch.compile(nn.ReLU())
    assert isinstance(wrapper, nn.Module)
    assert is_compiled_wrapper(wrapper)
    assert not is_compiled_in_place(wrapper)
    module = nn.ReLU()
    module.compile()
    assert is_compiled_in_place(module)
    assert not is_compiled_wrapper(module)


def test_a_compiled_forward_is_known_on_instance_and_class() -> None:
    """What torch was told to leave alone is not compiled."""
    compiled_class = type("Compiled", (nn.Linear,), {"forward": torch.compile(nn.Linear.forward)})
    module, disabled = nn.Linear(2, 2), nn.Linear(2, 2)
    assert not is_forward_compiled(module)
    vars(module)["forward"] = torch.compile(module.forward)
    vars(disabled)["forward"] = torch.compiler.disable(disabled.forward)
    assert is_forward_compiled(module)
    assert is_forward_compiled(compiled_class(2, 2))
    assert not is_forward_compiled(disabled)
