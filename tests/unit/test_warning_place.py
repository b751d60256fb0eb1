"""A warning shows the line of the program that led to it."""

import threading
import warnings
from typing import Any

import pytest

from torchinstruments.warning_place import warn_user


def run(source: str, name: str, **names: object) -> None:
    """Runs a line as part of a module."""
    exec(compile(source, f"{name}.py", "exec"), {"__name__": name, **names})


def test_lines_of_this_package_and_of_torch_are_passed_over() -> None:
    """However many lie between."""

    def inner() -> None:
        run("warn('x')", "torchinstruments.observe.faults", warn=warn_user)

    with pytest.warns(RuntimeWarning, match="x") as caught:
        run("f()", "torch.nn.modules.module", f=inner)
    assert caught[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="y") as caught:
        run("warn('y')", "train", warn=warn_user)
    assert caught[0].filename == "train.py"


def test_a_thread_of_this_package_shows_its_own_line() -> None:
    """There is no other one, and no exception."""
    names: dict[str, Any] = {"__name__": "torchinstruments.session", "warn": warn_user}
    exec(compile("def work():\n    warn('x')\n", "session.py", "exec"), names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=names["work"])
        thread.start()
        thread.join()
    assert [(str(one.message), one.filename) for one in caught] == [("x", "session.py")]


def test_a_filter_may_turn_it_into_an_exception() -> None:
    """Whoever warns has to expect that."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="x"):
            warn_user("x")
