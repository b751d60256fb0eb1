"""What the user of one observer is warned of, once a kind."""

import logging
from pathlib import Path

from torchinstruments.records import error_text
from torchinstruments.store.spool_folder import LOG as UPLOADER_LOG
from torchinstruments.warning_place import warn_user

__all__ = ["UserWarnings", "lateness"]

_MAX_KINDS = 100

_LOGGER = logging.getLogger("torchinstruments")


class UserWarnings:
    """Warns, and raises nothing into training.

    Args:
        are_wanted: Whether there are any.
    """

    def __init__(self, *, are_wanted: bool) -> None:
        self._are_wanted = are_wanted
        self._warned: set[str] = set()

    def silence(self) -> None:
        """Warns no more (any thread)."""
        self._are_wanted = False

    def storage_failed(self, probe: str, error: BaseException) -> None:
        """Warns once a kind of what failed in the writer thread; it is in the manifest already."""
        kind = f"{probe}:{type(error).__name__}"
        text = error_text(error)
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
        self.warn(kind, f"{probe} failed: {what}; training goes on")

    def warn(self, kind: str, sentence: str) -> None:
        """Warns once a kind; where warnings are errors it is logged instead, for training must go on."""
        if not self._are_wanted or kind in self._warned or len(self._warned) > _MAX_KINDS:
            return
        self._warned.add(kind)
        try:
            warn_user(f"torchinstruments: {sentence}")
        except Exception:  # noqa: BLE001 - a filter turned it into an exception
            _LOGGER.warning("torchinstruments: %s", sentence)


def lateness(url: str, spool_path: str) -> str:
    """Returns what is said where not everything has arrived at the close.

    Args:
        url: Of the run, without secrets.
        spool_path: Where the rest lies; "" where there is no spool.
    """
    if not spool_path:
        return f"not everything reached {url}; its manifest says what was given up"
    log = Path(spool_path).parent / UPLOADER_LOG
    return (
        f"not everything has reached {url} yet; the rest lies in {spool_path} and is still carried, "
        f"by an uploader that keeps the endpoint and credentials it was started with; if {log} says that "
        f"they are wrong, carry it with others: torchinstruments upload {spool_path}"
    )
