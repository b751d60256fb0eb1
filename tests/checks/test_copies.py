"""Copies around a write: their norms, and those of what was added."""

import gc

import pytest
import torch

from checks.training import mlp, train
from torchinstruments.checks import ChecksSession, CheckViolationError
from torchinstruments.checks.copies import Copies
from torchinstruments.checks.reading import Reading
from torchinstruments.statistics.isolation import functions_off, isolated


def _numbers(copies, placed):
    reading = Reading()
    column = reading.add(placed)
    reading.fetch()
    return dict(zip(copies.indices, column.numbers.tolist(), strict=True))


def _norm(tensor):
    """Returns the norm by numbers whose squares stay in range."""
    largest = float(tensor.abs().max())
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return float(torch.linalg.vector_norm(wide / largest)) * largest if largest else 0.0


@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e-44, 1e30])
def test_norms_before_and_of_the_change_are_those_of_each_tensor(factor):
    """Many of one shape, single and large ones, other dtypes, numbers of any size; twice in a row."""
    torch.manual_seed(0)
    shapes = [(64, 64)] * 70 + [(64,)] * 5 + [(3,), (), (200, 100)]
    tensors = dict(enumerate(torch.randn(shape) * factor for shape in shapes))
    tensors[100] = torch.randn(7, dtype=torch.complex64)
    tensors |= {110 + place: torch.randn(5, dtype=torch.float64) * 1e-200 for place in range(4)}
    tensors[120] = torch.empty(0)
    copies = Copies()
    with functions_off(), isolated("cpu"):
        for _ in range(2):
            before = {index: tensor.clone() for index, tensor in tensors.items()}
            copies.take(tensors)
            norms = _numbers(copies, copies.before())
            for index in (1, 71, 77, 100, 111):
                tensors[index].mul_(1.5)
            changes = _numbers(copies, copies.change({index: tensors[index] for index in copies.indices}))
            assert copies.reasons == {120: "empty"}
            assert set(norms) == set(tensors) - {120}
            for index, norm in norms.items():
                assert norm == pytest.approx(_norm(before[index]), rel=1e-5, abs=0)
                moved = _norm(tensors[index] - before[index])
                assert changes[index] == pytest.approx(moved, rel=1e-5, abs=0)
                assert (changes[index] != 0) == (index in {1, 71, 77, 100, 111})


def test_memory_is_kept_from_step_to_step_and_given_back():
    """Copies of the same tensors lie where the last ones lay."""
    tensors = {index: torch.ones(8) for index in range(6)}
    copies = Copies()
    with functions_off(), isolated("cpu"):
        copies.take(tensors)
        first = [rows.data_ptr() for rows in copies._rows.values()]
        copies.take(tensors)
        assert [rows.data_ptr() for rows in copies._rows.values()] == first
        copies.clear()
    assert (copies.indices, copies._rows) == ((), {})


def test_a_raise_after_the_write_holds_no_copy():
    """Also while the exception lives, which holds the frames that it came through."""
    others = {id(one) for one in gc.get_objects() if type(one) is Copies}
    model = mlp(depth=6)
    session = ChecksSession(model, scaler=None)
    session.register_update_ratio_check()
    session.register_frozen_check(["0.weight"])
    with pytest.raises(CheckViolationError) as raised, session:
        train(model)
    assert raised.value.fields["code"] == "frozen_param_changed"
    held = [one for one in gc.get_objects() if type(one) is Copies and id(one) not in others]
    assert held
    assert not [one for one in held if one.indices or one._rows or one._buffers]
