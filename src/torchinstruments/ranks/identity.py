"""Who this process is among the ranks, read from whatever knows it best.

The initialised process group wins; before it, torchrun's variables (or the same ones set by hand for
``env://``); then Slurm's job step. A process that has none of them may be a world of one, or a rank whose
group does not exist yet, as under ``torch.multiprocessing.spawn``: nothing tells the two apart at that
moment, so the answer is None and the caller asks again at the first root forward.
"""

import contextlib
import multiprocessing
import os
import re
import secrets
import socket

import torch.distributed as dist

from torchinstruments import environment
from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Identity

__all__ = ["configured_run_id", "discover", "new_process_id", "world_of_one"]

_NOT_A_RUN_ID = frozenset({"none", "default"})
_IN_PATHS = re.compile("[A-Za-z0-9_]")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})


def new_process_id() -> str:
    """Returns 8 random hex digits that name this process; the random state of the program stays as it is."""
    return secrets.token_hex(4)


def discover(process: str, device: str = "") -> Identity | None:
    """Returns who this process is, or None where that cannot be known yet.

    Args:
        process: 8 hex digits of `new_process_id`.
        device: Device that the model lies on, as torch writes it.

    Raises:
        ConfigurationError: A launcher's variables contradict each other, or are not whole numbers.
    """
    if dist.is_available() and dist.is_initialized():
        return _of_process_group(process, device)
    return _of_torchrun(process, device) or _of_slurm(process, device)


def world_of_one(process: str, device: str = "") -> Identity:
    """Returns the identity of a process that is its own world.

    For the caller that got None from `discover` and has waited until the first root forward.
    """
    return Identity(
        rank=0,
        world_size=1,
        local_rank=0,
        host=socket.gethostname(),
        process=process,
        launcher="none",
        local_world_size=1,
        node_rank=0,
        pid=os.getpid(),
        device=device,
    )


def configured_run_id() -> str | None:
    """Returns the run id that the launcher gives, or None.

    torchrun's ``--rdzv-id`` unless it is its default, else Slurm's job and step, ``1234.0``. Both stay the
    same when the launcher restarts the job.

    Raises:
        ConfigurationError: Nothing of it may stand in a path.
    """
    elastic = environment.text(environment.TORCHELASTIC_RUN_ID)
    if elastic is not None and elastic.lower() not in _NOT_A_RUN_ID:
        return _nameable(elastic, environment.TORCHELASTIC_RUN_ID)
    job = environment.text(environment.SLURM_JOB_ID)
    step = environment.text(environment.SLURM_STEP_ID)
    if job is None or step is None:
        return job and _nameable(job, environment.SLURM_JOB_ID)
    return _nameable(f"{job}.{step}", f"{environment.SLURM_JOB_ID} and {environment.SLURM_STEP_ID}")


def _nameable(run_id: str, variables: str) -> str:
    """Returns a run id that has something which may stand in a path."""
    if _IN_PATHS.search(run_id) is None:
        raise ConfigurationError(
            f"the run id {run_id!r} of {variables} has no letter, digit or underscore to name a folder by; "
            f"correct the environment, or give run_id"
        )
    return run_id


def _of_process_group(process: str, device: str) -> Identity:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_world_size = _local_world_size(world_size)
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=_local_rank(rank, local_world_size),
        host=socket.gethostname(),
        process=process,
        launcher=_launcher_of(rank, world_size),
        local_world_size=local_world_size,
        node_rank=_first_integer(environment.GROUP_RANK, environment.SLURM_NODEID),
        restart_count=_restart_count(),
        pid=os.getpid(),
        device=device,
    )


def _launcher_of(rank: int, world_size: int) -> str:
    """Returns whose variables name the same rank and world as the process group, else ``process_group``."""
    with contextlib.suppress(ConfigurationError):
        for named in (_of_torchrun("", ""), _of_slurm("", "")):
            if named is not None and (named.rank, named.world_size) == (rank, world_size):
                return named.launcher
    return "process_group"


def _of_torchrun(process: str, device: str) -> Identity | None:
    rank = environment.integer(environment.RANK)
    if rank is None:
        return None
    world_size = environment.integer(environment.WORLD_SIZE)
    if world_size is None:
        raise ConfigurationError(
            f"the environment has RANK={rank} but no WORLD_SIZE; "
            "set both as torchrun does, or unset RANK where this process is alone"
        )
    _check_rank("RANK", rank, "WORLD_SIZE", world_size)
    local_world_size = _local_world_size(world_size)
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=_local_rank(rank, local_world_size),
        host=socket.gethostname(),
        process=process,
        launcher="torchrun",
        local_world_size=local_world_size,
        node_rank=environment.integer(environment.GROUP_RANK),
        restart_count=environment.integer(environment.TORCHELASTIC_RESTART_COUNT),
        pid=os.getpid(),
        device=device,
    )


def _of_slurm(process: str, device: str) -> Identity | None:
    # A child of the task that srun started inherits its variables without being that task.
    if multiprocessing.parent_process() is not None:
        return None
    # SLURM_NTASKS is set in a batch script too, which is one process; only srun sets the step's own count.
    rank = environment.integer(environment.SLURM_PROCID)
    world_size = environment.integer(environment.SLURM_STEP_NUM_TASKS)
    if rank is None or world_size is None:
        return None
    _check_rank("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", world_size)
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=environment.integer(environment.SLURM_LOCALID) or 0,
        host=socket.gethostname(),
        process=process,
        launcher="slurm",
        node_rank=environment.integer(environment.SLURM_NODEID),
        restart_count=environment.integer(environment.SLURM_RESTART_COUNT),
        pid=os.getpid(),
        device=device,
    )


def _check_rank(rank_name: str, rank: int, size_name: str, world_size: int) -> None:
    if world_size < 1:
        raise ConfigurationError(
            f"the environment has {size_name}={world_size} beside {rank_name}={rank}, "
            f"but a world has at least 1 rank; correct {size_name}"
        )
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"the environment has {rank_name}={rank} beside {size_name}={world_size}, "
            f"but {rank_name} has to be from 0 to {world_size - 1}; correct one of the two"
        )


def _local_world_size(world_size: int) -> int | None:
    """Returns how many ranks this host has, where something says so."""
    local = environment.integer(environment.LOCAL_WORLD_SIZE)
    if local is not None and local >= 1:
        return local
    # A rendezvous on the loopback address proves that all ranks are on this host.
    if (environment.text(environment.MASTER_ADDR) or "") in _LOOPBACK:
        return world_size
    return None


def _local_rank(rank: int, local_world_size: int | None) -> int:
    """Returns what a launcher says, else what follows where ranks are counted host by host, else 0."""
    said = _first_integer(environment.LOCAL_RANK, environment.SLURM_LOCALID)
    if said is not None:
        return said
    return rank % local_world_size if local_world_size is not None else 0


def _restart_count() -> int | None:
    return _first_integer(environment.TORCHELASTIC_RESTART_COUNT, environment.SLURM_RESTART_COUNT)


def _first_integer(*names: str) -> int | None:
    for name in names:
        value = environment.integer(name)
        if value is not None:
            return value
    return None
