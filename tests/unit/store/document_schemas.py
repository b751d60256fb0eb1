"""Makes the schemas of the documents that are dataclasses, from the dataclasses.

``python tests/unit/store/document_schemas.py`` writes them into the package after one of these has changed.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from torchinstruments import records
from torchinstruments.records import GenerationRecord, RunRecord
from torchinstruments.store import catalog, manifest
from torchinstruments.store.catalog import ModuleCatalog
from torchinstruments.store.manifest import Manifest

FOLDER = Path(__file__).resolve().parents[3] / "src" / "torchinstruments" / "store" / "schemas"
TYPES: dict[str, type] = {
    "run": RunRecord,
    "generation": GenerationRecord,
    "manifest": Manifest,
    "modules": ModuleCatalog,
}


def document_schema(name: str) -> dict[str, Any]:
    """Returns the schema of a document: all fields of its dataclass and no others, with what they mean."""
    found = msgspec.json.schema(TYPES[name], schema_hook=_anything)
    definitions: dict[str, Any] = found["$defs"]
    for title, definition in definitions.items():
        documentation = inspect.getdoc(_type_named(title)) or ""
        summary, _, attributes = documentation.partition("\n\nAttributes:\n")
        definition["description"] = " ".join(summary.replace("``", "").split())
        for field, text in _attributes(attributes):
            definition["properties"][field]["description"] = text
        for described in definition["properties"].values():
            described.pop("default", None)
        definition["required"] = list(definition["properties"])
        definition["additionalProperties"] = False
    top = definitions.pop(TYPES[name].__name__)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:torchinstruments:schema:1:{name}",
    }
    top["properties"]["schema_version"] = {"const": 1} | top["properties"]["schema_version"]
    return head | top | ({"$defs": definitions} if definitions else {})


def encoded(name: str) -> bytes:
    """Returns the schema as it lies in the package."""
    return msgspec.json.format(msgspec.json.encode(document_schema(name)), indent=2) + b"\n"


def _anything(kind: type) -> dict[str, Any]:
    """Settings of samplers are theirs: any JSON."""
    if kind is not object:
        raise NotImplementedError
    return {"description": "Any JSON."}


def _type_named(title: str) -> type:
    for module in (records, manifest, catalog):
        if hasattr(module, title):
            found: type = getattr(module, title)
            return found
    raise LookupError(title)


def _attributes(text: str) -> Iterator[tuple[str, str]]:
    for entry in re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", f"{text}\n", re.MULTILINE | re.DOTALL):
        yield entry[0], " ".join(entry[1].replace("``", "").split())


if __name__ == "__main__":
    for one in TYPES:
        (FOLDER / f"{one}.schema.json").write_bytes(encoded(one))
        sys.stdout.write(f"{one}.schema.json\n")
