"""Whether an optimizer holds a parameter of a model at this moment, at microseconds a step.

Heads are exchanged, ``fully_shard`` replaces parameters, adapters come and go, and groups of an optimizer
change, so that no answer lasts. To list a model's parameters at each step would cost a large model
milliseconds. A yes is therefore kept as a place: the way of names from the model to one parameter, and where
that lies in the optimizer; as long as both ends hold the same tensor the answer stands. A no rests on the
addresses of all parameters of the model. They are listed again where the model has run since, and where an
optimizer comes back that has stepped since: once a round, of however many optimizers of other models. A part
that joins and is stepped within one round, without a forward of the model in between, is not seen in it.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["Membership", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model and an optimizer hold the same parameter.

    Attributes:
        parameter: It; not kept alive.
        path: Names of the modules on the way to it, from the model.
        name: Its own in the last of them.
        group: Which group of the optimizer.
        index: Where in that group.
    """

    parameter: weakref.ref[torch.Tensor]
    path: tuple[str, ...]
    name: str
    group: int
    index: int


class Membership:
    """Answers for one model which optimizers are its own.

    Args:
        model: Returns the model, or None where it is gone. It should not keep it alive.
    """

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        self._model = model
        # Addresses are compared, since tensors compare by value. Those of two sets of which one is older may
        # name different tensors, so that a hit is looked up, and a miss is one.
        self._addresses: frozenset[int] = frozenset()
        self._num_forwards = -1
        self._stepped: set[int] = set()

    def find(self, optimizer: Optimizer) -> Place | None:
        """Returns where the model has a parameter of an optimizer, by comparing all (training thread)."""
        model = self._model()
        if model is None:
            return None
        owners = _owners(model)
        for group, members in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(members.get("params", ())):
                owner = owners.get(id(parameter))
                if owner is not None:
                    path, name = owner
                    return Place(weakref.ref(parameter), path, name, group, index)
        return None

    def again(self, optimizer: Optimizer, key: int, place: Place | None, num_forwards: int) -> Place | None:
        """Returns the same of an optimizer that was asked for before (training thread, hot path).

        Args:
            optimizer: The optimizer.
            key: Names it for as long as it lives.
            place: What was returned last.
            num_forwards: Root forwards of the model so far.
        """
        if place is not None:
            return place if self._holds(optimizer, place) else self.find(optimizer)
        if num_forwards != self._num_forwards or key in self._stepped:
            model = self._model()
            self._addresses = frozenset() if model is None else _addresses(model)
            self._num_forwards = num_forwards
            self._stepped.clear()
        for group in optimizer.param_groups:
            if not self._addresses.isdisjoint(map(id, group.get("params", ()))):
                return self.find(optimizer)
        return None

    def stepped(self, key: int) -> None:
        """Takes that an optimizer of another model has stepped (training or autograd thread, hot path)."""
        self._stepped.add(key)

    def _holds(self, optimizer: Optimizer, place: Place) -> bool:
        """Returns whether both still hold a parameter at its place."""
        module, parameter, groups = self._model(), place.parameter(), optimizer.param_groups
        if parameter is None or place.group >= len(groups):
            return False
        members = groups[place.group].get("params", ())
        if place.index >= len(members) or members[place.index] is not parameter:
            return False
        for name in place.path:
            if module is None:
                return False
            children = module._modules  # noqa: SLF001 - get_submodule takes no names with dots
            # Those of TorchScript have no get.
            module = children[name] if name in children else None  # noqa: SIM401
        if module is None:
            return False
        own = module._parameters  # noqa: SLF001 - as above
        return place.name in own and own[place.name] is parameter


def _addresses(model: nn.Module) -> frozenset[int]:
    """Returns the addresses of a model's parameters, several times faster than its own listing."""
    found: set[int] = set()
    seen = {id(model)}
    modules: list[nn.Module] = [model]
    for module in modules:  # grows meanwhile
        own = module.__dict__
        if parameters := own["_parameters"]:
            found.update(map(id, parameters.values()))
        if children := own["_modules"]:
            for child in children.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    modules.append(child)
    return frozenset(found)


def _owners(model: nn.Module) -> dict[int, tuple[tuple[str, ...], str]]:
    """Returns for the address of each of a model's parameters the path to it and its name."""
    owners: dict[int, tuple[tuple[str, ...], str]] = {}
    seen = {id(model)}
    modules: list[tuple[tuple[str, ...], nn.Module]] = [((), model)]
    for path, module in modules:  # grows meanwhile
        for name, parameter in module._parameters.items():  # noqa: SLF001 - named_parameters joins names
            if parameter is not None:
                owners.setdefault(id(parameter), (path, name))
        for name, child in module._modules.items():  # noqa: SLF001 - as above
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(((*path, name), child))
    return owners
