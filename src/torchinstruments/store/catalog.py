"""The module catalog of one process: which layers it selected, in which order they ran, which never fired."""

from dataclasses import dataclass

import msgspec

from torchinstruments.records import ModuleRecord

__all__ = ["MAX_LAYERS", "ModuleCatalog", "decode_catalog"]

MAX_LAYERS = 250_000
"""Layers that a catalog may have; the largest models have some 100,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCatalog:
    """``modules-<process>.json``.

    Attributes:
        schema_version: Version of everything persisted.
        run_id: The run.
        generation: Generation that the process belongs to.
        rank: Rank of the process in it.
        process: 8 hex digits.
        modules: Selected layers in catalog order; a row's ``layer`` stands here once.
    """

    schema_version: int
    run_id: str
    generation: int
    rank: int
    process: str
    modules: tuple[ModuleRecord, ...] = ()


def decode_catalog(data: bytes) -> ModuleCatalog:
    """Returns the catalog that lies in some bytes; unknown fields are ignored.

    Raises:
        msgspec.DecodeError: The bytes are no JSON, or no catalog.
    """
    catalog = msgspec.json.decode(data, type=ModuleCatalog)
    if len(catalog.modules) > MAX_LAYERS:
        raise msgspec.ValidationError(
            f"it has {len(catalog.modules)} layers, and at most {MAX_LAYERS} are read"
        )
    return catalog
