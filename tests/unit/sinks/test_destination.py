"""The run's folder among sinks."""

from pathlib import Path

import pytest

from torchinstruments.config import HistoryConfig
from torchinstruments.errors import ConfigurationError
from torchinstruments.sinks.destination import DirectorySink
from unit.store.material import run_record


def test_it_says_where_and_how_and_touches_nothing(tmp_path: Path) -> None:
    """Nothing is made before the ranks have agreed."""
    sink = DirectorySink(tmp_path / "new", run_id="r", history_config=HistoryConfig(window=3))
    assert (sink.output_dir, sink.run_id, sink.history_config.window) == (tmp_path / "new", "r", 3)
    assert sink.storage_options is None
    assert DirectorySink("stats").history_config == HistoryConfig()
    assert not (tmp_path / "new").exists()


def test_its_text_holds_no_secret() -> None:
    """Neither of the address nor of the options."""
    text = repr(
        DirectorySink("s3://key:hidden@bucket/run?token=hidden", storage_options={"secret": "hidden"})
    )
    assert "bucket/run" in text
    assert "hidden" not in text


@pytest.mark.parametrize("output_dir", [None, 3, "", "  "])
def test_what_is_no_address_is_refused(output_dir) -> None:
    """The message holds what was given."""
    with pytest.raises(ConfigurationError, match=r"DirectorySink\("):
        DirectorySink(output_dir)


def test_what_is_no_setting_of_the_history_is_refused() -> None:
    """A dictionary is a common mistake."""
    with pytest.raises(ConfigurationError, match="HistoryConfig"):
        DirectorySink("stats", history_config={"window": 3})  # pyrefly: ignore[bad-argument-type]


def test_inside_somebody_elses_sink_it_says_what_to_do() -> None:
    """Only the package can open it."""
    with pytest.raises(ConfigurationError, match="sink="):
        DirectorySink("stats").initialize(run_record(), ())
