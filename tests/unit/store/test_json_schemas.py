"""The schemas that the package holds."""

import json

import jsonschema  # pyrefly: ignore[untyped-import]
import pytest

from torchinstruments.errors import ConfigurationError
from torchinstruments.store.json_schemas import SCHEMAS, json_schema
from unit.store.document_schemas import FOLDER, TYPES, document_schema


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_schema_is_one(name: str) -> None:
    """It is a schema of draft 2020-12 with an id of its own, and no other file lies beside them."""
    schema = json_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == f"urn:torchinstruments:schema:1:{name}"
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(f"{one}.schema.json" for one in SCHEMAS)


@pytest.mark.parametrize("name", TYPES)
def test_a_schema_says_what_its_dataclass_says(name: str) -> None:
    """Fields, types and meanings are the dataclass's; ``document_schemas.py`` writes them anew."""
    assert json_schema(name) == json.loads(json.dumps(document_schema(name)))


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_object_of_ours_allows_further_fields(name: str) -> None:
    """Where fields are listed no other one passes, and what is required is among them."""
    waiting: list[object] = [json_schema(name)]
    seen = 0
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(one.get("properties"), dict) and "type" in one:
                seen += 1
                assert one["additionalProperties"] is False
                assert set(one["required"]) <= set(one["properties"])
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    assert seen > 0


def test_a_schema_that_is_not_there() -> None:
    """The sentence names those that are."""
    with pytest.raises(ConfigurationError, match=r"'nothing'.*manifest"):
        json_schema("nothing")
