"""Settings refuse what cannot work where they are made."""

from typing import Any

import pytest

from torchinstruments import ConfigurationError, HistoryConfig
from torchinstruments.config import UNSET


@pytest.mark.parametrize("field", ["buffer_rows", "window"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_a_setting_that_is_no_positive_whole_number_is_refused(field: str, value: Any) -> None:
    """The sentence has the field and the value."""
    with pytest.raises(ConfigurationError, match=rf"{field}={value!r}.*at least 1"):
        HistoryConfig(**{field: value})


@pytest.mark.parametrize("field", ["buffer_rows", "window"])
def test_a_setting_beyond_any_run_is_refused(field: str) -> None:
    """Up to 10**12 it is taken; larger ones could not be persisted everywhere."""
    assert getattr(HistoryConfig(**{field: 10**12}), field) == 10**12
    with pytest.raises(ConfigurationError, match=rf"{field}=1000000000001\).*at most 1,000,000,000,000"):
        HistoryConfig(**{field: 10**12 + 1})


def test_the_defaults_are_those_of_the_documentation() -> None:
    """8192 rows and windows of 20 samples."""
    assert (HistoryConfig().buffer_rows, HistoryConfig().window) == (8192, 20)


def test_not_given_reads_as_such() -> None:
    """The sentinel shows its name in signatures."""
    assert repr(UNSET) == "UNSET"
