"""A merged run of 1,024 ranks with the largest table for pictures that a merge makes; it has no rows."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from merge.run_folder import RunFolder, whole_run
from merge.synthetic_run import METRICS, SIGNALS
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.overview import OVERVIEW_FILE, OverviewFold
from torchinstruments.merge.overview_choice import Pictured, choose_pictured
from torchinstruments.merge.overview_rows import OVERVIEW_SCHEMA

RANKS, LAYERS, FAR_RANK, FAR_LAYER = 1024, 100, 517, 42


def wide_result(root: Path) -> RunFolder:
    """Returns a merged run in which one rank is far from all others in one layer."""
    run = whole_run(root, 2)
    merge_run(run.url)
    samples = np.stack([np.zeros(300, np.int64), np.arange(300), np.zeros(300, np.int64)], axis=1)
    series = dict.fromkeys(METRICS, LAYERS * len(SIGNALS))
    chosen = choose_pictured(samples, series, range(RANKS), [FAR_RANK], [])
    random = np.random.default_rng(7)
    fold = OverviewFold()
    for moment in chosen.moments:
        fold.add(_rows(moment[1], chosen, random))
    data = fold.encoded(chosen, len(samples))
    folder = run.root / "merged"
    (folder / OVERVIEW_FILE).write_bytes(data)
    document = json.loads((folder / "result.json").read_bytes())
    document["run"]["merged_ranks"] = list(range(RANKS))
    for one in document["files"]:
        if one["file"] == OVERVIEW_FILE:
            one |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "result.json").write_text(json.dumps(document))
    return run


def _rows(attempt: int, chosen: Pictured, random: np.random.Generator) -> pa.Table:
    is_detailed = (0, attempt, 0) in chosen.detailed
    ranks = np.array(chosen.ranks)
    if is_detailed:
        group = chosen.group_ranks
        # The far rank is the furthest of its group, as it is among the chosen ones.
        furthest = np.arange(0, RANKS, group) + random.integers(0, group, RANKS // group)
        furthest[FAR_RANK // group] = FAR_RANK
        ranks = np.union1d(ranks, furthest)
    keys = [
        (f"layers.{layer:03d}", signal, metric)
        for layer in range(LAYERS)
        for signal in SIGNALS
        for metric in METRICS
    ]
    distances = random.normal(size=(len(keys), len(ranks))).astype(np.float32).astype(np.float64)
    distances[[one[0] == f"layers.{FAR_LAYER:03d}" for one in keys], ranks.searchsorted(FAR_RANK)] = 50.0
    medians = random.normal(size=len(keys)) + 10
    # A merge rounds to as many bits.
    values = (medians[:, None] + distances).astype(np.float32).astype(np.float64)
    constant = {
        "generation": 0, "attempt": attempt, "forward_in_attempt": 0, "forward_index": None, "mode": "train",
        "call_index": 0, "stage": "", "tensor_path": "output", "backward_index": 0, "scope": "local",
        "num_ranks": RANKS, "num_ranks_without_value": 0, "all_groups": is_detailed,
    }  # fmt: skip
    columns = {name: [value] * len(keys) for name, value in constant.items()} | {
        "layer": [one[0] for one in keys],
        "signal": [one[1] for one in keys],
        "metric": [one[2] for one in keys],
        "lowest_rank": ranks[values.argmin(axis=1)],
        "lowest_value": values.min(axis=1),
        "highest_rank": ranks[values.argmax(axis=1)],
        "highest_value": values.max(axis=1),
        "median_of_ranks": medians,
        "mad_of_ranks": np.full(len(keys), 0.7),
        "ranks": [ranks.tolist()] * len(keys),
        "values": values.tolist(),
        "distances": distances.tolist(),
    }
    return pa.Table.from_pydict(
        {name: columns[name] for name in OVERVIEW_SCHEMA.names}, schema=OVERVIEW_SCHEMA
    )
