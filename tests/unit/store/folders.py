"""Folders of runs, written by the package's own writers."""

from torchinstruments.config import HistoryConfig
from torchinstruments.records import Identity, Sample, Signal
from torchinstruments.store import layout
from torchinstruments.store.local_target import LocalTarget
from torchinstruments.store.manifest import encode_document
from torchinstruments.store.storage import Storage
from torchinstruments.store.writer import RankWriter
from unit.store.material import (
    attempt,
    backward,
    claim,
    forward,
    generation_record,
    measurement,
    module,
    run_record,
)


def begin_run(storage: Storage, *, run_id: str = "run-1", world_size: int = 2, generations: int = 1) -> None:
    """Writes ``run.json`` and the generations."""
    storage.create(layout.RUN_FILE, encode_document(run_record(run_id, world_size=world_size)))
    for number in range(generations):
        record = generation_record(number, run_id, world_size=world_size)
        storage.create(layout.generation_file(number), encode_document(record))


def samples(count: int = 3, *, rank: int = 0) -> list[Sample]:
    """Returns a few samples of two layers, forward and backward; a rank's values are its own."""
    deliveries: list[Sample] = []
    for ordinal in range(count):
        outputs = [measurement(layer, values=(0.0, rank + ordinal / 8, 1.0)) for layer in range(2)]
        gradients = [measurement(layer, Signal.OUTPUT_GRADIENT) for layer in (1, 0)]
        deliveries += [forward(ordinal, *outputs, attempt=ordinal), backward(ordinal, *gradients)]
    return deliveries


def writer(
    storage: Storage,
    rank: int = 0,
    process: str | None = None,
    *,
    generation: int = 0,
    alone: bool = False,
    run_id: str = "run-1",
    world_size: int = 2,
    buffer_rows: int = 8192,
) -> RankWriter:
    """Returns the writer of one process into a run's folder."""
    name = f"{rank:08x}" if process is None else process
    target = LocalTarget(storage, layout.rank_folder(rank, alone=alone), name)
    identity = Identity(rank, world_size, rank, "node-a", name)
    config = HistoryConfig(buffer_rows=buffer_rows)
    return RankWriter(identity, claim(generation, run_id), config, target)


def write_rank(
    storage: Storage,
    rank: int = 0,
    process: str | None = None,
    *,
    generation: int = 0,
    alone: bool = False,
    run_id: str = "run-1",
    world_size: int = 2,
) -> None:
    """Writes everything of one process, from start to close."""
    one = writer(
        storage, rank, process, generation=generation, alone=alone, run_id=run_id, world_size=world_size
    )
    one.start(run_record(), [module(0, fired=3), module(1, fired=3)])
    for delivery in samples(rank=rank):
        one.add_sample(delivery)
    one.add_attempts([attempt(number) for number in range(3)])
    one.close(0)
