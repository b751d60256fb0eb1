"""The names that the package promises, and where they come from."""

import subprocess
import sys
from types import ModuleType

import pytest

import torchinstruments
from torchinstruments import checks, report


def test_every_promised_name_is_there() -> None:
    """Each name of __all__ can be loaded, and __all__ has no name twice."""
    assert len(set(torchinstruments.__all__)) == len(torchinstruments.__all__)
    for name in torchinstruments.__all__:
        assert getattr(torchinstruments, name) is not None


@pytest.mark.parametrize("module", [torchinstruments, checks, report], ids=lambda one: one.__name__)
def test_dir_lists_what_is_promised(module: ModuleType) -> None:
    """dir() shows names before they are loaded."""
    assert dir(module) == sorted(module.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """The message has the name."""
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = torchinstruments.no_such_name


def test_the_module_command_is_the_console_command() -> None:
    """Running the package as a module knows the version."""
    done = subprocess.run(
        [sys.executable, "-m", "torchinstruments", "--version"], capture_output=True, text=True, check=True
    )
    assert torchinstruments.__version__ in done.stdout
