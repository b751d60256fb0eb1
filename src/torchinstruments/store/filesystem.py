"""The way to any place that holds runs: `open_storage` takes a path or an fsspec URL and returns a `Storage`.

Opening connects to nothing and imports a client only for a remote URL, only then.
"""

from collections.abc import Mapping

from torchinstruments.store.local import LocalStorage
from torchinstruments.store.storage import FileInfo, Storage
from torchinstruments.store.urls import check_storage_options, check_url, is_remote, redact

__all__ = ["DEFAULT_TIMEOUT_S", "FileInfo", "LocalStorage", "Storage", "is_remote", "open_storage", "redact"]

DEFAULT_TIMEOUT_S = 30.0
"""Seconds that one request may take before the store counts as unreachable; large data gets more."""


def open_storage(
    url: str,
    storage_options: Mapping[str, object] | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Storage:
    """Returns the storage at an address.

    Args:
        url: A path, or any fsspec URL or chain of URLs. Names are taken as they are: nothing is
            percent-decoded.
        storage_options: Settings in fsspec's dialect, such as ``key``, ``secret``, ``client_kwargs``; for a
            chain under the scheme of the link that they belong to. A local address takes none.
        timeout_s: Bound of one request, in seconds; a request that carries data gets a second more for each
            256 KiB of it.

    Raises:
        ConfigurationError: The address or the options cannot work: an unknown scheme, or one whose package is
            not installed, with the package to install.
    """
    check_url(url)
    check_storage_options(storage_options)
    if not is_remote(url):
        return LocalStorage(url)
    from torchinstruments.store.remote import open_remote

    return open_remote(url, storage_options, timeout_s=timeout_s)
