"""``checks-<process>.json``: what the training checks of one process have found."""

import msgspec

__all__ = ["ChecksDocument"]


class ChecksDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document as it lies in a rank's folder.

    Attributes:
        schema_version: Of the run's documents; each report has its own.
        run_id: Run that it belongs to.
        generation: Of the process group.
        rank: The process's rank in it.
        process: 8 hex digits.
        sessions: The latest report of each session of checks, in the order in which they were attached.
    """

    schema_version: int
    run_id: str
    generation: int
    rank: int
    process: str
    sessions: tuple[msgspec.Raw, ...]
