"""Every environment variable that this package reads, and nothing else reads the environment.

Own variables begin with ``TORCHINSTRUMENTS_``; the others belong to launchers and are only read.
Precedence everywhere: an argument, then the environment, then a default.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from torchinstruments.errors import ConfigurationError

__all__ = [
    "DISABLED",
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "SLURM_JOB_ID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SPOOL_DIR",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "WORLD_SIZE",
    "integer",
    "is_disabled",
    "spool_root",
    "text",
]

DISABLED = "TORCHINSTRUMENTS_DISABLED"
"""``1``, ``true``, ``yes`` or ``on``: every observer is inert. Arguments are validated all the same."""

SPOOL_DIR = "TORCHINSTRUMENTS_SPOOL_DIR"
"""Local, durable folder that holds what is not yet on a remote store; else the user's cache folder."""

RANK = "RANK"
"""Set by torchrun and by hand for ``env://``: this process's rank in the world."""

WORLD_SIZE = "WORLD_SIZE"
"""Set beside ``RANK``: how many ranks there are."""

LOCAL_RANK = "LOCAL_RANK"
"""Set by torchrun: the rank among those of this host."""

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""Set by torchrun: how many ranks this host has."""

GROUP_RANK = "GROUP_RANK"
"""Set by torchrun: which of its agents (usually: which host) this is."""

MASTER_ADDR = "MASTER_ADDR"
"""Host of the rendezvous store."""

MASTER_PORT = "MASTER_PORT"
"""Port of the rendezvous store."""

TORCHELASTIC_RUN_ID = "TORCHELASTIC_RUN_ID"
"""torchrun's ``--rdzv-id``; a random one with ``--standalone``; ``none`` when it was not given."""

TORCHELASTIC_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""Restarts that this host's torchrun agent made. It counts per agent, so it never identifies a generation."""

TORCHELASTIC_USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""``True`` where torchrun's agent hosts the rendezvous store, which then outlives the workers."""

SLURM_PROCID = "SLURM_PROCID"
"""Set by srun: this task's rank."""

SLURM_NTASKS = "SLURM_NTASKS"
"""Tasks of the job. A batch script without srun sees it too, with one process."""

SLURM_STEP_NUM_TASKS = "SLURM_STEP_NUM_TASKS"
"""Tasks of this job step: set only where srun started the process."""

SLURM_LOCALID = "SLURM_LOCALID"
"""Set by srun: the rank among those of this host."""

SLURM_NODEID = "SLURM_NODEID"
"""Set by srun: which host this is."""

SLURM_JOB_ID = "SLURM_JOB_ID"
"""The job, kept when it is requeued."""

SLURM_STEP_ID = "SLURM_STEP_ID"
"""The job step."""

SLURM_RESTART_COUNT = "SLURM_RESTART_COUNT"
"""How often Slurm requeued the job."""


def text(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the variable's value without surrounding blanks, or None where it is unset or empty."""
    value = (os.environ if environ is None else environ).get(name, "").strip()
    return value or None


def integer(name: str, environ: Mapping[str, str] | None = None) -> int | None:
    """Returns the variable as a whole number, or None where it is unset or empty.

    Raises:
        ConfigurationError: The value is not a whole number.
    """
    value = text(name, environ)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(
            f"the environment variable {name} is {value!r}, but has to be a whole number; "
            f"correct it, or unset it where no launcher uses it"
        ) from None


def is_disabled(environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether ``TORCHINSTRUMENTS_DISABLED`` turns every observer off.

    Raises:
        ConfigurationError: It says neither yes nor no.
    """
    value = text(DISABLED, environ) or "0"
    if value.lower() in {"1", "true", "yes", "on"}:
        return True
    if value.lower() in {"0", "false", "no", "off"}:
        return False
    raise ConfigurationError(
        f"the environment variable {DISABLED} is {value!r}, but has to be 1, true, yes or on, or 0, false, "
        f"no or off; correct it, or unset it"
    )


def spool_root(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the local folder under which spools lie (it may not exist yet)."""
    given = text(SPOOL_DIR, environ)
    if given is not None:
        return Path(given)
    cache = text("XDG_CACHE_HOME", environ)
    return (Path(cache) if cache else Path.home() / ".cache") / "torchinstruments" / "spool"
