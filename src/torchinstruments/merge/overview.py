"""``overview.parquet``: a table for pictures, of bounded size however long a run and however many its ranks.

What `overview_choice` chose is compared anyway; of that the values of ranks are kept.
"""

import io
import json
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.merge.overview_choice import Pictured
from torchinstruments.merge.overview_rows import OVERVIEW_SCHEMA
from torchinstruments.merge.rank_sets import ranks_text

__all__ = ["OVERVIEW_FILE", "OVERVIEW_KEY", "OverviewFold"]

OVERVIEW_FILE = "overview.parquet"
OVERVIEW_KEY = "torchinstruments.overview"
"""Key of the file's metadata under which stands what was chosen, as JSON."""


@dataclass(slots=True)
class OverviewFold:
    """Takes the rows of stretch after stretch; memory is that of the table."""

    _tables: list[pa.Table] = field(default_factory=list)

    def add(self, table: pa.Table) -> None:
        """Takes the rows of a stretch; stretches come in the order of the run."""
        if table.num_rows:
            self._tables.append(table)

    def encoded(self, pictured: Pictured, num_forwards: int) -> bytes:
        """Returns ``overview.parquet``.

        Args:
            pictured: What was chosen.
            num_forwards: Forwards that any rank measured.
        """
        told = {
            "forwards": num_forwards,
            "forwards_chosen": len(pictured.moments),
            "forwards_with_all_groups": len(pictured.detailed),
            "ranks_of_every_forward": ranks_text(pictured.ranks),
            "group_ranks": pictured.group_ranks,
            "metrics": None if pictured.metrics is None else sorted(pictured.metrics),
            "max_series": pictured.max_rows,
        }
        buffer = io.BytesIO()
        floats = [one.name for one in OVERVIEW_SCHEMA if pa.types.is_floating(one.type)]
        texts = [one.name for one in OVERVIEW_SCHEMA if pa.types.is_string(one.type)]
        with pq.ParquetWriter(
            buffer,
            OVERVIEW_SCHEMA,
            compression="zstd",
            use_dictionary=[*texts, "ranks.list.element"],
            use_byte_stream_split=[*floats, "values.list.element", "distances.list.element"],
            store_schema=False,
        ) as writer:
            writer.write_table(pa.concat_tables([OVERVIEW_SCHEMA.empty_table(), *self._tables]))
            writer.add_key_value_metadata({OVERVIEW_KEY: json.dumps(told)})
        return buffer.getvalue()
