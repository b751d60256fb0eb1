"""Where a rank writes: straight into the run's folder, or into the spool of its host.

The leader keeps there, beside its rows, who the members of the generation are.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchinstruments.ranks.policy import Policy
from torchinstruments.records import Claim, GenerationRecord, Identity, Member, RunRecord
from torchinstruments.store.claim import ensure_generation, ensure_run, run_url, write_members
from torchinstruments.store.filesystem import LocalStorage, is_remote, open_storage
from torchinstruments.store.layout import rank_folder
from torchinstruments.store.local_target import LocalTarget
from torchinstruments.store.schema import SCHEMA_VERSION
from torchinstruments.store.spool import SpoolTarget
from torchinstruments.store.target import PartTarget
from torchinstruments.store.urls import beside, local_path

__all__ = ["MAX_DIRECT_WORLD_SIZE", "Destination", "Members", "RankPlace"]

MAX_DIRECT_WORLD_SIZE = 16
"""Ranks that write straight into a local folder; a larger world goes through the spool, so that a shared
filesystem sees few and large files."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the user wants the run.

    Attributes:
        url: Path or URL as given, with its secrets; ``{run_id}`` in it is replaced.
        storage_options: Settings in fsspec's dialect.
        run_id: The run id that was given, or None.
    """

    url: str
    storage_options: Mapping[str, object] | None
    run_id: str | None


class RankPlace:
    """Opens the place where this rank writes.

    Args:
        identity: Who this process is.
        destination: Where the user wants the run.
        url: The same, with the run id in it.
        claim: As agreed.
        run: The record of the run.
        policy: Which ranks observe.
        started_at: When this rank began to enrol, in ISO 8601.
    """

    def __init__(
        self,
        identity: Identity,
        destination: Destination,
        url: str,
        claim: Claim,
        run: RunRecord,
        policy: Policy,
        started_at: str,
    ) -> None:
        self._identity = identity
        self._options = destination.storage_options
        self._url = url
        self._claim = claim
        self._run = run
        self._started_at = started_at
        alone = identity.rank == 0 and (policy.alone or (identity.world_size == 1 and claim.alone))
        self._folder = rank_folder(identity.rank, alone=alone)
        self._is_remote = is_remote(url)

    def open(self) -> tuple[PartTarget, str, Path | None, str]:
        """Returns the target, the run's URL there, the local folder for copies and the path of the spool.

        Raises:
            OSError: Not even a spool can be made.
        """
        if (
            not self._is_remote
            and self._claim.verified
            and self._identity.world_size <= MAX_DIRECT_WORLD_SIZE
        ):
            # This host may not share the leader's disk; and its own may be read-only.
            with contextlib.suppress(OSError, ValueError):
                home = ensure_run(open_storage(local_path(self._url)), self._run)
                LocalStorage(f"{home.url}/{self._folder}").prepare()
                generation = self._generation((), complete=False, leader_process="")
                if self._identity.local_rank == 0:
                    ensure_generation(home, generation)

                def restore() -> None:
                    ensure_run(home, self._run)
                    ensure_generation(home, generation)

                target = LocalTarget(home, self._folder, self._identity.process, restore=restore)
                return target, home.url, Path(home.url) / self._folder, ""
        spool = self._open_spool()
        if self._is_remote:
            return spool, self._claim.url, None, spool.path
        # Where the spool's uploader goes: to the agreed folder, unless this host has one of its own.
        url = local_path(self._url)
        if self._claim.url == local_path(beside(self._url, self._claim.run_id)):
            url = self._claim.url
        return spool, url, Path(url) / self._folder, spool.path

    def members_writer(self, target: PartTarget | None) -> Callable[[tuple[Member, ...], bool], None]:
        """Returns what stores the members of the generation (leader's thread)."""
        spool = target if isinstance(target, SpoolTarget) else None

        def write(members: tuple[Member, ...], complete: bool) -> None:  # noqa: FBT001 - as the service calls it
            record = self._generation(members, complete=complete, leader_process=self._identity.process)
            if not self._is_remote and self._claim.verified:
                write_members(open_storage(run_url(self._url, self._claim)), record)
            else:
                # A leader that does not observe has no target; its spool stays open for late members.
                nonlocal spool
                spool = spool or self._open_spool()
                spool.write_members(record)
                spool.keep_alive()

        return write

    def _open_spool(self) -> SpoolTarget:
        return SpoolTarget(
            self._url,
            self._options,
            identity=self._identity,
            claim=self._claim,
            run=self._run,
            folder=self._folder,
            started_at=self._started_at,
        )

    def _generation(
        self, members: tuple[Member, ...], *, complete: bool, leader_process: str
    ) -> GenerationRecord:
        return GenerationRecord(
            schema_version=SCHEMA_VERSION,
            run_id=self._claim.run_id,
            generation=self._claim.generation,
            world_size=self._identity.world_size,
            leader_process=leader_process,
            started_at=self._started_at,
            first_sample_id=self._claim.first_sample_id,
            members=members,
            members_complete=complete,
        )


class Members:
    """Holds what the leader's thread told until there is somewhere to write it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: tuple[tuple[Member, ...], bool] | None = None
        self._write: Callable[[tuple[Member, ...], bool], None] | None = None

    def tell(self, members: tuple[Member, ...], complete: bool) -> None:  # noqa: FBT001 - as the service calls it
        """Takes the members as they are known now, and whether those are all."""
        with self._lock:
            self._told = (members, complete)
            if self._write is not None:
                self._write(members, complete)

    def write_with(self, write: Callable[[tuple[Member, ...], bool], None]) -> None:
        """Takes what stores them, now and whenever there are others."""
        with self._lock:
            self._write = write
            if self._told is not None:
                write(*self._told)
