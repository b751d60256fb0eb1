"""Names of parameters and buffers, with and without wrappers around modules."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from torchinstruments.observe import tensors
from torchinstruments.observe.tensors import BUFFER, PARAMETER, TensorNames, named_tensors


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


def test_kept_names_are_those_of_the_model_as_it_is_now() -> None:
    """Whatever was exchanged, added, shared, wrapped or taken away since they were made."""
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(first, nn.BatchNorm1d(2), nn.Sequential(last))

    def change_class() -> None:
        model[2].__class__ = type("Other", (type(checkpoint_wrapper(nn.ReLU())),), {})
        model[2]._modules = {"_checkpoint_wrapped_module": nn.Linear(2, 2)}

    changes = (
        lambda: None,
        lambda: setattr(first, "weight", nn.Parameter(torch.ones(2, 2))),
        lambda: setattr(last, "weight", first.weight),
        lambda: setattr(last, "weight", nn.Parameter(torch.ones(2, 2))),
        lambda: setattr(first, "bias", None),
        lambda: model[1].register_buffer("running_mean", None),
        lambda: model.register_buffer("weight", torch.ones(1)),
        lambda: first._buffers.update(weight=first._parameters.pop("weight")),
        lambda: model.append(model[2]),
        lambda: model.append(nn.Sequential(model[2], model[0])),
        lambda: setattr(model, "3", nn.Linear(2, 2)),
        lambda: setattr(model, "0", checkpoint_wrapper(model[0])),
        change_class,
        lambda: model.register_module("1", None),
        lambda: model._modules.update(later=model._modules.pop("0")),
        model._modules.clear,
    )
    kept = TensorNames()
    for change in changes:
        change()
        expected = [(name, kind, id(tensor)) for name, kind, tensor in named_tensors(model)]
        for _ in range(2):
            named, found, modules = kept.of(model)
            assert [(name, kind, id(found[place])) for name, kind, place in named] == expected
            assert {*map(id, modules)} == {*map(id, model.modules())}
            assert len(modules) == len(list(model.modules()))


def test_names_keep_no_module_and_no_tensor() -> None:
    """A part of the model that is exchanged is freed at once."""
    kept, model = TensorNames(), nn.Sequential(nn.Linear(2, 2))
    kept.of(model)
    module, weight = weakref.ref(model[0]), weakref.ref(model[0].weight)
    model[0] = nn.Linear(2, 2)
    assert module() is weight() is None


def test_names_that_were_made_while_the_model_changed_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread exchanges tensors meanwhile, and brings them back afterwards."""
    model, kept = nn.Bilinear(1, 1, 1), TensorNames()

    def exchange() -> None:
        own = model._parameters
        own["weight"], own["bias"] = own["bias"], own["weight"]

    def exchanged_before(root: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
        exchange()
        yield from named_tensors(root)

    with monkeypatch.context() as patch:
        patch.setattr(tensors, "named_tensors", exchanged_before)
        kept.of(model)
    exchange()
    named, found, _ = kept.of(model)
    assert {name: found[place] for name, _, place in named} == dict(model.named_parameters())
