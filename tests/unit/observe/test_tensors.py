"""Names of parameters and buffers, with and without wrappers around modules."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from torchinstruments.observe.tensors import BUFFER, PARAMETER, named_tensors


def names(model: nn.Module) -> list[tuple[str, str]]:
    """Returns kind and name of each tensor."""
    return [(kind, name) for name, kind, _ in named_tensors(model)]


def test_names_are_those_of_the_model() -> None:
    """Parameters and buffers of every module, in the order of the model."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3, affine=False)))
    model.register_buffer("mask", torch.ones(2), persistent=False)
    assert names(model) == [
        (BUFFER, "mask"),
        (PARAMETER, "0.weight"),
        (PARAMETER, "0.bias"),
        (BUFFER, "1.0.running_mean"),
        (BUFFER, "1.0.running_var"),
        (BUFFER, "1.0.num_batches_tracked"),
    ]


def test_segments_of_wrappers_are_left_out() -> None:
    """A checkpointed block and a compiled model keep the names of the bare ones."""
    bare = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = names(bare)
    wrapped = nn.Sequential(bare[0], checkpoint_wrapper(bare[1]))
    assert names(wrapped) == expected
    compiled = torch.compile(wrapped, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert names(compiled) == expected


def test_a_module_called_like_a_wrapper_keeps_its_name() -> None:
    """What is a wrapper is told by its type."""
    model = nn.Sequential()
    model.module = nn.Linear(2, 2, bias=False)
    assert names(model) == [(PARAMETER, "module.weight")]


def test_a_tensor_that_is_used_twice_is_there_once() -> None:
    """Under the first of its names."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model.append(model[0])
    assert names(model) == [(PARAMETER, "0.weight")]


def test_two_tensors_never_share_a_name() -> None:
    """Where only the wrapper tells them apart the later one keeps its segment."""
    wrapper = checkpoint_wrapper(nn.Linear(2, 2, bias=False))
    wrapper._parameters["weight"] = nn.Parameter(torch.ones(1))
    model = nn.Sequential(wrapper)
    assert names(model) == [(PARAMETER, "0.weight"), (PARAMETER, "0._checkpoint_wrapped_module.weight")]
