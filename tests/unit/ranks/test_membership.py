"""Models and optimizers whose parts come and go."""

import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD

from torchinstruments.ranks import membership
from torchinstruments.ranks.membership import Membership


@pytest.fixture
def listings(monkeypatch):
    """The models whose parameters were listed for an optimizer of another one."""
    listed = []
    addresses = membership._addresses

    def counted(model):
        listed.append(model)
        return addresses(model)

    monkeypatch.setattr(membership, "_addresses", counted)
    return listed


def test_a_place_is_the_way_to_a_shared_parameter():
    """The first parameter of the optimizer that the model has, by the first way there."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(nn.ReLU(), shared), "b": shared})
    optimizer = SGD([{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [shared.bias, shared.weight]}])
    place = Membership(lambda: model).find(optimizer)
    assert place is not None
    assert (place.path, place.name, place.group, place.index) == (("b",), "bias", 1, 0)
    assert place.parameter() is shared.bias


def test_parameters_of_a_model_itself_and_of_scripted_parts_count():
    """A model that is one layer, and one whose modules are not Python's."""
    plain = nn.Linear(2, 2)
    with pytest.warns(DeprecationWarning, match="jit.script"):
        scripted = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2))))
    for model in (plain, scripted):
        optimizer = SGD(model.parameters())
        one = Membership(lambda model=model: model)
        place = one.find(optimizer)
        assert place is not None
        assert one.again(optimizer, 0, place, 0) is place
        assert one.again(optimizer, 0, None, 0) == place


def test_a_model_that_is_gone_owns_no_optimizer():
    """And neither a place nor the addresses had kept it."""
    model = nn.Sequential(nn.Linear(2, 2))
    optimizers = [SGD(model.parameters()), SGD(nn.Linear(2, 2).parameters())]
    one = Membership(weakref.ref(model))
    places = [one.find(optimizer) for optimizer in optimizers]
    assert [
        one.again(optimizer, 0, place, 0) for optimizer, place in zip(optimizers, places, strict=True)
    ] == places
    del model
    for optimizer, place in zip(optimizers, places, strict=True):
        assert one.again(optimizer, 0, place, 1) is None


def test_a_round_of_optimizers_of_another_model_lists_parameters_once(listings):
    """As where each parameter has an optimizer of its own."""
    model = nn.Linear(2, 2)
    one = Membership(lambda: model)
    optimizers = [SGD([nn.Parameter(torch.zeros(1))]) for _ in range(50)]
    for expected in (1, 2, 3):
        for key, optimizer in enumerate(optimizers):
            assert one.again(optimizer, key, None, 0) is None
            one.stepped(key)
        assert listings == [model] * expected


def test_several_questions_about_one_step_list_parameters_once(listings):
    """A scaler asks at its own methods too; a forward of the model makes it another moment."""
    model, optimizer = nn.Linear(2, 2), SGD([nn.Parameter(torch.zeros(1))])
    one = Membership(lambda: model)
    for num_forwards in (1, 2):
        for _ in range(3):
            one.again(optimizer, 0, None, num_forwards)
        assert listings == [model] * num_forwards
