"""Which run this is, which (re)start of it, and who takes part."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "Claim",
    "GenerationRecord",
    "Identity",
    "Member",
    "RunRecord",
]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is among the ranks.

    Attributes:
        rank: Rank in the world, from 0.
        world_size: Ranks in the world.
        local_rank: Rank among those of this host.
        host: Host name.
        process: 8 hex digits made at attach. Ranks move between processes at a restart; this does not.
        launcher: Where rank and world size were read: ``process_group``, ``torchrun``, ``slurm`` or ``none``.
        local_world_size: Ranks on this host, where known.
        node_rank: Which host this is, where known.
        restart_count: Restarts that the launcher of this host counted, where it does.
        pid: The operating system's process id.
        device: Device that the model lies on, as torch writes it.
        mesh_coordinates: Coordinates in the device mesh, where there is one.
        mesh_axis_names: Names of the mesh axes, in the order of the coordinates.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    process: str
    launcher: str = "none"
    local_world_size: int | None = None
    node_rank: int | None = None
    restart_count: int | None = None
    pid: int = 0
    device: str = ""
    mesh_coordinates: tuple[int, ...] = ()
    mesh_axis_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """One rank as its generation's leader heard of it.

    Attributes:
        rank: Rank in this generation.
        process: 8 hex digits of the process that held it.
        host: Host name.
        local_rank: Rank among those of its host.
        observing: Whether the rank policy lets it observe.
    """

    rank: int
    process: str
    host: str
    local_rank: int
    observing: bool


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """``generations/NNN.json``: one (re)start of the process group.

    Attributes:
        schema_version: Version of everything persisted.
        run_id: The run that it belongs to.
        generation: Number from 0.
        world_size: Ranks of this generation.
        leader_process: Process that wrote it.
        started_at: ISO 8601, UTC.
        first_sample_id: Sample ids of this generation start here, on every rank.
        members: Those that said hello, by rank; a rank that is not here never called ``inject_observer``.
        members_complete: Whether all ranks had said hello when this was written.
    """

    schema_version: int
    run_id: str
    generation: int
    world_size: int
    leader_process: str
    started_at: str
    first_sample_id: int
    members: tuple[Member, ...] = ()
    members_complete: bool = False


@dataclass(frozen=True, slots=True)
class RunRecord:
    """``run.json``: written once, by exclusive create.

    Attributes:
        schema_version: Version of everything persisted.
        run_id: Safe for a path.
        nonce: 32 hex digits of the writer, to know one's own claim again after a lost response.
        created_at: ISO 8601, UTC.
        versions: Package to version, of this package, Python, torch, pyarrow.
        sampling: ``{"type": ..., "settings": {...}}``.
        signals: What is measured.
        statistics: Metric names of the reducers, where known beforehand.
        history: Settings of the history, ``buffer_rows`` and ``window``.
        rank_policy: Name of the policy, or the ranks it lists, as text.
        world_size: Ranks of generation 0.
        launcher: As in `Identity`.
    """

    schema_version: int
    run_id: str
    nonce: str
    created_at: str
    versions: Mapping[str, str]
    sampling: Mapping[str, object]
    signals: tuple[str, ...]
    statistics: tuple[str, ...]
    history: Mapping[str, int]
    rank_policy: str
    world_size: int
    launcher: str


@dataclass(frozen=True, slots=True)
class Claim:
    """What the leader found when it claimed the run's folder; its echo is what every rank believes.

    Attributes:
        url: Folder of the run, without secrets. It may lie beside the one that was asked for.
        run_id: The run's id.
        generation: Number of this (re)start.
        first_sample_id: Sample ids of this generation start here.
        verified: Whether ``run.json`` and the generation were really claimed on the store. Where not, rows
            wait in the spool and the folder records ``unverified_claim``.
        notice: One sentence that every rank's user should read once, else ``""``: a folder that belongs to
            another run, a store that did not answer.
        failure: One sentence that must raise on all ranks alike, else ``""``.
        failure_kind: ``denied``, ``not_found``, ``configuration`` or ``""``; chooses the error class.
        alone: Whether the run began as a world of one, or with rank 0 alone, so that rank 0 uses the run's
            folder itself for ever.
    """

    url: str
    run_id: str
    generation: int
    first_sample_id: int
    verified: bool
    notice: str = ""
    failure: str = ""
    failure_kind: str = ""
    alone: bool = False
