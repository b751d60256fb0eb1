"""From an identity to a place to write: agreement with the other ranks, the claim of the folder, the target.

The leader claims for all; what it found, or what the user configured wrongly, reaches every rank through
the echo of its claim, so that all ranks attach, or raise, alike. Everything that is not the user's mistake
ends in a place to write all the same: the spool.
"""

import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from torchinstruments._version import __version__
from torchinstruments.errors import ConfigurationError, StorageDeniedError, StorageNotFoundError
from torchinstruments.rank_place import Destination, Members, RankPlace
from torchinstruments.ranks.identity import configured_run_id
from torchinstruments.ranks.policy import Policy
from torchinstruments.ranks.rendezvous import (
    Agreement,
    agree,
    connect,
    keep_generation,
    kept_generations,
    kept_run_id,
)
from torchinstruments.records import Claim, Identity, Member, RunRecord
from torchinstruments.store.claim import (
    SAMPLE_IDS_PER_GENERATION,
    ClaimRequest,
    claim_in_child,
)
from torchinstruments.store.filesystem import is_remote, redact
from torchinstruments.store.layout import safe_run_id
from torchinstruments.store.schema import SCHEMA_VERSION
from torchinstruments.store.target import PartTarget
from torchinstruments.store.urls import local_path

__all__ = [
    "Enrolment",
    "RunPlan",
    "can_agree",
    "enrol",
    "raise_failure",
    "try_destination",
]

FAILURE_TIMEOUT_S = 20.0
"""For which the leader waits until all ranks have heard of a failure."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What ``run.json`` says of the settings, as in `RunRecord`."""

    sampling: Mapping[str, object]
    signals: tuple[str, ...]
    statistics: tuple[str, ...]
    history: Mapping[str, int]
    policy: Policy


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What a rank knows once it has a place to write.

    Attributes:
        claim: As agreed.
        run: The record of the run.
        agreement: The agreement that it came from; its service answers late ranks.
        target: Where parts go; None on a rank that does not observe.
        url: Of the folder that this rank's rows go to, without secrets: the agreed one, or that of a host
            which does not share the leader's disk.
        spool_path: Folder of the spool, where there is one.
        copy_folder: Local folder of the rank, for the copy of its history; None where it is remote.
        notices: Sentences that the user should read once.
    """

    claim: Claim
    run: RunRecord
    agreement: Agreement
    target: PartTarget | None
    url: str
    spool_path: str
    copy_folder: Path | None
    notices: tuple[str, ...]


def can_agree(identity: Identity | None) -> bool:
    """Returns whether a rank can be enrolled now, or has to wait for its first root forward.

    A world of several without a store to meet at, before its process group exists, has to wait.
    """
    if identity is None:
        return False
    return identity.world_size == 1 or torch.distributed.is_initialized() or connect(identity) is not None


def enrol(
    identity: Identity,
    destination: Destination,
    plan: RunPlan,
    *,
    observing: bool,
    channel: str,
    timeout_s: float,
) -> Enrolment:
    """Agrees, claims and opens the place to write (attaching thread).

    Args:
        identity: Who this process is.
        destination: Where the user wants the run.
        plan: Settings for ``run.json``.
        observing: Whether the rank policy lets this rank observe.
        channel: Keeps several observers of one process apart.
        timeout_s: For which a rank waits for the leader.

    Returns:
        The enrolment. A failure that has to raise stands in its claim; it then has no target.
    """
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    store = connect(identity)
    members = Members()

    me = Member(identity.rank, identity.process, identity.host, identity.local_rank, observing)

    def claim() -> Claim:
        run_id = destination.run_id or configured_run_id()
        made_here = run_id is None
        run_id = safe_run_id(run_id or kept_run_id(store, channel, _new_run_id))
        num_kept = kept_generations(store, channel, run_id)
        request = ClaimRequest(
            run=_record(identity, plan, run_id, started_at),
            world_size=identity.world_size,
            leader_process=identity.process,
            started_at=started_at,
            run_id_is_given=not made_here,
            may_fail=not identity.restart_count,
            assumed_generation=max(identity.restart_count or 0, num_kept),
            lowest_generation=num_kept,
            members=(me,),
        )
        claimed = claim_in_child(_in_run(destination.url, run_id), destination.storage_options, request)
        if not claimed.failure:
            keep_generation(store, channel, run_id, claimed.generation)
        return claimed

    def fallback() -> Claim:
        # The leader, when it comes, takes the id that the store keeps, so that all rows belong together.
        run_id = destination.run_id or configured_run_id() or kept_run_id(store, channel, _new_run_id)
        run_id = safe_run_id(run_id)
        url = _in_run(destination.url, run_id)
        generation = identity.restart_count or 0
        return Claim(
            url=redact(url) if is_remote(url) else local_path(url),
            run_id=run_id,
            generation=generation,
            first_sample_id=generation * SAMPLE_IDS_PER_GENERATION,
            verified=False,
            notice=f"rank {identity.rank} heard nothing from the run's leader within {timeout_s:g} s, so its "
            f"claim is unverified and its rows wait in the spool until the folder can be claimed",
        )

    agreement = agree(
        identity,
        observing,
        claim,
        store=store,
        fallback=fallback,
        timeout_s=timeout_s,
        channel=channel,
        on_members=members.tell,
    )
    agreed = agreement.claim
    run = _record(identity, plan, agreed.run_id, started_at)
    if agreed.failure:
        if agreement.service is not None:
            # This rank is about to raise, and the others have to hear why before it is gone.
            agreement.service.wait_until_complete(FAILURE_TIMEOUT_S)
        return Enrolment(agreed, run, agreement, None, agreed.url, "", None, ())
    url = _in_run(destination.url, agreed.run_id)
    place = RankPlace(identity, destination, url, agreed, run, plan.policy, started_at)
    notices = _notices(identity, destination, agreed, agreement)
    target: PartTarget | None = None
    copy_folder: Path | None = None
    shown_url, spool_path = agreed.url, ""
    if observing:
        try:
            target, shown_url, copy_folder, spool_path = place.open()
        except OSError as error:
            notices.append(
                f"rank {identity.rank} can write neither to {agreed.url} nor to a spool ({error}); "
                f"nothing of it is kept. Set TORCHINSTRUMENTS_SPOOL_DIR to a writable folder"
            )
    if agreement.leader:
        members.write_with(place.members_writer(target))
        if agreement.service is None:
            # Nobody else could be asked, and in a world of one there is nobody else.
            try:
                members.tell((me,), identity.world_size == 1)
            except OSError as error:
                notices.append(f"the members of generation {agreed.generation} could not be stored: {error}")
    return Enrolment(agreed, run, agreement, target, shown_url, spool_path, copy_folder, tuple(notices))


def _notices(identity: Identity, destination: Destination, agreed: Claim, agreement: Agreement) -> list[str]:
    """Returns what this rank's user should read: the leader says what all share, a rank what is its own."""
    if agreement.leader and identity.rank > 0:
        notice = (
            f"rank {identity.rank} waited {agreement.waited_s:.0f} s for a lower rank to attach an observer, "
            f"and leads the run now, as the lowest rank that did; to have no rank wait, call inject_observer "
            f"on every rank and choose those that measure with rank_policy"
        )
        return [notice, *([agreed.notice] if agreed.notice else [])]
    if agreement.leader or not agreement.verified:
        return [agreed.notice] if agreed.notice else []
    if destination.run_id not in {None, agreed.run_id}:
        notice = (
            f"rank {identity.rank} was given run_id={destination.run_id!r}, but the leader's run is "
            f"{agreed.run_id!r}, which counts for all ranks; give every rank the same run_id"
        )
        return [notice]
    asked = _in_run(destination.url, agreed.run_id).rstrip("/").rpartition("/")[2]
    found = agreed.url.removesuffix(f"/run-{agreed.run_id}").rpartition("/")[2]
    if asked not in {found, ".", ""} and not asked.startswith("~"):
        notice = (
            f"rank {identity.rank} asked for {redact(destination.url)}, but the leader's folder is "
            f"{agreed.url}; attach the observers of a process in the same order, with the same arguments, on "
            f"every rank"
        )
        return [notice]
    return []


def try_destination(destination: Destination, plan: RunPlan, identity: Identity) -> Claim:
    """Finds out what the user configured wrongly, for a process that has to wait (attaching thread).

    Args:
        destination: Where the user wants the run.
        plan: Settings for ``run.json``.
        identity: Who this process may turn out to be.

    Returns:
        A claim that holds a failure, or nothing of interest. Nothing is left at the destination.
    """
    run_id = safe_run_id(destination.run_id or configured_run_id() or _new_run_id())
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    request = ClaimRequest(
        run=_record(identity, plan, run_id, now),
        world_size=identity.world_size,
        leader_process=identity.process,
        started_at=now,
        only_try=True,
    )
    url = destination.url
    if "{run_id}" in url:
        # What differs from run to run is not there yet; the folder around it has to be.
        url = url.partition("{run_id}")[0].rpartition("/")[0] + "/" if "/" in url else "."
    return claim_in_child(url, destination.storage_options, request)


def raise_failure(claim: Claim) -> None:
    """Raises what the user configured wrongly, as every rank heard it from the leader; else does nothing.

    Raises:
        StorageDeniedError: The store denied access.
        StorageNotFoundError: Bucket or folder are missing.
        ConfigurationError: The address or the options cannot work.
    """
    if not claim.failure:
        return
    kinds = {"denied": StorageDeniedError, "not_found": StorageNotFoundError}
    raise kinds.get(claim.failure_kind, ConfigurationError)(claim.failure)


def _record(identity: Identity, plan: RunPlan, run_id: str, created_at: str) -> RunRecord:
    return RunRecord(
        schema_version=SCHEMA_VERSION,
        run_id=run_id,
        nonce=secrets.token_hex(16),
        created_at=created_at,
        versions={
            "torchinstruments": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": metadata.version("numpy"),
            "pyarrow": metadata.version("pyarrow"),
        },
        sampling=plan.sampling,
        signals=plan.signals,
        statistics=plan.statistics,
        history=plan.history,
        rank_policy=plan.policy.name,
        world_size=identity.world_size,
        launcher=identity.launcher,
    )


def _new_run_id() -> str:
    """Returns a run id that sorts by time and that nobody else makes."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def _in_run(url: str, run_id: str) -> str:
    return url.replace("{run_id}", run_id)
