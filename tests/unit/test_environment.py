"""The variables that are read, and the sentence where one cannot be."""

from pathlib import Path

import pytest

from torchinstruments import environment
from torchinstruments.errors import ConfigurationError


@pytest.mark.parametrize(("value", "expected"), [("7", 7), (" 7 ", 7), ("-1", -1), ("", None), ("  ", None)])
def test_a_whole_number_is_read_and_blanks_are_nothing(value: str, expected: int | None) -> None:
    """Surrounding blanks do not count; an empty variable is an unset one."""
    assert environment.integer("RANK", {"RANK": value}) == expected


@pytest.mark.parametrize("value", ["two", "1.5", "0x10", "1 2"])
def test_anything_else_is_refused_with_name_and_value(value: str) -> None:
    """The sentence names both and the way out."""
    with pytest.raises(ConfigurationError, match=r"RANK.*whole number.*unset"):
        environment.integer("RANK", {"RANK": value})


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("true", True), ("YES", True), ("on", True), ("0", False), ("", False), ("no", False)],
)
def test_what_turns_telemetry_off(value: str, expected: bool) -> None:
    """Only words that mean yes do."""
    assert environment.is_disabled({"TORCHINSTRUMENTS_DISABLED": value}) is expected


def test_a_switch_that_says_neither_is_refused() -> None:
    """Telemetry that somebody wanted off must not run on because of a typing error."""
    with pytest.raises(ConfigurationError, match=r"TORCHINSTRUMENTS_DISABLED is 'maybe'.*unset"):
        environment.is_disabled({"TORCHINSTRUMENTS_DISABLED": "maybe"})


def test_the_spool_lies_where_it_was_asked_for_else_in_the_cache() -> None:
    """The own variable wins over XDG_CACHE_HOME, which wins over the home folder."""
    own = {"TORCHINSTRUMENTS_SPOOL_DIR": "/a", "XDG_CACHE_HOME": "/b"}
    assert environment.spool_root(own) == Path("/a")
    assert environment.spool_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/torchinstruments/spool")
    assert environment.spool_root({}) == Path.home() / ".cache" / "torchinstruments" / "spool"
