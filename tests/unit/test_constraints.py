"""The pins in ``constraints.txt``, held against ``pyproject.toml`` by the metadata of what is installed."""

import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = Path(__file__).resolve().parents[2]


def pins() -> dict[str, Version]:
    """Name to version of every line that pins one."""
    lines = (PROJECT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name: Version(version) for name, version in pairs}


def oldest_python() -> Version:
    """The first patch release of the oldest Python in ``pyproject.toml``: 3.11.0 for ``>=3.11``."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (specifier,) = SpecifierSet(project["requires-python"])
    assert specifier.operator == ">="
    return Version(f"{specifier.version}.0")


def installed() -> dict[str, Distribution]:
    """The pinned distributions that are here in just the version that is pinned, by name."""
    found: dict[str, Distribution] = {}
    for name, version in pins().items():
        try:
            one = distribution(name)
        except PackageNotFoundError:
            continue
        if Version(one.version).public == version.public:
            found[name] = one
    return found


def test_every_pin_fits_the_oldest_python() -> None:
    """No pinned release refuses the oldest patch release of Python, on which pip would look for others."""
    oldest, found = oldest_python(), installed()
    assert "torch" in found
    refusing = {
        name: required
        for name, one in found.items()
        if (required := one.metadata.json.get("requires_python"))
        and not SpecifierSet(required).contains(oldest)
    }
    assert not refusing


def test_everything_that_the_project_asks_for_is_pinned() -> None:
    """Each dependency, those of the extras too, has a pin, and one that it allows."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {canonicalize_name(name): version for name, version in pins().items()}
    texts = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    requirements = [one for one in map(Requirement, texts) if one.name != project["name"]]
    assert len(requirements) > len(project["dependencies"])
    for one in requirements:
        assert one.specifier.contains(pinned[canonicalize_name(one.name)]), one
