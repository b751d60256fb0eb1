"""``result.json`` of one process: every selected layer, and a summary of each of its series.

An array of layer records sorted by layer. At attach it is the catalog with empty measurements; an orderly
close replaces it. It covers all rows that reached the writer, even those that a full disk made it give up.
Strict JSON: a null has a reason beside it. Encoded layer by layer, so that beside the bytes only one layer's
objects are in memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from torchinstruments.records import ModuleRecord
from torchinstruments.store.entries import entries
from torchinstruments.store.summaries import SeriesSummaries
from torchinstruments.store.texts import encode_json

__all__ = ["encode_catalog", "encode_result"]

_TensorKey = tuple[int, str, str, str]


def _always() -> bool:
    return True


def _raise(_layer: str, error: Exception) -> None:
    raise error


def encode_catalog(modules: Sequence[ModuleRecord]) -> bytes:
    """Returns the document as it is at attach: all layers, nothing measured."""
    return _array(
        encode_json(_layer_record(module.layer, module, [])) for module in sorted(modules, key=_layer)
    )


def encode_result(
    modules: Sequence[ModuleRecord],
    summaries: SeriesSummaries,
    rows_left_out: Mapping[str, int],
    in_time: Callable[[], bool] = _always,
    on_error: Callable[[str, Exception], None] = _raise,
) -> bytes:
    """Returns the document as it is after the close.

    Args:
        modules: The catalog; each of its layers is listed, whether it was called or not.
        summaries: Of this process.
        rows_left_out: Rows by layer that no summary covers, since their series is beyond the bound.
        in_time: Asked before each layer whether there is time left for it.
        on_error: Told of a layer whose summaries cannot be written, and why. It stands there without them,
            all its rows as left out, and the others are written.

    Raises:
        TimeoutError: There was not.
    """
    places: dict[str, list[int]] = {}
    for place, key in enumerate(summaries.keys):
        places.setdefault(key.layer, []).append(place)
    by_layer = {module.layer: module for module in modules}
    layers = sorted({*by_layer, *places, *rows_left_out})

    def records() -> Iterator[bytes]:
        for done, layer in enumerate(layers):
            if not in_time():
                raise TimeoutError(f"the close had time for {done} of {len(layers)} layers")
            own, left_out = places.get(layer, ()), rows_left_out.get(layer, 0)
            module = by_layer.get(layer)
            try:
                tensors = _tensor_records(summaries, own)
                yield encode_json(_layer_record(layer, module, tensors, left_out))
            except Exception as error:  # noqa: BLE001 - one layer may not cost the others
                on_error(layer, error)
                left_out += sum(int(summaries.observations[place]) for place in own)
                yield encode_json(_layer_record(layer, module, [], left_out))

    return _array(records())


def _layer(module: ModuleRecord) -> str:
    return module.layer


def _array(records: Iterable[bytes]) -> bytes:
    return b"[" + b",".join(records) + b"]\n"


def _layer_record(
    layer: str, module: ModuleRecord | None, tensors: list[dict[str, object]], rows_left_out: int = 0
) -> dict[str, object]:
    record: dict[str, object] = {
        "layer": layer,
        "type": module.type if module else "",
        "aliases": list(module.aliases) if module else [],
        "tensors": tensors,
    }
    if rows_left_out:
        record["rows_left_out"] = rows_left_out
    return record


def _tensor_records(summaries: SeriesSummaries, places: Sequence[int]) -> list[dict[str, object]]:
    """Returns the tensors of one layer, whose series lie at the given places."""
    found: dict[_TensorKey, list[int]] = {}
    for place in places:
        key = summaries.keys[place]
        found.setdefault((key.call_index, key.signal, key.tensor_path, key.stage), []).append(place)
    return [_tensor_record(summaries, key, own) for key, own in sorted(found.items(), key=itemgetter(0))]


def _tensor_record(summaries: SeriesSummaries, key: _TensorKey, places: list[int]) -> dict[str, object]:
    call_index, signal, tensor_path, stage = key
    # One statistic may have been seen later than another; the tensor's shape is that of its newest row.
    newest = max(places, key=lambda place: int(summaries.latest.sample_id[place]))
    record: dict[str, object] = {"call_index": call_index, "signal": signal}
    if stage:
        record["stage"] = stage
    return record | {
        "tensor_path": tensor_path,
        "latest_shape": _shape(summaries.latest_texts["shape"][newest]),
        "dtype": summaries.latest_texts["dtype"][newest],
        "statistics": [
            {"metric": summaries.keys[place].metric} | one
            for place, one in zip(places, entries(summaries, places), strict=True)
        ],
    }


def _shape(text: str) -> list[int]:
    return [int(size) for size in text.split("x")] if text else []
