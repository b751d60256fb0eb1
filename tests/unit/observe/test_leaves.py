"""Tensors are found in any nesting, under paths that stay the same."""

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from torchinstruments.observe.leaves import MAX_DEPTH, MAX_TENSORS, gradient_path, tensors_in


def paths(output: object) -> list[str]:
    """Paths of the tensors in an output."""
    return [path for path, _ in tensors_in(output).tensors]


def test_a_bare_tensor_is_the_output() -> None:
    """Its gradient's path follows from its own."""
    x = torch.ones(2)
    assert tensors_in(x).tensors == (("output", x),)
    assert gradient_path("output") == "grad_output"
    assert gradient_path("output.logits") == "grad_output.logits"


def test_nested_containers_give_dotted_paths() -> None:
    """Tuples, lists, mappings and named tuples contribute indices, keys and field names."""
    x = torch.ones(1)
    pair = namedtuple("pair", ("first", "second"))  # noqa: PYI024 - what user code has
    output = {"logits": x, "hidden_states": (x, [x, x]), "pair": pair(x, None), 3: x, "text": "no tensor"}
    assert paths(output) == [
        "output.logits",
        "output.hidden_states.0",
        "output.hidden_states.1.0",
        "output.hidden_states.1.1",
        "output.pair.first",
        "output.3",
    ]


def test_dataclasses_and_mappings_that_are_dataclasses_are_looked_into_once() -> None:
    """An output of a language model is both a mapping and a dataclass; its keys count."""

    @dataclass
    class Plain:
        loss: torch.Tensor
        extra: list[torch.Tensor] = field(default_factory=list)

    @dataclass
    class ModelOutput(OrderedDict[str, torch.Tensor]):
        logits: torch.Tensor

        def __post_init__(self) -> None:
            self["logits"] = self.logits

    x = torch.ones(1)
    assert paths(Plain(x, [x])) == ["output.loss", "output.extra.0"]
    assert paths(ModelOutput(x)) == ["output.logits"]


def test_paths_that_read_alike_are_told_apart() -> None:
    """A dotted key beside a nested one gets a suffix, and neither is lost."""
    x, y = torch.zeros(1), torch.ones(1)
    found = dict(tensors_in({"a": {"b": x}, "a.b": y}).tensors)
    assert list(found) == ["output.a.b", "output.a.b#2"]
    assert found["output.a.b#2"] is y


def test_keys_that_are_no_text_go_by_their_repr() -> None:
    """A tuple as key is written as Python writes it."""
    assert paths({("a", 1): torch.ones(1)}) == ["output.('a', 1)"]


def test_a_container_that_holds_itself_is_entered_once() -> None:
    """The walk ends, and finds what there is."""
    output: list[object] = [torch.ones(1)]
    output.append(output)
    assert paths(output) == ["output.0"]


def test_depth_and_number_of_tensors_are_bounded_and_said_so() -> None:
    """What lies beyond a bound is left out with a sentence."""
    deep: list[object] = [torch.ones(1)]
    for _ in range(MAX_DEPTH):
        deep = [deep]
    found = tensors_in([deep, torch.ones(1)])
    assert [path for path, _ in found.tensors] == ["output.1"]
    assert "deeper" in found.truncated

    many = tensors_in([torch.ones(1)] * (MAX_TENSORS + 1))
    assert len(many.tensors) == MAX_TENSORS
    assert str(MAX_TENSORS) in many.truncated


def test_a_long_list_of_numbers_is_not_walked_to_its_end() -> None:
    """Values that are no tensors are bounded too."""
    found = tensors_in([1.0] * 1_000_000)
    assert found.tensors == ()
    assert found.truncated


def test_outputs_without_tensors_give_nothing() -> None:
    """None, text and numbers are none of the observer's business."""
    assert all(
        tensors_in(output).tensors == ()
        for output in (None, "text", 5, dict[str, int](), list[int](), object())
    )


class Raises(OrderedDict[str, torch.Tensor]):
    """A mapping whose items cannot be had."""

    @override
    def items(self) -> Any:
        raise ValueError("no items")


class HalfTuple(tuple[torch.Tensor, ...]):
    """A tuple that raises after its first entry."""

    __slots__ = ()

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        raise KeyError("gone")


class Key:
    """A key without a text."""

    @override
    def __repr__(self) -> str:
        raise ValueError("no text")


def test_a_container_that_raises_is_named_and_its_siblings_are_found() -> None:
    """What was found before it raised stays."""
    found = tensors_in([Raises(), HalfTuple((torch.ones(1),) * 2), {"a": torch.ones(1)}])
    assert [path for path, _ in found.tensors] == ["output.1.0", "output.2.a"]
    assert [(path, str(error)) for path, error in found.unreadable] == [
        ("output.0", "no items"),
        ("output.1", "'gone'"),
    ]


def test_a_key_without_a_text_goes_by_its_type() -> None:
    """Its tensor is measured all the same."""
    assert paths({Key(): torch.ones(1)}) == ["output.<Key>"]


def test_a_key_that_is_not_utf8_can_be_stored() -> None:
    """A lone surrogate becomes its escape, and names stay apart."""
    x = torch.ones(1)
    assert paths({"a\udc80": x, "a\\udc80": x}) == ["output.a\\udc80", "output.a\\udc80#2"]
