"""How this package starts Python processes of its own: same interpreter, nothing of the caller's folders.

The caller's working folder and the folder of its script are kept off the child's import path (``-P``), so
that a user's ``random.py`` does not end up in a helper process.
"""

import os
import site
import sys
from pathlib import Path

__all__ = ["child_arguments", "child_environment"]

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


def child_arguments(module: str, *arguments: str) -> list[str]:
    """Returns the command line that runs a module of this package."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Returns this process's environment; the package's folder is on the import path where it needs that."""
    environment = dict(os.environ)
    installed = [os.path.realpath(folder) for folder in (*site.getsitepackages(), site.getusersitepackages())]
    if _PACKAGE_PARENT not in installed:
        known = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = f"{known}{os.pathsep}{_PACKAGE_PARENT}" if known else _PACKAGE_PARENT
    return environment
