"""The default reducers, and what is refused as one."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Absent
from torchinstruments.statistics import reducers as reducers_module
from torchinstruments.statistics.measured import Measured
from torchinstruments.statistics.profile import PROFILE_METRICS
from torchinstruments.statistics.reducers import (
    combine,
    default_reducers,
    finite_fraction,
    max_abs,
    mean,
    metric_names,
    rms,
    std,
    validate_reducers,
)


def spread(tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Returns one scalar."""
    return {"spread": tensor.max() - tensor.min()}


def test_the_default_reducers_give_named_scalars() -> None:
    """They are callables from a tensor to the nine statistics."""
    (profile,) = default_reducers()
    assert profile(torch.tensor([1.0, 3.0]))["mean"] == 2.0
    assert metric_names(default_reducers()) == PROFILE_METRICS


def test_names_are_known_beforehand_only_where_a_reducer_declares_them() -> None:
    """A plain function has none, and is no obstacle to the others."""
    assert metric_names((*default_reducers(), spread)) == PROFILE_METRICS


def test_a_list_of_reducers_is_taken_as_a_tuple() -> None:
    """Any collection will do, and stays in its order."""
    assert validate_reducers([*default_reducers(), spread]) == (*default_reducers(), spread)


@pytest.mark.parametrize(
    ("reducers", "message"),
    [
        (spread, "is not a collection"),
        ("mean", "is not a collection"),
        (5, "is not a collection"),
        ((), "is empty"),
        ((spread, 3), "holds 3, which cannot be called"),
        (default_reducers() * 2, "measure 'mean' twice, in ExactProfile and in ExactProfile"),
    ],
)
def test_reducers_that_cannot_work_are_refused_with_the_way_out(reducers: Any, message: str) -> None:
    """One sentence names the value and what to give instead."""
    with pytest.raises(ConfigurationError, match=message):
        validate_reducers(reducers)


FIVE = combine(mean(), std(), rms(), max_abs(), finite_fraction())


def test_the_five_built_in_reducers_measure_what_their_names_say() -> None:
    """1 and 3: mean 2, deviation 1, root mean square of 5, largest 3, all finite."""
    assert FIVE(torch.tensor([1.0, 3.0])) == pytest.approx(
        {"mean": 2.0, "std": 1.0, "rms": 5**0.5, "max_abs": 3.0, "finite_fraction": 1.0}, rel=1e-15
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("size", [7, 5000, 200_000])
def test_they_are_exact_over_all_finite_entries_of_any_size(dtype: torch.dtype, size: int) -> None:
    """A small spread at an offset, invalid entries among them where there can be some."""
    entries = torch.randn(size, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 3 + 50
    tensor = entries.to(dtype)
    if dtype.is_floating_point:
        tensor[1], tensor[size // 2], tensor[-1] = math.nan, math.inf, -math.inf
    wide = tensor.to(torch.float64).numpy()
    finite = wide[np.isfinite(wide)].astype(np.longdouble)
    assert FIVE(tensor) == pytest.approx(
        {
            "mean": float(finite.mean()),
            "std": float(finite.std()),
            "rms": float(np.sqrt((finite**2).mean())),
            "max_abs": float(np.abs(finite).max()),
            "finite_fraction": finite.size / size,
        },
        rel=1e-13,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_nan_among_2_to_the_25_is_not_hidden(dtype: torch.dtype) -> None:
    """The share of finite entries is a count over a size."""
    tensor = torch.ones(2**25, dtype=dtype)
    tensor[7] = math.nan
    assert finite_fraction()(tensor) == {"finite_fraction": 1.0 - 2.0**-25}


@pytest.mark.parametrize("size", [1e300, 1e-300])
def test_the_root_mean_square_of_extreme_numbers_is_one_of_them(size: float) -> None:
    """Squares that float64 cannot hold are not needed."""
    tensor = torch.tensor([size, -size], dtype=torch.float64)
    assert rms()(tensor)["rms"] == pytest.approx(size, rel=1e-15)
    assert FIVE(tensor.repeat(5000))["std"] == pytest.approx(size, rel=1e-14)


def test_the_ends_of_int64_are_measured() -> None:
    """The lowest one has no positive counterpart in its dtype, and is the largest all the same."""
    tensor = torch.tensor([-(2**63), 2**63 - 1])
    assert max_abs()(tensor) == {"max_abs": 2.0**63}
    assert rms()(tensor)["rms"] == pytest.approx(2.0**63, rel=1e-15)
    assert std()(torch.arange(5) + 2**62)["std"] == pytest.approx(2**0.5, rel=1e-15)


def test_what_is_missing_says_why() -> None:
    """Nothing, or nothing finite."""
    assert set(FIVE(torch.empty(0)).values()) == {Absent("empty")}
    nothing = FIVE(torch.tensor([math.nan, math.inf]))
    assert (nothing["max_abs"], nothing["finite_fraction"]) == (Absent("no_finite_entries"), 0.0)


def test_sums_of_float64_that_overflow_find_a_middle_all_the_same() -> None:
    """A sum that leaves float64 on the way does not spoil the mean."""
    found = FIVE(torch.tensor([1.7e308, 1.7e308, 1.7e308, -1.7e308] * 2000, dtype=torch.float64))
    assert found["mean"] == pytest.approx(0.85e308, rel=1e-14)
    assert found["max_abs"] == 1.7e308


def test_combined_reducers_look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics that follow from the same facts share one pass, the profile among them."""
    looks: list[bool] = []

    def counted(tensor: torch.Tensor, *, is_ordered: bool, max_scratch_bytes: int) -> Measured:
        looks.append(is_ordered)
        return look(tensor, is_ordered=is_ordered, max_scratch_bytes=max_scratch_bytes)

    look = reducers_module.look
    monkeypatch.setattr(reducers_module, "look", counted)
    assert set(FIVE(torch.ones(3))) == {"mean", "std", "rms", "max_abs", "finite_fraction"}
    assert len(combine(*default_reducers(), rms(), spread)(torch.ones(3))) == 11
    assert looks == [False, True]


def test_metrics_of_a_combination_are_known_beforehand() -> None:
    """In the order of its parts, combinations within taken apart."""
    nested = combine(combine(mean(), std()), rms())
    assert nested.metrics == ("mean", "std", "rms")
    assert len(nested.parts) == 3
    assert metric_names((nested, spread)) == ("mean", "std", "rms")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), r"combine\(\) of no reducers would measure nothing"),
        ((mean(), rms(), mean()), "measure 'mean' twice"),
        ((*default_reducers(), std()), "measure 'std' twice, in ExactProfile and in MomentReducer"),
        ((combine(mean(), std()), std()), "measure 'std' twice"),
        ((mean(), "std"), r"combine\(\) holds 'std', which cannot be called"),
    ],
)
def test_combinations_that_cannot_work_are_refused(parts: tuple[Any, ...], message: str) -> None:
    """None at all, the same metric twice, and what is no reducer."""
    with pytest.raises(ConfigurationError, match=message):
        combine(*parts)


def test_a_duplicate_that_shows_only_in_a_call_is_an_error_of_that_call() -> None:
    """A plain function has no names beforehand."""

    def twice(_tensor: torch.Tensor) -> Mapping[str, float]:
        return {"mean": 1.0}

    with pytest.raises(ValueError, match="twice returned the duplicate metric 'mean'"):
        combine(mean(), twice)(torch.ones(2))


def test_an_observer_takes_combinations_apart() -> None:
    """Given alone or among others, so that one part that fails does not cost the rest."""
    assert validate_reducers(combine(mean(), spread)) == (mean(), spread)
    assert validate_reducers([combine(mean(), rms()), spread]) == (mean(), rms(), spread)
    with pytest.raises(ConfigurationError, match="reducers would measure 'mean' twice"):
        validate_reducers([combine(mean(), rms()), mean()])
