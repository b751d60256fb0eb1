"""Where the tasks of a merge run, and what becomes of workers that die and of merges that are cancelled."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from merge.dying import Order, divided, linger, obey, refuse
from merge.run_folder import whole_rank, whole_run
from torchinstruments.cli.main import main
from torchinstruments.errors import ConfigurationError, StorageUnreachableError, WorkerLostError
from torchinstruments.merge import dask_workers
from torchinstruments.merge.dask_workers import DaskWorkers
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.executors import workers_for
from torchinstruments.merge.mapping import in_order
from torchinstruments.merge.process_workers import MAX_TRIES, ProcessWorkers
from torchinstruments.merge.reading import read_rank

SECRET = "s3cr3t-in-the-options"


@pytest.fixture(scope="module")
def processes() -> Generator[ProcessWorkers]:
    """Two worker processes for all tests of this file."""
    workers = ProcessWorkers(2)
    yield workers
    workers.shutdown()


@contextlib.contextmanager
def local_cluster(num_workers: int) -> Generator[Any]:
    """Dask worker processes on the loopback device."""
    import dask

    from distributed import LocalCluster

    settings = {
        "distributed.scheduler.allowed-failures": 1,
        "distributed.worker.multiprocessing-method": "spawn",
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=num_workers,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
            silence_logs=False,
        ) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def cluster() -> Generator[Any]:
    """A client of two dask workers."""
    from distributed import Client

    with local_cluster(2) as started, Client(started, set_as_default=False) as client:
        tests = str(Path(__file__).parents[1])
        client.run(sys.path.insert, 0, tests)
        yield client


@pytest.fixture
def dask_executor(cluster: Any) -> Generator[DaskWorkers]:
    """The cluster as an executor."""
    workers = DaskWorkers(cluster)
    yield workers
    workers.shutdown(cancel_futures=True)


def merged_bytes(folder: Path) -> dict[str, bytes]:
    """Everything in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def wait_for(found: Callable[[], bool], within_s: float = 60.0) -> None:
    """Waits until something is so."""
    until = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def noting(seen: list[tuple[int, int]]) -> Callable[[int, int], None]:
    """Returns a progress that keeps what it is told."""

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    return note


def test_processes_and_a_cluster_give_the_bytes_of_threads(
    tmp_path: Path, processes: ProcessWorkers, cluster: Any
) -> None:
    """Threads, processes and a dask cluster write the same bytes, and progress comes in order from all."""
    run = whole_run(tmp_path / "run", 5)
    run.history(3, [{"sample_id": 4, "metric": "nonfinite_fraction", "value": 0.5}], "0000000d", 1)
    for rank in range(5):
        run.steps(rank, [{"attempt": one, "scale_before": float(rank == 2)} for one in range(6)])
        run.fingerprints(rank, [{"attempt": one, "digest": 7 + (rank == 4)} for one in range(6)])
    found = {}
    for name, executor in (("threads", None), ("processes", processes), ("dask", cluster)):
        seen: list[tuple[int, int]] = []
        merge_run(
            run.url,
            output=str(tmp_path / name),
            executor=executor,
            progress=noting(seen),
        )
        found[name] = merged_bytes(tmp_path / name)
        assert seen == [(done, 5) for done in range(1, 6)]
    assert found["processes"] == found["threads"]
    assert found["dask"] == found["threads"]
    assert b'"first_nonfinite"' in found["dask"]["result.json"]


def test_names_of_executors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors are chosen by name; an unknown one, and dask without a scheduler, say what can be given."""
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    run = whole_run(tmp_path / "run")
    assert merge_run(run.url, executor="threads").complete
    with workers_for("processes") as workers:
        assert isinstance(workers, ProcessWorkers)
    with pytest.raises(ConfigurationError, match=r"'fibers'.*'processes'"):
        merge_run(run.url, executor="fibers")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="DASK_SCHEDULER_ADDRESS"):
        merge_run(run.url, executor="dask")


def test_a_process_that_dies_is_replaced(tmp_path: Path, processes: ProcessWorkers) -> None:
    """A task whose worker died is begun again in a new process; the other tasks run once."""
    orders = [Order(rank, tmp_path, deaths=MAX_TRIES - 1 if rank == 1 else 0) for rank in range(6)]
    assert list(in_order(processes, obey, orders)) == [0, 10, 20, 30, 40, 50]
    assert [order.tries() for order in orders] == [1, MAX_TRIES, 1, 1, 1, 1]


def test_a_task_that_kills_every_process_is_given_up(tmp_path: Path, processes: ProcessWorkers) -> None:
    """After some deaths the merge ends with an error that names the rank; the workers live on."""
    orders = [Order(rank, tmp_path, deaths=99 if rank == 2 else 0) for rank in range(4)]
    with pytest.raises(WorkerLostError, match=r"^rank 2 could not be read: .* died 3 times") as caught:
        list(in_order(processes, obey, orders))
    assert set(caught.value.failures) == {2}
    assert orders[2].tries() == MAX_TRIES
    assert list(in_order(processes, obey, [Order(7, tmp_path)])) == [70]


def test_a_store_that_does_not_answer_is_no_lost_worker(
    tmp_path: Path, processes: ProcessWorkers, dask_executor: DaskWorkers
) -> None:
    """What a task raises is raised once, with the ranks that failed; nothing is begun again."""
    for number, executor in enumerate((processes, dask_executor)):
        folder = tmp_path / str(number)
        folder.mkdir()
        order = Order(3, folder)
        with pytest.raises(StorageUnreachableError, match="rank 3") as caught:
            list(in_order(executor, refuse, [order]))
        assert caught.value.failures == {3: "no answer for rank 3"}
        assert order.tries() == 1


def test_an_executor_of_the_caller_that_breaks_ends_the_merge(tmp_path: Path) -> None:
    """A pool of the caller whose process dies cannot be used again: the error says so and names the rank."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(WorkerLostError, match="rank 5 was read") as caught:
            list(in_order(pool, obey, [Order(5, tmp_path, deaths=1)]))
    assert set(caught.value.failures) == {5}


def test_a_dask_worker_that_dies_is_replaced(tmp_path: Path, dask_executor: DaskWorkers) -> None:
    """Dask begins a task again elsewhere as often as it is set to; after that the error names the rank."""
    once, always = Order(1, tmp_path, deaths=1), Order(2, tmp_path, deaths=99)
    assert list(in_order(dask_executor, obey, [once])) == [10]
    assert once.tries() == 2
    with pytest.raises(WorkerLostError, match=r"^rank 2 could not be read: 2 dask workers died") as caught:
        list(in_order(dask_executor, obey, [always]))
    assert set(caught.value.failures) == {2}
    assert always.tries() == 2


def test_workers_of_another_version_are_refused(
    dask_executor: DaskWorkers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker with another version of the package says both, and what to do."""
    monkeypatch.setattr(dask_workers, "__version__", "0.0.0+elsewhere")
    with pytest.raises(
        ConfigurationError, match=r"this process 0\.0\.0\+elsewhere; install the same version"
    ):
        list(in_order(dask_executor, obey, [Order(0, tmp_path)]))


def test_workers_without_the_package_get_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker that cannot import the package is told apart from a broken task, on the command line too."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torchinstruments':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = whole_run(tmp_path / "run")
    with local_cluster(1) as cluster:
        assert main(["merge", run.url, "--scheduler", cluster.scheduler_address]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("torchinstruments:")]
    assert len(errors) == 1
    assert "a dask worker has no torchinstruments, or another version; install" in errors[0]
    assert not (run.root / "merged").exists()


def test_the_command_line_merges_on_a_cluster(
    tmp_path: Path, cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scheduler is named by address or file; contradictions get one sentence."""
    run = whole_run(tmp_path / "run", 3)
    file = tmp_path / "scheduler.json"
    address = cluster.scheduler.address
    # As `Client.write_scheduler_file` has it, without metrics, whose keys are no JSON once a task failed.
    file.write_text(json.dumps({"type": "Scheduler", "address": address}))
    assert main(["merge", run.url, "--output", str(tmp_path / "a"), "--scheduler", address]) == 0
    named = ["--executor", "dask", "--scheduler-file", str(file)]
    assert main(["merge", run.url, "--output", str(tmp_path / "b"), *named]) == 0
    assert main(["merge", run.url, "--output", str(tmp_path / "c")]) == 0
    assert merged_bytes(tmp_path / "a") == merged_bytes(tmp_path / "b") == merged_bytes(tmp_path / "c")
    capsys.readouterr()
    for arguments, sentence in (
        (["--scheduler", address, "--scheduler-file", str(file)], "give one of them"),
        (["--executor", "processes", "--scheduler", address], "--executor processes has no scheduler"),
    ):
        assert main(["merge", run.url, *arguments]) == 2
        assert sentence in capsys.readouterr().err


def test_secrets_stay_out_of_what_dask_shows(
    tmp_path: Path, cluster: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Options of a store are in no key, representation or log of a task, also where it fails."""
    from torchinstruments.merge.plan import plan_merge

    run = whole_run(tmp_path / "run")
    plan = plan_merge([run.url], {"secret": SECRET}, None)
    executor = DaskWorkers(cluster)
    shown: list[str] = []
    submit = cluster.submit

    def noting(function: Any, *args: Any, **settings: Any) -> Any:
        shown.append(f"{function!r} {args!r} {settings!r}")
        return submit(function, *args, **settings)

    cluster.submit = noting
    try:
        reading = executor.submit(read_rank, plan.tasks[0]).result()
        with pytest.raises(ZeroDivisionError):
            executor.submit(divided, plan.tasks[0]).result()
    finally:
        cluster.submit = submit
    assert reading.rank == 0
    assert len(shown) == 2
    assert SECRET in str(pickle.loads(pickle.dumps(plan.tasks[0])).sources[0].storage_options)
    logs = [str(cluster.get_scheduler_logs()), str(cluster.get_worker_logs()), caplog.text]
    captured = capfd.readouterr()
    assert "Compute Failed" in captured.err + captured.out + "".join(logs)
    for text in (*shown, *logs, captured.out, captured.err, repr(plan.tasks[0])):
        assert SECRET not in text


class StopError(Exception):
    """What a caller's progress raises."""


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_a_merge_that_is_cancelled_leaves_the_result_of_before(tmp_path: Path, executor: Any) -> None:
    """An exception of progress passes through; result and tables are those of the merge before."""
    run = whole_run(tmp_path / "run", 3)
    merge_run(run.url)
    before = merged_bytes(run.root / "merged")
    run.history(0, [{"sample_id": 9, "value": 1e9}], "0000000a", 1)

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise StopError

    with pytest.raises(StopError):
        merge_run(run.url, progress=stop, executor=executor)
    assert merged_bytes(run.root / "merged") == before
    merge_run(run.url)
    assert merged_bytes(run.root / "merged") != before


def test_a_cancelled_merge_asks_nothing_more_of_the_callers_executor(tmp_path: Path) -> None:
    """An executor that stays open is left with no task of a merge that ended."""
    folder = tmp_path / "tries"
    folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        found = in_order(pool, obey, [Order(rank, folder) for rank in range(200)])
        next(found)
        found.close()
        pool.submit(int).result()
        begun = len(list(folder.iterdir()))
        pool.submit(int).result()
        assert len(list(folder.iterdir())) == begun < 64


def test_ending_the_workers_ends_their_processes(tmp_path: Path) -> None:
    """Workers that are busy for minutes are gone at once when a merge is cancelled."""
    workers = ProcessWorkers(2)
    found = in_order(workers, linger, [Order(rank, tmp_path) for rank in range(2)])

    def pids() -> list[int]:
        return [int(path.name.partition("-")[2]) for path in tmp_path.iterdir()]

    with ThreadPoolExecutor(1) as waiter:
        waiting = waiter.submit(next, found)
        wait_for(lambda: len(pids()) == 2)
        workers.end()
        with pytest.raises(WorkerLostError):
            waiting.result()
    assert not [pid for pid in pids() if is_running(pid)]


def children_of(pid: int) -> list[int]:
    """The processes that a process began and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_merge_that_is_told_to_stop_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """SIGTERM and Ctrl-C end the command with its processes; the result of before stays as the only one."""
    run = whole_run(tmp_path / "run", 2)
    merge_run(run.url)
    before = merged_bytes(run.root / "merged")
    # Spawned workers import the script under another name: they are held up in their first file.
    slow = (
        "import os, sys, time\n"
        "from torchinstruments.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main(sys.argv[1:]))\n"
        "else:\n"
        "    from torchinstruments.store.local import LocalStorage\n"
        "    def hold(self, path):\n"
        "        open(os.environ['HELD'], 'w').close()\n"
        "        time.sleep(300)\n"
        "    LocalStorage.read = hold\n"
    )
    script, held = tmp_path / "command.py", tmp_path / "held"
    script.write_text(slow)
    command = subprocess.Popen(
        [sys.executable, str(script), "merge", run.url, "--executor", "processes"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "HELD": str(held)},
    )
    wait_for(held.exists)
    workers = children_of(command.pid)
    assert workers
    # Ctrl-C reaches the whole group, SIGTERM the one process.
    os.killpg(command.pid, number) if number == signal.SIGINT else command.send_signal(number)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == code
    assert "Traceback" not in errors
    # What multiprocessing itself begins ends a moment later.
    wait_for(lambda: not [pid for pid in workers if is_running(pid)])
    assert merged_bytes(run.root / "merged") == before


def test_workers_end_with_the_process_that_began_them(tmp_path: Path) -> None:
    """A merge that is killed leaves no worker behind."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from merge.dying import Order, linger\n"
        "from torchinstruments.merge.mapping import in_order\n"
        "from torchinstruments.merge.process_workers import ProcessWorkers\n"
        "list(in_order(ProcessWorkers(1), linger, [Order(0, Path(sys.argv[1]))]))\n"
    )
    tests = str(Path(__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": tests}
    )
    wait_for(lambda: bool(list(tmp_path.iterdir())))
    pid = int(next(tmp_path.iterdir()).name.partition("-")[2])
    process.kill()
    process.wait()
    wait_for(lambda: not is_running(pid))


def test_ctrl_c_while_files_are_replaced_comes_after_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result is replaced with all its tables or not at all."""
    run = whole_run(tmp_path / "run", 2)
    merge_run(run.url)
    before = merged_bytes(run.root / "merged")
    whole_rank(run, 1, 9)
    replace = os.replace
    replaced: list[str] = []

    def interrupted(source: str, target: str) -> None:
        if not replaced:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        replace(source, target)
        replaced.append(os.path.basename(target))

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge_run(run.url)
    assert replaced[-1] == "result.json"
    assert sorted(replaced) == sorted(after := merged_bytes(run.root / "merged"))
    assert all(after[name] != before[name] for name in ("result.json", "summary.parquet"))
