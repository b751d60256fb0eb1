"""What a storage makes of a store that fails: the package's own errors, in bounded time, without secrets."""

import errno
from collections.abc import Callable

import pytest

from torchinstruments.errors import StorageDeniedError, StorageError, StorageUnreachableError
from torchinstruments.store.filesystem import Storage, open_storage
from torchinstruments.testing.fault_proxy import FaultProxy


@pytest.fixture
def storage(bucket: str, proxied: Callable[..., dict[str, object]]) -> Storage:
    """Opens a new bucket through the proxy, with short bounds."""
    return open_storage(f"s3://{bucket}/run", proxied(), timeout_s=2.0)


def _calls(storage: Storage) -> dict[str, Callable[[], object]]:
    def read() -> object:
        return storage.read("x")

    def replace() -> object:
        return storage.replace("x", b"1")

    def create() -> object:
        return storage.create("x", b"1")

    return {"read": read, "replace": replace, "create": create, "list": storage.list, "walk": storage.walk}


@pytest.mark.parametrize(
    ("code", "error", "expected"),
    [
        (500, "InternalError", StorageUnreachableError),
        (403, "ExpiredToken", StorageDeniedError),
        (403, "AccessDenied", StorageDeniedError),
        (400, "TokenRefreshRequired", StorageDeniedError),
        (507, "InsufficientStorage", StorageError),
    ],
)
def test_each_answer_has_its_meaning(
    storage: Storage, fault_proxy: FaultProxy, code: int, error: str, expected: type[Exception]
) -> None:
    """What may pass, and what is refused, are told apart in every call."""
    fault_proxy.status(code, error)
    for call in _calls(storage).values():
        with pytest.raises(expected) as caught:
            call()
        assert storage.url in str(caught.value)


@pytest.mark.parametrize("operation", ["read", "replace", "create", "list", "walk"])
def test_a_store_that_is_busy_or_silent_is_unreachable(
    storage: Storage, fault_proxy: FaultProxy, operation: str
) -> None:
    """Every call has a bound, a put above all, and ends in the same error."""
    fault_proxy.status(503, "SlowDown")
    with pytest.raises(StorageUnreachableError):
        _calls(storage)[operation]()
    fault_proxy.clear()
    fault_proxy.stall()
    with pytest.raises(StorageUnreachableError):
        _calls(storage)[operation]()


def test_after_a_stall_the_same_client_works(storage: Storage, fault_proxy: FaultProxy) -> None:
    """Nothing has to be opened anew once the store answers again."""
    fault_proxy.stall(method="PUT", times=1)
    with pytest.raises(StorageUnreachableError):
        storage.replace("x", b"1")
    storage.replace("x", b"2")
    assert storage.read("x") == b"2"


def test_refused_connections_are_unreachable_until_they_are_not(
    storage: Storage, fault_proxy: FaultProxy
) -> None:
    """A store that is down and comes back is used again."""
    fault_proxy.down()
    with pytest.raises(StorageUnreachableError):
        storage.replace("x", b"1")
    fault_proxy.up()
    storage.replace("x", b"2")
    assert storage.read("x") == b"2"


def test_a_lost_answer_to_a_creation_is_settled_by_looking(storage: Storage, fault_proxy: FaultProxy) -> None:
    """The repeated request is refused by the caller's own file, which counts as the caller's."""
    fault_proxy.drop_response(method="PUT", times=1)
    assert storage.create("run.json", b"mine")
    assert not storage.create("run.json", b"somebody else's")
    assert [entry.action for entry in fault_proxy.log].count("drop_response") == 1


def test_an_answer_that_is_cut_short_is_never_taken_for_whole(
    storage: Storage, fault_proxy: FaultProxy
) -> None:
    """A reader gets all bytes or an error."""
    data = bytes(range(256)) * 400
    storage.replace("part", data)
    fault_proxy.truncate(2000, method="GET", times=1)
    assert storage.read("part") == data
    fault_proxy.truncate(2000, method="GET")
    with pytest.raises(StorageUnreachableError):
        storage.read("part")


def test_data_is_one_put_whatever_its_size(storage: Storage, fault_proxy: FaultProxy) -> None:
    """Twelve mebibytes go up as one object with one request, never as the parts of an upload."""
    storage.replace("large", b"x" * (12 * 2**20))
    assert [entry.method for entry in fault_proxy.log] == ["PUT"]


def test_a_refusal_is_no_plain_os_error_number(storage: Storage, fault_proxy: FaultProxy) -> None:
    """A full disk of the caller's cannot be mistaken for a store's refusal."""
    fault_proxy.status(503, "SlowDown")
    with pytest.raises(StorageUnreachableError) as caught:
        storage.replace("x", b"1")
    assert caught.value.errno != errno.ENOSPC
