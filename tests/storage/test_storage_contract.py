"""One contract for every place that holds runs: a local disk, memory, a simulated and a real object store."""

import io
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchinstruments.errors import ConfigurationError, StorageNotFoundError
from torchinstruments.store.filesystem import Storage, open_storage

_REMOTE = ("memory", "cached_memory", "moto", "seaweed")


@pytest.fixture(params=["local", *_REMOTE])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    """Returns a function that opens the same new, empty place anew each time."""
    name = uuid.uuid4().hex[:12]
    if request.param == "local":
        url, options = str(tmp_path / "a run=1 %20 ü"), None
    elif request.param == "memory":
        url, options = f"memory://{name}/a run=1 %20 ü", None
    elif request.param == "cached_memory":
        url, options = f"simplecache::memory://{name}/run", {"simplecache": {"cache_storage": str(tmp_path)}}
    else:
        store = request.getfixturevalue({"moto": "moto_store"}.get(request.param, request.param))
        url, options = f"s3://{store.make_bucket(f'test-{name}')}/a run=1 %20 ü", store.storage_options

    def open_it() -> Storage:
        return open_storage(url, options)

    return open_it


@pytest.fixture
def storage(open_again: Callable[[], Storage]) -> Storage:
    """Opens a new, empty place."""
    return open_again()


def test_a_new_place_is_empty(storage: Storage) -> None:
    """Nobody has to make a folder before it is listed."""
    assert storage.list() == []
    assert storage.list("generations") == []
    assert storage.walk() == []


def test_a_missing_file_is_not_found(storage: Storage) -> None:
    """Reading what is not there raises the error that every Python program knows."""
    with pytest.raises(FileNotFoundError):
        storage.read("none.json")
    with pytest.raises(FileNotFoundError):
        storage.open_input("none.json")


def test_data_comes_back_as_it_was_written(storage: Storage, open_again: Callable[[], Storage]) -> None:
    """Bytes survive, empty ones too, under names with blanks, signs and letters from elsewhere."""
    for name, data in {
        "rank-000/a=b %41 ü+&.bin": bytes(range(256)),
        "empty": b"",
        "x.json": b"{}",
    }.items():
        storage.replace(name, data)
        assert open_again().read(name) == data


def test_replacing_leaves_the_new_data_alone(storage: Storage, open_again: Callable[[], Storage]) -> None:
    """The second writing of a file wins, even where it is shorter."""
    storage.replace("manifest.json", b"the first, longer version")
    storage.replace("manifest.json", b"second")
    assert open_again().read("manifest.json") == b"second"


@pytest.mark.parametrize("size_bytes", [0, 11, 6 * 2**20])
def test_files_replace_those_there_together(
    storage: Storage, open_again: Callable[[], Storage], tmp_path: Path, size_bytes: int
) -> None:
    """Bytes and what a local file holds come to lie there whole, in place of the old; the file stays."""
    source = tmp_path / "source.bin"
    source.write_bytes(bytes(range(256)) * (size_bytes // 256) + b"x" * (size_bytes % 256))
    for document in (b"longer", b"new"):
        storage.replace_together({"merged/comparison.parquet": source, "merged/result.json": document})
        assert open_again().read("merged/comparison.parquet") == source.read_bytes()
        assert open_again().read("merged/result.json") == document
    assert source.stat().st_size == size_bytes
    assert [entry.path for entry in open_again().walk()] == [
        "merged/comparison.parquet",
        "merged/result.json",
    ]


def test_only_the_first_creation_succeeds(storage: Storage, open_again: Callable[[], Storage]) -> None:
    """Who comes second is told so and changes nothing."""
    assert storage.create("run.json", b"first")
    assert not open_again().create("run.json", b"second")
    assert storage.read("run.json") == b"first"


def test_of_many_creators_exactly_one_wins(open_again: Callable[[], Storage]) -> None:
    """Four threads with clients of their own race for one name, over and over."""
    storages = [open_again() for _ in range(4)]
    for race in range(5):
        start = threading.Barrier(len(storages))
        won: list[int] = []

        def run(
            number: int, race: int = race, start: threading.Barrier = start, won: list[int] = won
        ) -> None:
            start.wait()
            if storages[number].create(f"race-{race}.json", f"runner {number}".encode()):
                won.append(number)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(storages))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert storages[0].read(f"race-{race}.json") == f"runner {won[0]}".encode()


def test_a_listing_shows_one_level(storage: Storage) -> None:
    """Files with their size and the store's time, folders as such, nothing from further below."""
    before = time.time()
    storage.replace("run.json", b"12345")
    storage.replace("rank-000/history.parts/part-0.parquet", b"1")
    storage.replace("rank-001/process-1.json", b"1")
    entries = {entry.path: entry for entry in storage.list()}
    assert sorted(entries) == ["rank-000", "rank-001", "run.json"]
    assert [entries[name].is_folder for name in sorted(entries)] == [True, True, False]
    assert entries["run.json"].size_bytes == 5
    modified_at = entries["run.json"].modified_at
    assert modified_at is not None
    assert abs(modified_at - before) < 3600
    assert [entry.path for entry in storage.list("rank-000")] == ["rank-000/history.parts"]
    assert storage.list("run.json") == []


def test_a_listing_of_a_prefix_shows_only_that_folder(storage: Storage) -> None:
    """A folder whose name begins like another one's is not mixed up with it."""
    storage.replace("rank-000/a", b"1")
    storage.replace("rank-0001/b", b"1")
    assert [entry.path for entry in storage.list("rank-000")] == ["rank-000/a"]
    assert [entry.path for entry in storage.child("rank-000").walk()] == ["a"]


def test_a_walk_shows_every_file_once_and_sorted(storage: Storage, open_again: Callable[[], Storage]) -> None:
    """One listing has all files below the root, without folders."""
    names = ["b", "a/c/d", "a/b", "generations/000.json"]
    for name in names:
        storage.replace(name, name.encode())
    found = open_again().walk()
    assert [entry.path for entry in found] == sorted(names)
    assert [entry.size_bytes for entry in found] == [len(name) for name in sorted(names)]
    assert not any(entry.is_folder for entry in found)


def test_listings_are_never_stale(storage: Storage, open_again: Callable[[], Storage]) -> None:
    """What another client writes shows in the next listing of one that has listed before."""
    assert storage.list() == []
    assert storage.walk() == []
    open_again().replace("late.json", b"1")
    assert [entry.path for entry in storage.list()] == ["late.json"]
    assert [entry.path for entry in storage.walk()] == ["late.json"]


def test_a_child_has_paths_of_its_own(storage: Storage) -> None:
    """The storage of a folder below begins anew, under an address that says where."""
    child = storage.child("run-abc")
    child.replace("run.json", b"1")
    assert storage.read("run-abc/run.json") == b"1"
    assert [entry.path for entry in child.walk()] == ["run.json"]
    assert child.url == f"{storage.url}/run-abc"


@pytest.mark.parametrize("size", [10, 20 * 2**20], ids=["small", "large"])
def test_an_input_reads_at_any_position(storage: Storage, size: int) -> None:
    """Small files and ones that are fetched in ranges read alike, from both ends."""
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    storage.replace("file.bin", data)
    for hint in (None, size):
        with storage.open_input("file.bin", hint) as file:
            assert file.seek(-4, io.SEEK_END) == size - 4
            assert file.read() == data[-4:]
            assert file.seek(3) == 3
            assert file.read(5) == data[3:8]
            assert file.tell() == 8
            file.seek(size // 2)
            assert file.read(1000) == data[size // 2 : size // 2 + 1000]


def test_an_input_serves_parquet(storage: Storage) -> None:
    """Arrow reads a part through it."""
    table = pa.table({"value": list(range(1000))})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    storage.replace("part.parquet", sink.getvalue().to_pybytes())
    with storage.open_input("part.parquet") as file:
        assert pq.ParquetFile(file).read().equals(table)


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "rank-000/../../outside"])
def test_a_path_cannot_leave_its_folder(storage: Storage, path: str) -> None:
    """Absolute paths and ones that climb are refused before anything is touched."""
    with pytest.raises(ValueError, match="leaves its folder"):
        storage.replace(path, b"1")


@pytest.mark.parametrize("kind", ["moto_store", "seaweed"])
def test_a_missing_bucket_is_told_from_an_empty_folder(request: pytest.FixtureRequest, kind: str) -> None:
    """Each way to read from a bucket that does not exist says that it does not."""
    store = request.getfixturevalue(kind)
    storage = open_storage("s3://no-such-bucket-here/run", store.storage_options)
    for read in (storage.list, storage.walk, lambda: storage.read("run.json")):
        with pytest.raises(StorageNotFoundError, match=r"no-such-bucket-here/run.*bucket does not exist"):
            read()


def test_an_unknown_option_is_the_callers_mistake(moto_store: object) -> None:
    """A client setting that does not exist is refused with the address."""
    storage_options = {"client_kwargs": {"no_such_setting": 1}}
    with pytest.raises(ConfigurationError, match="s3://test-bucket/run"):
        open_storage("s3://test-bucket/run", storage_options).list()
