"""What travels between the merge and its workers: a rank to read, and what was read of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchinstruments.merge.alignment import SampleKeys
from torchinstruments.merge.fingerprint_rows import FingerprintReading
from torchinstruments.merge.nonfinite_rows import NonfiniteReading
from torchinstruments.merge.row_spans import RowSpan
from torchinstruments.merge.sources import Source
from torchinstruments.merge.step_rows import StepReading
from torchinstruments.store.inventory import PartFile, SetAside
from torchinstruments.store.summaries import SeriesSummaries

__all__ = ["Disagreement", "ProcessRows", "RankReading", "RankTask"]


@dataclass(frozen=True, slots=True)
class RankTask:
    """One rank to read.

    Attributes:
        rank: The rank.
        run_id: Parts of another run are left out.
        window: Samples in each of the two windows of a summary.
        sources: The folders of the run, by `PartFile.source`.
        parts: Table to the rank's parts, in the order of writing.
        generations: Process to the generation of its manifest; processes without a readable one are not here.
        reads_all_columns: Whether each part has to be decoded whole before it counts, and not only what the
            summaries need: so after a part turned out to be damaged elsewhere.
    """

    rank: int
    run_id: str
    window: int
    sources: tuple[Source, ...]
    parts: Mapping[str, tuple[PartFile, ...]]
    generations: Mapping[str, int]
    reads_all_columns: bool = False

    @property
    def read_ranks(self) -> tuple[int, ...]:
        """The rank, as the only one."""
        return (self.rank,)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Rows of a part that say something else than the folder, the file's name or the manifest.

    They are counted all the same, for the rank in whose folder they lie.

    Attributes:
        source: Index of its folder.
        path: The part.
        column: ``rank``, ``process`` or ``generation``.
        found: What the rows say.
        expected: What the folder, name or manifest says.
        rows: How many rows.
    """

    source: int
    path: str
    column: str
    found: str
    expected: str
    rows: int


@dataclass(frozen=True, slots=True)
class ProcessRows:
    """What was read of one process.

    Attributes:
        rows: Table to rows read.
        generations: Generations that its rows tell.
        samples: Distinct samples.
        missed_samples: Samples that other ranks took and this process could not.
        first_sample_id: Lowest sample, None where there is none.
        last_sample_id: Highest sample, None where there is none.
        first_sample_at_us: When its first sample began: microseconds since the epoch, UTC.
        last_sample_at_us: When its last sample began.
    """

    rows: Mapping[str, int]
    generations: tuple[int, ...]
    samples: int
    missed_samples: int
    first_sample_id: int | None
    last_sample_id: int | None
    first_sample_at_us: int | None
    last_sample_at_us: int | None


@dataclass(frozen=True, slots=True)
class RankReading:
    """What was read of one rank.

    Attributes:
        rank: The rank.
        summaries: Of every series.
        processes: Process to what was read of it; a process without a readable part is not here.
        keys: What its samples are known by between ranks.
        set_aside: Parts that were left out, with the reason.
        foreign_parts: Parts of another run.
        disagreements: Rows that say something else than the place they lie in.
        steps: Its attempts.
        fingerprints: Of its parameters and buffers.
        nonfinite: Where it first saw NaN or infinity.
        row_spans: Which forwards its row groups of ``history`` have rows of.
    """

    rank: int
    summaries: SeriesSummaries
    processes: Mapping[str, ProcessRows]
    keys: SampleKeys
    set_aside: tuple[SetAside, ...]
    foreign_parts: int
    disagreements: tuple[Disagreement, ...]
    steps: StepReading
    fingerprints: FingerprintReading
    nonfinite: NonfiniteReading
    row_spans: tuple[RowSpan, ...]
