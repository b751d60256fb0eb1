"""The shape of every JSON document of a run, as JSON Schema (draft 2020-12), for programs in any language.

The files lie in the package, in ``store/schemas``. A document that this release writes has the fields of its
schema and no others; readers ignore unknown fields, so that a later release may add some.
"""

from importlib import resources

import msgspec

from torchinstruments.errors import ConfigurationError

__all__ = ["SCHEMAS", "json_schema"]

SCHEMAS = {
    "run": "run.json",
    "generation": "generations/NNN.json",
    "manifest": "process-*.json of a rank",
    "modules": "modules-*.json of a rank",
    "checks": "checks-*.json of a rank",
    "rank_result": "result.json of a rank",
    "result": "result.json of the merge",
    "comparison": "what `torchinstruments compare --json` prints",
}
"""Name of each schema to the document that it describes."""


def json_schema(name: str) -> dict[str, object]:
    """Returns the schema of a kind of document.

    Args:
        name: One of `SCHEMAS`.

    Raises:
        ConfigurationError: There is no such schema.
    """
    if name not in SCHEMAS:
        raise ConfigurationError(f"there is no schema {name!r}; give one of {', '.join(SCHEMAS)}")
    file = resources.files("torchinstruments.store").joinpath("schemas", f"{name}.schema.json")
    return msgspec.json.decode(file.read_bytes(), type=dict[str, object])
