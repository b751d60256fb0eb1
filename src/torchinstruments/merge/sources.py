"""The folders of a run, in a form that travels to another thread, process or machine.

An open store holds sockets and locks and does not travel; what it was opened with does. A worker opens a
folder once for all ranks of a merge that it is given.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchinstruments.store.filesystem import Storage, open_storage

__all__ = ["Source", "close_sources", "opened"]

_MAX_OPEN = 256
_open: "OrderedDict[tuple[str, int], Storage]" = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Source:
    """One folder of a run.

    Attributes:
        url: As the user gave it, secrets included; show `Storage.url` instead.
        storage_options: In fsspec's dialect, secrets included.
        token: Differs between merges, so that a worker never serves one merge with another one's credentials.
        number: Differs between the folders of a merge.
    """

    url: str = field(repr=False)
    storage_options: Mapping[str, object] | None = field(repr=False)
    token: str
    number: int


def opened(source: Source) -> Storage:
    """Returns the store of a folder, opened at most once in this process as long as it is in use."""
    key = (source.token, source.number)
    with _lock:
        storage = _open.get(key)
        if storage is None:
            options = None if source.storage_options is None else dict(source.storage_options)
            storage = _open[key] = open_storage(source.url, options)
            while len(_open) > _MAX_OPEN:
                _open.popitem(last=False)
        _open.move_to_end(key)
        return storage


def close_sources(token: str) -> None:
    """Forgets the stores that this process opened for a merge."""
    with _lock:
        for key in [key for key in _open if key[0] == token]:
            del _open[key]
