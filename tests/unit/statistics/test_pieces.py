"""Flat pieces of tensors that lie in memory in all sorts of ways."""

import pytest
import torch

from torchinstruments.statistics.pieces import flat_pieces, without_repeats

BASE = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)

VIEWS = {
    "contiguous": BASE,
    "transposed": BASE.transpose(0, 3),
    "strided": BASE[:, ::2, :, 1:4],
    "number": BASE[1, 2, 3, 4],
    "column": BASE.flatten()[::7],
    "wide_rows": BASE[:, :, :, ::2].permute(3, 0, 1, 2),
}


@pytest.mark.parametrize("num_entries", [1, 2, 7, 1000])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_pieces_hold_every_entry_once_and_no_more_than_asked(view: torch.Tensor, num_entries: int) -> None:
    """Together they are the tensor; each is flat, dense and small enough."""
    pieces = list(flat_pieces(view, num_entries))
    assert sorted(torch.cat(pieces).tolist()) == sorted(view.flatten().tolist())
    assert all(piece.ndim == 1 and piece.is_contiguous() and piece.numel() <= num_entries for piece in pieces)


def test_a_transposed_tensor_is_not_copied() -> None:
    """It is read in the order in which it lies in memory."""
    distinct, repeats = without_repeats(BASE.transpose(0, 2))
    (piece,) = flat_pieces(distinct, 1000)
    assert (piece.data_ptr(), repeats) == (BASE.data_ptr(), 1)


def test_expanded_dimensions_are_counted_instead_of_read() -> None:
    """Each entry is there once, with the number of its repetitions."""
    column = torch.tensor([[1], [2]])
    distinct, repeats = without_repeats(column.expand(3, 2, 5))
    assert (sorted(distinct.flatten().tolist()), repeats) == ([1, 2], 15)
