"""From an identity to a place to write: who claims, where parts go, and what raises."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from torchinstruments import enrolment
from torchinstruments.enrolment import (
    Enrolment,
    RunPlan,
    _notices,
    can_agree,
    enrol,
    raise_failure,
    try_destination,
)
from torchinstruments.errors import ConfigurationError, StorageDeniedError, StorageNotFoundError
from torchinstruments.rank_place import MAX_DIRECT_WORLD_SIZE, Destination
from torchinstruments.ranks.policy import parse_policy
from torchinstruments.ranks.rendezvous import Agreement
from torchinstruments.records import Claim, Identity
from torchinstruments.store.local_target import LocalTarget
from torchinstruments.store.spool import SpoolTarget

CLAIM = Claim(url="/x", run_id="r", generation=0, first_sample_id=0, verified=True)


def identity(rank: int = 0, world_size: int = 1) -> Identity:
    """Returns a rank that no launcher started."""
    return Identity(
        rank=rank, world_size=world_size, local_rank=rank, host="here", process=f"{rank:08x}", launcher="none"
    )


def plan(policy: object = "all") -> RunPlan:
    """Returns the settings of an ordinary run."""
    return RunPlan(
        sampling={"type": "always", "settings": {}},
        signals=("output",),
        statistics=("mean",),
        history={"buffer_rows": 8192, "window": 20},
        policy=parse_policy(policy),
    )


def enrolled(
    folder: Path, who: Identity, *, run_id: str | None = "r", policy: object = "all", observing: bool = True
) -> Enrolment:
    """Enrols into a local folder."""
    return enrol(
        who,
        Destination(str(folder), None, run_id),
        plan(policy),
        observing=observing,
        channel="0",
        timeout_s=1.0,
    )


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps spools in the test's folder."""
    monkeypatch.setenv("TORCHINSTRUMENTS_SPOOL_DIR", str(tmp_path / "spool"))
    return tmp_path / "spool"


def test_a_world_of_one_writes_straight_into_the_runs_folder(tmp_path: Path) -> None:
    """The target is direct, the copy of the history goes beside it, and nothing is noticed."""
    found = enrolled(tmp_path / "run", identity())
    assert isinstance(found.target, LocalTarget)
    assert found.copy_folder == tmp_path / "run"
    assert found.claim.verified
    assert found.claim.alone
    assert found.notices == ()
    generation = json.loads((tmp_path / "run" / "generations" / "000.json").read_text())
    assert [member["process"] for member in generation["members"]] == ["00000000"]
    assert generation["members_complete"]
    found.target.write_document("process-x.json", b"{}")
    assert (tmp_path / "run" / "process-x.json").exists()


def test_a_rank_of_several_has_its_own_folder(tmp_path: Path) -> None:
    """Rank 0 of 2 writes below rank-000."""
    found = enrolled(tmp_path / "run", identity(0, 2))
    assert found.copy_folder == tmp_path / "run" / "rank-000"


def test_rank_0_alone_uses_the_runs_folder(tmp_path: Path) -> None:
    """With rank_policy rank0 a world of two has the layout of a world of one."""
    found = enrolled(tmp_path / "run", identity(0, 2), policy="rank0")
    assert found.copy_folder == tmp_path / "run"


def test_a_world_that_shrank_to_one_keeps_its_rank_folder(tmp_path: Path) -> None:
    """Generation 1 with one rank goes on in rank-000, since the run began with two."""
    enrolled(tmp_path / "run", identity(0, 2))
    found = enrolled(tmp_path / "run", replace(identity(), process="0000000a"))
    assert found.claim.generation == 1
    assert found.copy_folder == tmp_path / "run" / "rank-000"


def test_a_larger_world_goes_through_the_spool(tmp_path: Path, spool: Path) -> None:
    """Beyond sixteen ranks a shared filesystem is spared: parts wait in the spool."""
    found = enrolled(tmp_path / "run", identity(0, MAX_DIRECT_WORLD_SIZE + 1))
    assert isinstance(found.target, SpoolTarget)
    assert Path(found.spool_path).is_relative_to(spool)
    found.target.close()


def test_a_rank_that_hears_nothing_keeps_its_rows_in_the_spool(tmp_path: Path) -> None:
    """Rank 1 without a store: unverified, one notice with the reason, nothing written to the folder."""
    found = enrolled(tmp_path / "run", identity(1, 2))
    assert not found.claim.verified
    assert isinstance(found.target, SpoolTarget)
    assert "unverified" in found.notices[0]
    assert not (tmp_path / "run").exists()
    found.target.close()


@pytest.mark.parametrize("world_size", [2, MAX_DIRECT_WORLD_SIZE + 1], ids=["direct", "spooled"])
def test_the_url_is_that_of_the_place_where_this_rank_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """The leader's folder may be on a disk that this host does not have."""
    claim = replace(CLAIM, url="/leaders/disk/run")
    agreement = Agreement(claim, leader=False, verified=True)
    monkeypatch.setattr(enrolment, "agree", lambda *_, **__: agreement)
    found = enrolled(tmp_path / "here" / "run", identity(1, world_size))
    assert found.target is not None
    assert found.url == str(tmp_path / "here" / "run")
    assert found.copy_folder == tmp_path / "here" / "run" / "rank-001"
    if isinstance(found.target, SpoolTarget):
        found.target.close()


def test_the_url_of_a_shared_folder_is_the_one_beside_another_run(tmp_path: Path) -> None:
    """The rank writes there, whether it reads that from the claim or from the folder."""
    enrolled(tmp_path / "run", identity(), run_id="other")
    for world_size in (2, MAX_DIRECT_WORLD_SIZE + 1):
        found = enrolled(tmp_path / "run", identity(0, world_size))
        assert found.target is not None
        assert found.url == found.claim.url == str(tmp_path / "run" / "run-r")
        if isinstance(found.target, SpoolTarget):
            found.target.close()


def test_a_rank_that_leads_since_no_lower_one_attached_says_why_it_waited(tmp_path: Path) -> None:
    """Nobody else says so, and what the claim has to say is said too."""
    claim = replace(CLAIM, notice="the folder is taken")
    agreement = Agreement(claim, leader=True, verified=True, waited_s=20.4)
    waited, taken = _notices(identity(1, 2), Destination(str(tmp_path), None, None), claim, agreement)
    assert "rank 1 waited 20 s for a lower rank" in waited
    assert "rank_policy" in waited
    assert taken == "the folder is taken"
    first = _notices(identity(0, 2), Destination(str(tmp_path), None, None), claim, agreement)
    assert first == ["the folder is taken"]


def test_a_rank_that_does_not_observe_has_no_target(tmp_path: Path) -> None:
    """It takes part in the claim and opens nothing."""
    found = enrolled(tmp_path / "run", identity(), observing=False)
    assert found.target is None
    assert (tmp_path / "run" / "run.json").exists()


def test_a_host_without_the_leaders_disk_gets_the_agreed_record(tmp_path: Path) -> None:
    """A folder that lacks run.json receives one with the agreed id, and the generation beside it."""
    found = enrolled(tmp_path / "run", identity())
    (tmp_path / "run" / "run.json").rename(tmp_path / "elsewhere.json")
    (tmp_path / "run" / "generations" / "000.json").unlink()
    again = enrolled(tmp_path / "run", replace(identity(), process="0000000b"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["run_id"] == found.claim.run_id
    assert again.claim.generation == 0


@pytest.mark.parametrize(
    ("asked", "run_id", "word"),
    [
        ("/data/main", None, "/data/main"),
        ("/data/run", "mine", "run_id='mine'"),
        ("/other/host/run", None, ""),
        ("/data/run", "agreed", ""),
    ],
)
def test_a_rank_that_asked_for_something_else_says_so(asked: str, run_id: str | None, word: str) -> None:
    """Another folder name or run id than the leader's is a notice; the same name on another disk is none."""
    claim = Claim(url="/data/run", run_id="agreed", generation=0, first_sample_id=0, verified=True)
    notices = _notices(
        identity(1, 2),
        Destination(asked, None, run_id),
        claim,
        Agreement(claim, leader=False, verified=True),
    )
    assert bool(notices) == bool(word)
    assert word in "".join(notices)


def test_nowhere_to_write_is_a_notice_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a spool that cannot be made either, there is no target and the notice names the variable."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TORCHINSTRUMENTS_SPOOL_DIR", str(tmp_path / "file" / "spool"))
    found = enrolled(tmp_path / "run", identity(1, 2))
    assert found.target is None
    assert "TORCHINSTRUMENTS_SPOOL_DIR" in found.notices[-1]


def test_a_failure_comes_back_in_the_claim_without_a_target(tmp_path: Path) -> None:
    """A file where the folder should be is a failure that every rank will raise."""
    (tmp_path / "file").write_text("no folder")
    found = enrolled(tmp_path / "file" / "run", identity())
    assert found.target is None
    with pytest.raises(ConfigurationError, match="file"):
        raise_failure(found.claim)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("denied", StorageDeniedError),
        ("not_found", StorageNotFoundError),
        ("configuration", ConfigurationError),
    ],
)
def test_the_kind_of_a_failure_chooses_its_error(kind: str, error: type[Exception]) -> None:
    """The sentence passes as it is."""
    with pytest.raises(error, match="the sentence"):
        raise_failure(replace(CLAIM, failure="the sentence", failure_kind=kind))


def test_a_claim_without_a_failure_raises_nothing() -> None:
    """It is what an ordinary run has."""
    assert raise_failure(CLAIM) is None


def test_trying_a_destination_leaves_no_file(tmp_path: Path) -> None:
    """A folder that can be written is made, and nothing is in it; one around {run_id} too."""
    for url in (tmp_path / "run", tmp_path / "runs" / "run-{run_id}"):
        tried = try_destination(Destination(str(url), None, None), plan(), identity())
        assert tried.failure == ""
    assert list((tmp_path / "run").iterdir()) == []
    assert list((tmp_path / "runs").iterdir()) == []


def test_trying_a_destination_finds_what_is_wrong(tmp_path: Path) -> None:
    """A file in the way is found before any rank is known."""
    (tmp_path / "file").write_text("no folder")
    tried = try_destination(Destination(str(tmp_path / "file" / "run"), None, None), plan(), identity())
    assert tried.failure_kind == "configuration"


def test_who_can_agree_now() -> None:
    """A world of one can; an unknown rank, and one of several without a store, cannot."""
    assert can_agree(identity())
    assert not can_agree(None)
    assert not can_agree(identity(0, 2))
