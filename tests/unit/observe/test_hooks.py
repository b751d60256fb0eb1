"""Hooks stay where they are: copies, pickles and compiled forms of a model are not observed."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from unit.observe.memory import MemorySession, observe


def test_copies_of_an_observed_model_work_and_are_not_observed(session: MemorySession) -> None:
    """A deep copy, an average of weights and a pickle give the same outputs and no sample."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    observe(model, session)
    x = torch.randn(3, 2)
    expected = model(x)
    seen = len(session.deliveries)
    for twin in (
        copy.deepcopy(model),
        AveragedModel(model).module,
        pickle.loads(pickle.dumps(model)),
        copy.copy(model[0]),
    ):
        twin(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert len(session.deliveries) == seen
    model(x)
    assert len(session.deliveries) == seen + 1


def test_a_copy_made_inside_a_sampled_forward_is_not_observed(session: MemorySession) -> None:
    """The hooks of the sample do not travel either."""
    copies: list[nn.Module] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not copies:
                copies.append(copy.deepcopy(self))
                copies[0](x)
            return self.fc(x)

    model = Model()
    observe(model, session)
    model(torch.ones(1, 2))
    assert len(session.outputs()) == 1


def test_a_saved_model_loads_where_this_package_is_not_installed(
    session: MemorySession, tmp_path: Path
) -> None:
    """Whoever loads it needs torch alone."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session)
    torch.save(model, tmp_path / "model.pt")
    program = (
        "import sys, torch\n"
        "sys.modules['torchinstruments'] = None\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "print(tuple(model(torch.ones(3, 2)).shape))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model.pt")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "(3, 2)"


def test_an_observed_output_can_be_saved_without_a_warning(session: MemorySession, tmp_path: Path) -> None:
    """Its gradient hook is left behind silently."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session)
    output = model(torch.ones(1, 2))
    torch.save(output, tmp_path / "output.pt")
    assert torch.equal(torch.load(tmp_path / "output.pt"), output)


@pytest.mark.parametrize("place", ["whole", "in_place"])
def test_compiling_an_observed_model_traces_empty_hooks(session: MemorySession, place: str) -> None:
    """One graph without a break, the same outputs, and no sample from inside."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.randn(3, 2)
    expected = model(x)
    observe(model, session)
    if place == "whole":
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    else:
        compiled = model
        model.compile(backend="eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match="compiled after the observer was attached"):
        assert torch.equal(compiled(x), expected)
    assert session.deliveries == []
    assert [error.probe for error in session.errors] == ["compiled"]
