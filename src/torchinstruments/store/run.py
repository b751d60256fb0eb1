"""A run as people read it: its tables as Polars frames, lazily, over whatever can be read of it.

Frames scan the readable parts through Arrow's scanner with the declared schema, so that columns and rows that
nobody asks for are not read and one broken file does not fail the others. Which parts are readable is decided
by their footers, once a table, when it is first asked for; what is left out has its name and reason in
`Run.quarantined`. A damaged page behind a sound footer can only show when it is read, and fails that read.
"""

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from torchinstruments.errors import ConfigurationError, RunFormatError
from torchinstruments.records import GenerationRecord, ModuleRecord, RunRecord
from torchinstruments.store import layout, schema
from torchinstruments.store.arrow_files import StorageFiles, arrow_path
from torchinstruments.store.documents import UnusableFileError
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.inspection import Expected, inspect_part
from torchinstruments.store.inventory import Inventory, PartFile, SetAside, read_catalog, take_inventory
from torchinstruments.store.liveness import ProcessStatus, process_status, store_now_s
from torchinstruments.store.manifest import Manifest
from torchinstruments.store.sorting import map_over_network

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Run", "open_run"]

_SAMPLE_KEY = ("generation", "rank", "process", "sample_id")


def open_run(*urls: str, storage_options: Mapping[str, object] | None = None) -> "Run":
    """Opens a run for reading, finished or still running.

    Args:
        urls: Its folder, as a path or any fsspec URL; several where hosts without a shared filesystem have
            one each.
        storage_options: In fsspec's dialect, for all of them.

    Raises:
        ConfigurationError: No folder is named, or an address cannot work.
        RunFormatError: A folder holds no run, one of another schema version, or another run than the first.
        StorageError: A store refused or did not answer.
    """
    if not urls:
        raise ConfigurationError("open_run() names no folder; give the folder that inject_observer wrote to")
    return Run(take_inventory(*(open_storage(url, storage_options) for url in urls)))


class Run:
    """What lay in the folders of a run when it was opened; open it again to see what came since.

    Args:
        inventory: From `take_inventory`.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._readable: dict[str, tuple[PartFile, ...]] = {}
        self._refused: dict[str, tuple[SetAside, ...]] = {}

    def __repr__(self) -> str:
        ranks = "1 rank" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks"
        return f"<Run {self.run.run_id!r}: {ranks}, {', '.join(self.urls)}>"

    def _repr_html_(self) -> str:
        """Returns which ranks lie where and what became of their processes, for notebooks; all is escaped."""
        rows = [
            ("folders", ", ".join(self.urls)),
            ("began", self.run.created_at),
            ("ranks", f"{len(self.ranks)} of {self._world_size}"),
            ("generations", str(len(self.generations))),
            ("processes", ", ".join(f"{number} {name}" for name, number in self._num_by_status()) or "none"),
            ("signals", ", ".join(self.run.signals)),
            ("tables", "history(), samples(), steps(), fingerprints()"),
        ]
        cells = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in rows
        )
        return f"<div><p><code>{html.escape(repr(self))}</code></p><table>{cells}</table></div>"

    @property
    def _world_size(self) -> int:
        return self.generations[-1].world_size if self.generations else self.run.world_size

    def _num_by_status(self) -> list[tuple[str, int]]:
        return sorted(Counter(status.value for status in self.status.values()).items())

    @property
    def inventory(self) -> Inventory:
        """The files that were found."""
        return self._inventory

    @property
    def urls(self) -> tuple[str, ...]:
        """Its folders, without secrets."""
        return tuple(storage.url for storage in self._inventory.storages)

    @property
    def run(self) -> RunRecord:
        """``run.json``."""
        return self._inventory.run

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that left anything here, in order."""
        return tuple(self._inventory.ranks)

    @property
    def generations(self) -> tuple[GenerationRecord, ...]:
        """The (re)starts of its process group, by number."""
        return self._inventory.generations

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """What its processes say of themselves, by rank, generation and process."""
        return tuple(found.manifest for found in self._inventory.manifests)

    @cached_property
    def status(self) -> Mapping[str, ProcessStatus]:
        """Process to what became of it; see `liveness` for how that is judged."""
        now_s = store_now_s(self._inventory)
        return {
            found.manifest.process: process_status(self._inventory, found, now_s=now_s)
            for found in self._inventory.manifests
        }

    @cached_property
    def _catalogs(self) -> tuple[Mapping[int, tuple[ModuleRecord, ...]], tuple[SetAside, ...]]:
        modules: dict[int, tuple[ModuleRecord, ...]] = {}
        refused: list[SetAside] = []
        for rank, files in self._inventory.ranks.items():
            for file in files.catalogs:
                catalog = read_catalog(self._inventory, file)
                if isinstance(catalog, SetAside):
                    refused.append(catalog)
                elif len(catalog.modules) >= len(modules.get(rank, ())):
                    modules[rank] = catalog.modules
        return modules, tuple(refused)

    def modules(self) -> Mapping[int, tuple[ModuleRecord, ...]]:
        """Returns rank to its selected layers in catalog order; of several processes the fullest catalog."""
        return self._catalogs[0]

    @property
    def quarantined(self) -> tuple[SetAside, ...]:
        """Every file that is left out, with its reason; looks at the footers of all parts."""
        for table in layout.TABLES:
            self._readable_parts(table)
        refused = [*self._inventory.set_aside, *self._catalogs[1]]
        for table in layout.TABLES:
            refused.extend(self._refused[table])
        return tuple(refused)

    def history(self) -> "pl.LazyFrame":
        """Returns one row a scalar, with the columns of `schema.HISTORY`."""
        return self._scan("history")

    def samples(self) -> "pl.LazyFrame":
        """Returns one row a sample, with the columns of `schema.SAMPLES`, by generation, rank, process, id.

        A sample that changed after its row was written has several in the parts; the one with the largest
        sums is its last.
        """
        import polars as pl

        progress = pl.col("state").ne_missing("forward_complete").alias("_progress")
        return (
            self._scan("samples")
            .with_columns(progress)
            .sort(*_SAMPLE_KEY, "rows", "num_backwards", "_progress", "collection_forward_s")
            .unique(subset=list(_SAMPLE_KEY), keep="last", maintain_order=True)
            .drop("_progress")
        )

    def steps(self) -> "pl.LazyFrame":
        """Returns one row an attempt and optimizer, with the columns of `schema.STEPS`."""
        return self._scan("steps")

    def fingerprints(self) -> "pl.LazyFrame":
        """Returns one row a parameter or buffer, with the columns of `schema.FINGERPRINTS`."""
        return self._scan("fingerprints")

    def result(self) -> Mapping[str, object]:
        """Returns what the last merge found: ``merged/result.json`` of the (first) folder, parsed.

        It tells of the run as it was then; what came since is in the frames, and in the next merge. A merge
        that was given another ``output`` left its result there.

        Raises:
            RunFormatError: The run was not merged into its own folder yet, or what lies there cannot be read.
            StorageError: The store refused or did not answer.
        """
        storage = self._inventory.storages[0]
        path = f"{layout.MERGED}/{layout.RESULT_FILE}"
        merge = self._merge_command()
        try:
            result = msgspec.json.decode(storage.read(path), type=dict[str, object])
            of_run = msgspec.convert(result.get("run"), type=_RunSection).run_id
        except FileNotFoundError:
            raise RunFormatError(
                f"{storage.url} has no {path}, for the run was not merged; {merge} first"
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RunFormatError(f"{path} in {storage.url} cannot be read ({error}); {merge} again") from None
        if of_run != self.run.run_id:
            raise RunFormatError(
                f"{path} in {storage.url} is of run {of_run!r}, not of {self.run.run_id!r}; {merge} again"
            )
        return result

    def coverage(self) -> Mapping[str, object]:
        """Returns the section ``coverage`` of `result`: what the last merge expected, and what was there.

        Raises:
            RunFormatError: As in `result`.
            StorageError: The store refused or did not answer.
        """
        found = self.result().get("coverage")
        if not isinstance(found, dict):
            raise RunFormatError(
                f"the result in {self.urls[0]} has no coverage; {self._merge_command()} again"
            )
        return found

    def _merge_command(self) -> str:
        return f"run `torchinstruments merge {' '.join(self.urls)}`"

    def _scan(self, table: str) -> "pl.LazyFrame":
        import polars as pl

        declared = schema.TABLE_SCHEMAS[table]
        parts = self._readable_parts(table)
        if not parts:
            return pl.DataFrame(declared.empty_table()).lazy()
        return pl.scan_pyarrow_dataset(_dataset(self._inventory, parts, declared))

    def _readable_parts(self, table: str) -> tuple[PartFile, ...]:
        if table not in self._readable:
            parts = [part for files in self._inventory.ranks.values() for part in files.parts.get(table, ())]
            is_local = all(storage.is_local for storage in self._inventory.storages)
            reasons = map_over_network(self._reason_against, parts, is_local=is_local)
            checked = list(zip(parts, reasons, strict=True))
            self._readable[table] = tuple(part for part, reason in checked if reason is None)
            self._refused[table] = tuple(
                SetAside(part.source, part.path, reason) for part, reason in checked if reason is not None
            )
        return self._readable[table]

    def _reason_against(self, part: PartFile) -> str | None:
        """Returns why a part cannot be read, or None where it can."""
        named = layout.parse_rank_folder(part.path.partition("/")[0])
        expected = Expected(part.table, self.run.run_id, process=part.process, rank=named)
        try:
            inspect_part(self._inventory.storages[part.source], part.path, expected, part.size_bytes)
        except UnusableFileError as error:
            return error.reason
        return None


class _RunSection(msgspec.Struct):
    run_id: str


def _dataset(inventory: Inventory, parts: Sequence[PartFile], declared: pa.Schema) -> ds.Dataset:
    """Returns the parts as one dataset that opens a file only when it is scanned."""
    files = fs.PyFileSystem(StorageFiles(inventory.storages))
    file_format = ds.ParquetFileFormat()
    fragments = [file_format.make_fragment(arrow_path(part.source, part.path), files) for part in parts]
    return ds.FileSystemDataset(fragments, declared, file_format, files)
