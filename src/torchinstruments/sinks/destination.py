"""The run's folder as users name it among sinks: where it lies, not what writes into it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from torchinstruments.config import HistoryConfig
from torchinstruments.errors import ConfigurationError
from torchinstruments.records import ModuleRecord, RunRecord, Sample
from torchinstruments.store.filesystem import redact

__all__ = ["DirectorySink"]


@dataclass(frozen=True, slots=True, repr=False)
class DirectorySink:
    """Says where the run's folder lies and how its history is kept.

    It takes the place of the arguments of `inject_observer` with the same names.

    It is given as ``sink=``, alone or inside a `CompositeSink`. Nothing is opened or written before the ranks
    have agreed on the run.

    Attributes:
        output_dir: Path or URL, as in `inject_observer`.
        storage_options: For a URL: settings in fsspec's dialect. They are never written anywhere.
        run_id: Name of the run, equal on all ranks; None for the launcher's, or one made by the leader.
        history_config: How the history is buffered and summarised.

    Raises:
        ConfigurationError: One of them cannot work.
    """

    output_dir: str | os.PathLike[str]
    _: KW_ONLY
    storage_options: Mapping[str, object] | None = None
    run_id: str | None = None
    history_config: HistoryConfig = field(default_factory=HistoryConfig)

    def __post_init__(self) -> None:
        """Refuses what is no address and no setting."""
        if not isinstance(self.output_dir, (str, os.PathLike)) or not str(self.output_dir).strip():
            raise ConfigurationError(
                f"DirectorySink({self.output_dir!r}) is not possible; give a path, or a URL such as "
                f"'s3://bucket/run'"
            )
        if not isinstance(self.history_config, HistoryConfig):
            raise ConfigurationError(
                f"DirectorySink(history_config={self.history_config!r}) is not possible; give a "
                f"HistoryConfig(buffer_rows=..., window=...)"
            )

    def __repr__(self) -> str:
        """Returns the address without its secrets, and none of the options."""
        return f"DirectorySink({redact(str(self.output_dir))!r})"

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:  # noqa: ARG002 - the seam
        """Refuses to be called: only `inject_observer` knows what to write where.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"{self!r} was put into a sink that torchinstruments does not know, which cannot open it; give "
            f"it to inject_observer as sink=, alone or inside a CompositeSink"
        )

    def observe(self, sample: Sample) -> None:
        """Does nothing, for `initialize` has refused."""

    def close(self) -> None:
        """Does nothing, for nothing was opened."""
