"""The list of observed models keeps nothing alive and knows a model in all its wrappers."""

import gc
import weakref

from torch import nn

from torchinstruments.observe import registry


class Listed:
    """An observer, as far as the list is concerned."""

    def __init__(self) -> None:
        self.is_disarmed = False

    def disarm(self) -> None:
        """Notes that it was called."""
        self.is_disarmed = True


def test_a_model_is_found_in_all_its_wrappers() -> None:
    """Wrapping before or after being listed makes no difference."""
    model, listed = nn.Linear(2, 2), Listed()
    registry.enlist(nn.DataParallel(model), listed, keep=True)
    assert registry.find(model) is listed
    assert registry.find(nn.DataParallel(model)) is listed
    assert registry.find(nn.Linear(2, 2)) is None
    registry.strike(listed)
    assert registry.find(model) is None


def test_a_part_of_a_listed_model_is_another_model() -> None:
    """It may have an observer of its own."""
    model, listed = nn.Sequential(nn.Linear(2, 2)), Listed()
    registry.enlist(model, listed, keep=True)
    assert registry.find(model[0]) is None


def test_models_that_compare_equal_are_still_different() -> None:
    """Identity counts, not equality."""

    class Equal(nn.Module):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        def __hash__(self) -> int:
            return 1

    one, other, listed = Equal(), Equal(), Listed()
    registry.enlist(one, listed, keep=True)
    assert registry.find(other) is None


def test_neither_model_nor_observer_is_kept_alive() -> None:
    """An entry goes with its model, and a weakly held observer with its last user."""
    model, listed = nn.Linear(2, 2), Listed()
    registry.enlist(model, listed, keep=False)
    observer = weakref.ref(listed)
    del listed
    gc.collect()
    assert observer() is None
    assert registry.find(model) is None

    kept = Listed()
    registry.enlist(model, kept, keep=True)
    observer = weakref.ref(kept)
    del kept, model
    gc.collect()
    assert observer() is None
