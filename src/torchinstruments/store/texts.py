r"""Text that a file can hold: a lone surrogate, as in a file name of another encoding, is no UTF-8.

Names of layers, keys of outputs and messages of errors are anybody's text, and one of them must not cost what
lies beside it. What cannot be encoded is written as Python escapes it, ``\udce9``; all else stays as it is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from torchinstruments.records import ErrorRecord, ModuleRecord

__all__ = [
    "encodable",
    "encodable_error",
    "encodable_modules",
    "encodable_texts",
    "encode_json",
]


def encodable(text: str) -> str:
    """Returns a text, with what UTF-8 cannot hold escaped."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def encodable_texts(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns texts, with what UTF-8 cannot hold escaped; cheap where nothing is."""
    found = tuple(texts)
    try:
        "".join(found).encode()
    except UnicodeEncodeError:
        return tuple([encodable(text) for text in found])
    return found


def encodable_modules(modules: Iterable[ModuleRecord]) -> tuple[ModuleRecord, ...]:
    """Returns the records of layers under the names that their rows have."""
    found = tuple(modules)
    try:
        "".join(text for one in found for text in (one.layer, one.type, *one.aliases)).encode()
    except UnicodeEncodeError:
        return tuple(
            [
                replace(
                    one,
                    layer=encodable(one.layer),
                    type=encodable(one.type),
                    aliases=encodable_texts(one.aliases),
                )
                for one in found
            ]
        )
    return found


def encodable_error(error: ErrorRecord) -> ErrorRecord:
    """Returns the record of an error, with what UTF-8 cannot hold escaped."""
    texts = (error.probe, error.module, error.type, error.message)
    cleaned = encodable_texts(texts)
    if cleaned == texts:
        return error
    probe, module, kind, message = cleaned
    return replace(error, probe=probe, module=module, type=kind, message=message)


def encode_json(document: object) -> bytes:
    """Returns a document as strict JSON on one line."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(_encodable(msgspec.to_builtins(document, str_keys=True)))


def _encodable(value: object) -> object:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {encodable(str(key)): _encodable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(inner) for inner in value]
    return value
