"""The claim of a remote folder, in a process of its own, on a real object store and through faults."""

import threading
import uuid
from collections.abc import Callable

import pytest

from storage.spooling import make_run
from torchinstruments.records import Claim
from torchinstruments.store.claim import ClaimRequest, claim_in_child, claim_run
from torchinstruments.store.documents import decode_run
from torchinstruments.store.filesystem import Storage, open_storage
from torchinstruments.testing.fault_proxy import FaultProxy
from torchinstruments.testing.object_store import ObjectStore


def _request(run_id: str = "night-7") -> ClaimRequest:
    return ClaimRequest(
        run=make_run(run_id), world_size=2, leader_process=uuid.uuid4().hex[:8], started_at=""
    )


def test_a_bucket_is_claimed_joined_and_shared(seaweed: ObjectStore, bucket: str) -> None:
    """A new folder, the same run again and another run: as on a local disk."""
    url = f"s3://{bucket}/run"
    request = _request()
    first = claim_in_child(url, seaweed.storage_options, request)
    second = claim_in_child(url, seaweed.storage_options, _request())
    other = claim_in_child(url, seaweed.storage_options, _request("other"))
    assert first == Claim(url, "night-7", 0, 0, verified=True)
    assert second == Claim(url, "night-7", 1, 10**9, verified=True)
    assert (other.url, other.generation, other.verified) == (f"{url}/run-other", 0, True)
    stored = decode_run(open_storage(url, seaweed.storage_options).read("run.json"))
    assert stored == request.run


def test_credentials_may_come_from_the_environment(
    seaweed: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without options the child finds endpoint and keys where every S3 client does."""
    for name, value in seaweed.env.items():
        monkeypatch.setenv(name, value)
    assert claim_in_child(f"s3://{bucket}/run", None, _request()).verified


def test_wrong_credentials_are_a_failure_without_the_secret(seaweed: ObjectStore, bucket: str) -> None:
    """The sentence says what was refused and what to check, and repeats no secret."""
    options = {**seaweed.storage_options, "secret": "not-the-secret-at-all"}
    claim = claim_in_child(f"s3://{bucket}/run", options, _request())
    assert (claim.failure_kind, claim.verified) == ("denied", False)
    assert f"s3://{bucket}/run" in claim.failure
    assert "credentials" in claim.failure
    assert "not-the-secret-at-all" not in claim.failure


def test_no_credentials_at_all_are_a_failure(
    seaweed: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no key is to be found anywhere the sentence says so."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = {"client_kwargs": seaweed.storage_options["client_kwargs"]}
    claim = claim_in_child(f"s3://{bucket}/run", options, _request())
    assert claim.failure_kind == "denied"
    assert "NoCredentialsError" in claim.failure


def test_a_missing_bucket_is_a_failure_and_is_not_made(seaweed: ObjectStore) -> None:
    """Nobody's typing error turns into a new bucket."""
    claim = claim_in_child("s3://no-such-bucket-at-all/run", seaweed.storage_options, _request())
    assert claim.failure_kind == "not_found"
    assert "s3://no-such-bucket-at-all/run" in claim.failure
    again = claim_in_child("s3://no-such-bucket-at-all/run", seaweed.storage_options, _request())
    assert again.failure_kind == "not_found"


def test_a_store_that_is_down_leaves_the_claim_unverified(
    bucket: str, fault_proxy: FaultProxy, proxied: Callable[..., dict[str, object]]
) -> None:
    """Refused connections are nobody's mistake."""
    fault_proxy.down()
    claim = claim_in_child(f"s3://{bucket}/run", proxied(), _request())
    assert (claim.failure, claim.verified) == ("", False)
    assert f"s3://{bucket}/run" in claim.notice


def test_a_store_that_stalls_is_given_up_in_time(
    bucket: str, fault_proxy: FaultProxy, proxied: Callable[..., dict[str, object]]
) -> None:
    """A put that is never answered does not hold the start of a training up for ever."""
    fault_proxy.stall(method="PUT")
    claim = claim_in_child(f"s3://{bucket}/run", proxied(), _request(), timeout_s=9.0)
    assert (claim.failure, claim.verified) == ("", False)


def test_a_claim_whose_answer_was_lost_is_known_again(
    bucket: str, fault_proxy: FaultProxy, proxied: Callable[..., dict[str, object]]
) -> None:
    """The store carried the creation out, the answer never came: the leader recognises its own nonce."""
    fault_proxy.drop_response(method="PUT", path="run.json", times=1)
    fault_proxy.drop_response(method="PUT", path="generations", times=1)
    claim = claim_in_child(f"s3://{bucket}/run", proxied(), _request())
    assert claim == Claim(f"s3://{bucket}/run", "night-7", 0, 0, verified=True)


def test_of_many_leaders_one_run_has_the_folder(seaweed: ObjectStore, bucket: str) -> None:
    """Four runs that race for one folder of a bucket end in four folders, one of them that one."""
    storages = [open_storage(f"s3://{bucket}", seaweed.storage_options) for _ in range(4)]
    for race in range(3):
        url = f"s3://{bucket}/race-{race}"
        claims = _race([storage.child(f"race-{race}") for storage in storages])
        assert [claim.url for claim in claims].count(url) == 1
        assert len({claim.url for claim in claims}) == 4
        assert all(claim.verified for claim in claims)


def _race(storages: list[Storage]) -> list[Claim]:
    start = threading.Barrier(len(storages))
    claims: list[Claim] = []

    def run(number: int) -> None:
        start.wait()
        claims.append(claim_run(storages[number], _request(f"run{number}")))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(storages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return claims
