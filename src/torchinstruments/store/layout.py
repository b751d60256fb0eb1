"""Where everything of a run lies, relative to its folder; the only place that makes or parses such names.

::

    run.json  generations/000.json
    rank-000/process-1a2b3c4d.json  rank-000/modules-1a2b3c4d.json
    rank-000/history.parts/part-1a2b3c4d-000000.parquet  (samples, steps, fingerprints alike)
    rank-000/checks-1a2b3c4d.json  rank-000/result.json  rank-000/index.md
    rank-000/tensorboard/events.out.tfevents.1700000000.host.1a2b3c4d.000000
    merged/result.json  merged/summary.parquet  merged/steps.parquet

A world of one, and a run of rank 0 alone, use the run's folder itself in place of ``rank-000/``. Ranks and
part numbers have *at least* the digits shown: readers parse digits and never sort names.
"""

import re
from dataclasses import dataclass

__all__ = [
    "GENERATIONS",
    "INDEX_FILE",
    "MAX_GENERATION",
    "MAX_RANK",
    "MERGED",
    "RESULT_FILE",
    "RUN_FILE",
    "TABLES",
    "TENSORBOARD",
    "PartName",
    "checks_file",
    "generation_file",
    "is_folder_of_no_rank",
    "is_parts_folder",
    "is_rank_folder_beyond",
    "manifest_file",
    "may_hold_files",
    "modules_file",
    "parse_checks",
    "parse_generation",
    "parse_manifest",
    "parse_modules",
    "parse_part",
    "parse_rank_folder",
    "part_file",
    "rank_folder",
    "safe_run_id",
    "tensorboard_file",
]

RUN_FILE = "run.json"
GENERATIONS = "generations"
MERGED = "merged"
TENSORBOARD = "tensorboard"
RESULT_FILE = "result.json"
INDEX_FILE = "index.md"
TABLES = ("history", "samples", "steps", "fingerprints")

MAX_RANK = 2**31 - 1
"""Largest rank that the column of that name can hold."""

MAX_GENERATION = 2**31 - 1
"""Largest generation that the column of that name can hold."""

_RANK = re.compile(r"rank-([0-9]{3,})")
_PART = re.compile(r"part-([0-9a-f]{8})-([0-9]{6,18})\.parquet")
_MANIFEST = re.compile(r"process-([0-9a-f]{8})\.json")
_MODULES = re.compile(r"modules-([0-9a-f]{8})\.json")
_CHECKS = re.compile(r"checks-([0-9a-f]{8})\.json")
_GENERATION = re.compile(r"([0-9]{3,10})\.json")
_MAX_RANK_DIGITS = 20
_PARTS = ".parts"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class PartName:
    """What a part's file name says.

    Attributes:
        process: 8 hex digits of the process that wrote it.
        sequence: Its number among the parts of that process and table.
    """

    process: str
    sequence: int


def rank_folder(rank: int, *, alone: bool) -> str:
    """Returns the folder of a rank: ``""`` where the run's folder itself is used, else ``rank-NNN``."""
    return "" if alone else f"rank-{rank:03d}"


def parse_rank_folder(name: str) -> int | None:
    """Returns the rank that a folder's name tells, or None where it is no rank's folder, or of no rank."""
    match = _RANK.fullmatch(name)
    if match is None or len(match[1]) > _MAX_RANK_DIGITS or int(match[1]) > MAX_RANK:
        return None
    return int(match[1])


def is_rank_folder_beyond(name: str) -> bool:
    """Returns whether a folder is named like that of a rank, but of one that no process can have."""
    return _RANK.fullmatch(name) is not None and parse_rank_folder(name) is None


def is_parts_folder(name: str) -> bool:
    """Returns whether a folder is named like one that holds the parts of a table."""
    return name.endswith(_PARTS) and name.removesuffix(_PARTS) in TABLES


def is_folder_of_no_rank(name: str) -> bool:
    """Returns whether a folder is called like that of a rank, and by no number of one, such as ``rank-x``."""
    return _is_called_rank(name) and _RANK.fullmatch(name) is None


def _is_called_rank(folder: str) -> bool:
    return folder.startswith("rank-") and "/" not in folder


def part_file(folder: str, table: str, process: str, sequence: int) -> str:
    """Returns the path of a part."""
    return _join(folder, f"{table}.parts/part-{process}-{sequence:06d}.parquet")


def parse_part(name: str) -> PartName | None:
    """Returns what a part's file name (without folders) says, or None where it is no part's name."""
    match = _PART.fullmatch(name)
    return PartName(match[1], int(match[2])) if match else None


def manifest_file(folder: str, process: str) -> str:
    """Returns the path of a process's manifest."""
    return _join(folder, f"process-{process}.json")


def parse_manifest(name: str) -> str | None:
    """Returns the process that a manifest's file name tells, or None."""
    match = _MANIFEST.fullmatch(name)
    return match[1] if match else None


def checks_file(folder: str, process: str) -> str:
    """Returns the path of what a process's training checks have found."""
    return _join(folder, f"checks-{process}.json")


def parse_checks(name: str) -> str | None:
    """Returns the process that the file name of a report of checks tells, or None."""
    match = _CHECKS.fullmatch(name)
    return match[1] if match else None


def modules_file(folder: str, process: str) -> str:
    """Returns the path of a process's module catalog."""
    return _join(folder, f"modules-{process}.json")


def parse_modules(name: str) -> str | None:
    """Returns the process that a catalog's file name tells, or None."""
    match = _MODULES.fullmatch(name)
    return match[1] if match else None


def generation_file(number: int) -> str:
    """Returns the path of a generation's record."""
    return f"{GENERATIONS}/{number:03d}.json"


def parse_generation(name: str) -> int | None:
    """Returns the generation that a file name in ``generations/`` tells, or None."""
    match = _GENERATION.fullmatch(name)
    return int(match[1]) if match and int(match[1]) <= MAX_GENERATION else None


def may_hold_files(folder: str) -> bool:
    """Returns whether files of a run may lie directly in a folder of it: of a rank, a table, the generations.

    What else lies there, `TENSORBOARD` and `MERGED` among it, has nothing that a reader of the run looks at.
    """
    above, _, name = folder.rpartition("/")
    if is_parts_folder(name):
        return not above or _is_called_rank(above)
    return not above and (name == GENERATIONS or _is_called_rank(name))


def tensorboard_file(folder: str, name: str) -> str:
    """Returns the path of an event file of TensorBoard."""
    return _join(folder, f"{TENSORBOARD}/{name}")


def safe_run_id(run_id: str) -> str:
    """Returns a run id made safe for a path: letters, digits, ``.``, ``_`` and ``-``, at most 120 characters.

    Raises:
        ValueError: Nothing is left of it.
    """
    safe = _UNSAFE.sub("-", run_id).strip("-.")[:120]
    if not safe:
        raise ValueError(
            f"the run id {run_id!r} has no character that may stand in a path; give another run_id"
        )
    return safe


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
