"""Identity and agreement on real ranks: every rank attaches in a process of its own."""

import json
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from torchinstruments.ranks.identity import discover
from torchinstruments.ranks.rendezvous import Agreement, Timing, agree, connect, kept_run_id
from torchinstruments.records import Claim, Identity

QUICK = Timing(leader_grace_s=1.0, watch_s=1.0, heartbeat_s=0.1, members_after_s=2.0)


def _identity(process: str) -> Identity:
    identity = discover(process)
    assert identity is not None
    return identity


def _claim() -> Claim:
    return Claim("/runs/a", "a", 3, 3 * 10**9, verified=True)


def _fallback() -> Claim:
    return Claim("/runs/a", "a", 0, 0, verified=False)


def _forbidden() -> Claim:
    raise AssertionError("this rank must not claim")


def _who() -> tuple[int, int, int, str]:
    identity = _identity("0a0a0a0a")
    return identity.rank, identity.world_size, identity.local_rank, identity.launcher


def _meet(channel: str, rank: int, ranks: list[int]) -> None:
    """Waits until all these ranks came here, without the absent one."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{channel}/met/{rank}", "")
    store.wait([f"{channel}/met/{one}" for one in ranks])


def _agree(
    channel: str, late_rank: int | None = None, absent_rank: int | None = None
) -> tuple[str, int, bool, bool]:
    """Agrees beside a running collective; a rank can be late, or never come."""
    rank = dist.get_rank()
    if rank == absent_rank:
        return "", -1, False, False
    if rank == late_rank:
        time.sleep(1.0)
    identity = _identity(f"{rank:08x}")
    leads = rank == (1 if absent_rank == 0 else 0)
    agreed: Agreement = agree(
        identity,
        True,
        _claim if leads else _forbidden,
        store=connect(identity),
        fallback=_fallback,
        timeout_s=20.0,
        channel=channel,
        timing=QUICK,
    )
    if absent_rank is None:
        dist.all_reduce(torch.ones(1))
    else:
        _meet(channel, rank, [one for one in range(dist.get_world_size()) if one != absent_rank])
    if agreed.service is not None:
        agreed.service.stop(5.0)
    return agreed.claim.run_id, agreed.claim.generation, agreed.leader, agreed.verified


def _kept(channel: str, own: str) -> str:
    identity = _identity("0a0a0a0a")
    kept = kept_run_id(connect(identity), channel, own.upper)
    dist.barrier()
    return kept


def test_an_initialised_group_says_who_a_rank_is(rank_pool):
    """The launcher is still named, whose variables say the same."""
    assert rank_pool.run(_who) == [(0, 2, 0, "torchrun"), (1, 2, 1, "torchrun")]


def test_all_ranks_agree_over_a_clone_of_the_groups_store(rank_pool):
    """Twice, since the keys of the first time are still there and their processes have other ids."""
    for channel in ("0", "1"):
        assert rank_pool.run(_agree, channel) == [("a", 3, True, True), ("a", 3, False, True)]


def test_a_rank_that_attaches_late_is_answered_from_the_background(three_ranks):
    """While the leader is in a collective that waits for that very rank."""
    assert three_ranks.run(_agree, "0", late_rank=2) == [
        ("a", 3, True, True),
        ("a", 3, False, True),
        ("a", 3, False, True),
    ]


def test_the_lowest_rank_that_attaches_leads(three_ranks):
    """Rank 0 never does."""
    assert three_ranks.run(_agree, "1", absent_rank=0) == [
        ("", -1, False, False),
        ("a", 3, True, True),
        ("a", 3, False, True),
    ]


def test_a_run_id_is_kept_in_the_groups_store(rank_pool):
    """The first one that was made is everybody's."""
    first = rank_pool.run(_kept, "kept", "made")
    assert first == ["MADE", "MADE"]
    assert rank_pool.run(_kept, "kept", "other") == first


RESTARTED = """
import json, os, pathlib, sys
from torchinstruments.ranks.identity import discover, new_process_id
from torchinstruments.ranks.rendezvous import agree, connect, kept_run_id
from torchinstruments.records import Claim

folder = pathlib.Path(sys.argv[1])
identity = discover(new_process_id())
store = connect(identity)

def claim():
    generation = len(list(folder.glob("claim-*")))
    (folder / f"claim-{generation}").touch()
    run_id = kept_run_id(store, "0", lambda: f"made-by-{identity.process}")
    return Claim("/runs/a", run_id, generation, generation, verified=True)

def told(members, complete):
    (folder / f"members-{agreed.claim.generation}").write_text(json.dumps([len(members), complete]))

agreed = agree(identity, True, claim, store=store, fallback=claim, timeout_s=30.0, on_members=told)
if agreed.service is not None:
    agreed.service.wait_until_complete(30.0)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
result = [agreed.claim.run_id, agreed.claim.generation, agreed.verified, identity.launcher]
(folder / f"result-{attempt}-{identity.rank}").write_text(json.dumps(result))
sys.exit(1 if attempt == "0" and identity.rank == 1 else 0)
"""


def test_under_torchrun_ranks_agree_before_any_group_and_anew_after_a_restart(tmp_path):
    """The agent's store keeps the run id, and all the keys of the dead generation, which nobody believes."""
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    address = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run([*command, *address, script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("result-*")}
    run_id = results["result-0-0"][0]
    assert run_id.startswith("made-by-")
    assert results == {
        f"result-{attempt}-{rank}": [run_id, attempt, True, "torchrun"]
        for attempt in (0, 1)
        for rank in (0, 1)
    }
    for generation in (0, 1):
        assert json.loads((tmp_path / f"members-{generation}").read_text()) == [2, True]
