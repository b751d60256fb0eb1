"""Workers of a dask cluster, where one machine is not enough.

A task travels as the unpickling of a file in memory. Dask shows the arguments of tasks in logs and on its
dashboard, and of such a file that is an address. And a worker that cannot import this package meets that in
the task, where it can be told, instead of in the connection to its scheduler, which it would lose.

Dask itself begins a task again whose worker died, as often as its setting
``distributed.scheduler.allowed-failures`` says.
"""

import io
import json
import pickle
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, Future
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from typing_extensions import override

from torchinstruments._version import __version__
from torchinstruments.errors import ConfigurationError, WorkerLostError

if TYPE_CHECKING:
    import distributed

__all__ = ["WORKER_WAIT_S", "DaskWorkers", "is_client", "open_client"]

WORKER_WAIT_S = 60.0
"""Seconds after which a cluster without any worker counts as one that will have none."""

_SCHEMES_WITHOUT_PORT = frozenset({"inproc", "ucx", "ws", "wss"})

_Parameters = ParamSpec("_Parameters")
_Found = TypeVar("_Found")


class _Call:
    """A call that is made where it is unpickled, and leaves there what it returns."""

    def __init__(self, function: Callable[..., object], args: object, kwargs: object) -> None:
        self._call = pickle.dumps((function, args, kwargs))
        self._version = __version__

    def __reduce__(self) -> tuple[Callable[[str, bytes], object], tuple[str, bytes]]:
        return (run_call, (self._version, self._call))


def run_call(version: str, call: bytes) -> object:
    """Makes a call (dask worker).

    Args:
        version: Of the package where the call comes from.
        call: Function and arguments, pickled.

    Raises:
        ConfigurationError: The package has another version here.
    """
    if version != __version__:
        raise ConfigurationError(
            f"a dask worker has torchinstruments {__version__}, and this process {version}; install the same "
            f"version in the environment of the workers"
        )
    function, args, kwargs = pickle.loads(call)  # noqa: S301 - made by the process that merges
    return function(*args, **kwargs)


class DaskWorkers(Executor):
    """Runs tasks on a dask cluster (offline).

    Args:
        client: Of the cluster; it stays open.

    Raises:
        ConfigurationError: The cluster has no worker.
    """

    def __init__(self, client: "distributed.Client") -> None:
        self._client = client
        self._prefix = f"torchinstruments-{uuid.uuid4().hex[:12]}"
        self._numbers = count()
        self._waiting: set[distributed.Future[object]] = set()
        try:
            client.wait_for_workers(1, timeout=WORKER_WAIT_S)
        except TimeoutError:
            raise ConfigurationError(
                f"the dask cluster had no worker for {WORKER_WAIT_S:.0f} s; start some, or use processes"
            ) from None

    @override
    def submit(
        self, fn: Callable[_Parameters, _Found], /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> Future[_Found]:
        """Queues a task."""
        sealed = io.BytesIO(pickle.dumps(_Call(fn, args, kwargs)))
        key = f"{self._prefix}-{next(self._numbers)}"
        # A task asks a store that does not answer often enough by itself: only lost workers are retried.
        remote = self._client.submit(pickle.load, sealed, key=key, pure=False, retries=0)
        self._waiting.add(remote)
        found: Future[Any] = Future()
        found.add_done_callback(lambda done: self._release(remote, done))
        loop = self._client.loop
        assert loop is not None, "a client that is open has one"
        loop.add_callback(_pass_on, remote, found)
        return found

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Forgets what the cluster has not done; the client stays open."""
        waiting, self._waiting = self._waiting, set()
        if waiting and cancel_futures:
            self._client.cancel(list(waiting), force=True)

    def _release(self, remote: "distributed.Future[object]", done: Future[object]) -> None:
        self._waiting.discard(remote)
        if done.cancelled():
            remote.cancel()
        remote.release()


async def _pass_on(remote: Any, found: Future[object]) -> None:
    """Hands on what a task came to (the client's event loop)."""
    result: Any = await remote._result(raiseit=False)  # noqa: SLF001 - as dask's own executor does
    if found.done():
        return
    if remote.status == "finished":
        found.set_result(result)
    elif remote.status == "cancelled":
        found.set_exception(WorkerLostError("the dask scheduler gave the task up, or was lost"))
    else:
        error = result[1]
        found.set_exception(_explained(error))


def _explained(error: BaseException) -> BaseException:
    from distributed import KilledWorker

    if isinstance(error, KilledWorker):
        lost = WorkerLostError(
            f"{error.allowed_failures + 1} dask workers died over one task, the last one at "
            f"{error.last_worker.address}; where memory ran out, give the workers more"
        )
        lost.__cause__ = error
        return lost
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "torchinstruments":
        missing = ConfigurationError(
            f"a dask worker has no torchinstruments, or another version; install {__version__} in the "
            f"environment of the workers"
        )
        missing.__cause__ = error
        return missing
    return error


def is_client(value: object) -> bool:
    """Whether this is a client of a dask cluster; dask is not imported for it."""
    if type(value).__module__.partition(".")[0] != "distributed":
        return False
    from distributed import Client

    return isinstance(value, Client)


def open_client(address: str | None = None, scheduler_file: str | None = None) -> "distributed.Client":
    """Connects to a dask scheduler.

    Args:
        address: Of the scheduler, ``tcp://host:8786``; None for the one that dask is configured for.
        scheduler_file: File in which the scheduler wrote its address.

    Raises:
        ConfigurationError: The extra is not installed, there is no scheduler, or it does not answer.
    """
    try:
        import dask

        from distributed import Client
    except ImportError:
        raise ConfigurationError(
            "executor 'dask' needs dask.distributed; install it with: pip install distributed"
        ) from None
    if scheduler_file is not None:
        address = _address_in(scheduler_file)
    if address is None:
        address = dask.config.get("scheduler-address", None)
    if address is None:
        raise ConfigurationError(
            "executor 'dask' knows no scheduler; give --scheduler ADDRESS or --scheduler-file FILE, set "
            "DASK_SCHEDULER_ADDRESS, or in Python pass a distributed.Client; on one machine use processes"
        )
    _require_host_and_port(address)
    try:
        return Client(address, set_as_default=False, timeout="30s")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the dask scheduler at {address} could not be reached ({error}); check the address, and that "
            f"both sides have the same version of distributed"
        ) from error


def _address_in(scheduler_file: str) -> str:
    """Returns the address in a scheduler's file; a client that is given the file waits for it without end."""
    way_out = "give the file that `dask scheduler --scheduler-file` wrote, once it is there"
    try:
        found = json.loads(Path(scheduler_file).read_bytes())
    except OSError as error:
        why = error.strerror or error
        raise ConfigurationError(f"the file {scheduler_file} cannot be read ({why}); {way_out}") from error
    except ValueError:
        found = None
    address = found.get("address") if isinstance(found, dict) else None
    if not isinstance(address, str):
        raise ConfigurationError(f"the file {scheduler_file} names no dask scheduler; {way_out}")
    return address


def _require_host_and_port(address: str) -> None:
    """Refuses what is no address; a client that is given it leaves a thread that never ends."""
    from distributed.comm.addressing import get_address_host_port, parse_address

    try:
        if parse_address(address)[0] not in _SCHEMES_WITHOUT_PORT:
            get_address_host_port(address)
    except ValueError as error:
        raise ConfigurationError(
            f"{address!r} is no address of a dask scheduler ({error}); give one such as tcp://host:8786"
        ) from None
