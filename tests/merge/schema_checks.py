"""Holds documents to the schemas in the package, and pages to the schemas."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # pyrefly: ignore[untyped-import]

from torchinstruments.store.json_schemas import json_schema


def problems(name: str, document: object) -> list[str]:
    """Returns what a schema has against a document."""
    validator = jsonschema.Draft202012Validator(json_schema(name))
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(document)]


def folder_problems(run: Path) -> dict[str, list[str]]:
    """Returns what is wrong with the documents below a run's folder, by their kind; all JSON is looked at."""
    found: dict[str, list[str]] = {}
    for path in sorted(run.rglob("*.json")):
        name = kind_of(path.relative_to(run))
        document = json.loads(path.read_bytes(), parse_constant=refuse)
        found.setdefault(name, []).extend(f"{path.name} {one}" for one in problems(name, document))
    return found


def kind_of(path: Path) -> str:
    """Returns the schema for a document, by its path below the run's folder."""
    if path.name == "result.json":
        return "result" if path.parent.name == "merged" else "rank_result"
    if path.parent.name == "generations":
        return "generation"
    return {"run": "run", "process": "manifest", "modules": "modules", "checks": "checks"}[
        path.stem.partition("-")[0]
    ]


def refuse(name: str) -> None:
    """Fails on NaN and the infinities, which are no JSON."""
    raise AssertionError(f"{name} is no JSON")


def field_names(schema: Any, definitions: Any) -> Iterator[str]:
    """Yields the names of all fields that a part of a schema allows, those of its references too."""
    waiting, seen = [schema], set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            reference = one.get("$ref", "").removeprefix("#/$defs/")
            if reference and reference not in seen:
                seen.add(reference)
                waiting.append(definitions[reference])
            yield from one.get("properties", {})
            waiting += one.get("properties", {}).values()
            waiting += [one[key] for key in ("items", "anyOf", "additionalProperties") if key in one]
