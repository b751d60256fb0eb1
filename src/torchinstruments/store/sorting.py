"""Puts each listed file of a run where it belongs, and reads its documents.

Whatever a document says of itself has to agree with the place it lies in; where it does not, it is set aside.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from torchinstruments.records import GenerationRecord
from torchinstruments.store import layout
from torchinstruments.store.documents import (
    MAX_DOCUMENT_BYTES,
    MAX_STATE_BYTES,
    UnusableFileError,
    decode_document,
    decode_generation,
    read_document,
)
from torchinstruments.store.found import CatalogFile, ManifestFile, PartFile, RankInventory, SetAside
from torchinstruments.store.manifest import Manifest, decode_manifest
from torchinstruments.store.storage import FileInfo, Storage

__all__ = ["BEYOND_MANIFEST", "DUPLICATE", "FileSorter", "LocatedFile", "locate", "map_over_network"]

_READERS = 16
BEYOND_MANIFEST = "beyond_manifest"
"""Why a part is set aside that its process, which has closed, never counted."""

_FOLDER = "unreadable: it is a folder"
DUPLICATE = "duplicate"
"""Why a part is set aside that lies in another folder too, with the same size."""

_UNKNOWN_GENERATION = layout.MAX_GENERATION + 1
_PARTS = ".parts"
_KNOWN_FILES = ("result.json", "index.md", "history.parquet")
_KNOWN_PREFIXES = (".", "checks-")

_Input = TypeVar("_Input")
_Output = TypeVar("_Output")


@dataclass(frozen=True, slots=True)
class LocatedFile:
    """A listed file, its path taken apart.

    Attributes:
        source: Index of the folder that was listed.
        info: As listed.
        folder: Path below that folder, without the name; ``""`` for the folder itself.
        name: The last segment.
    """

    source: int
    info: FileInfo
    folder: str
    name: str


def locate(source: int, info: FileInfo) -> LocatedFile:
    """Returns a listed file with its path taken apart."""
    folder, _, name = info.path.rpartition("/")
    return LocatedFile(source, info, folder, name)


def map_over_network(
    function: Callable[[_Input], _Output], items: Sequence[_Input], *, is_local: bool
) -> list[_Output]:
    """Applies a function that waits for a store, several at a time where that is behind a network.

    Returns:
        Results in the order of the items.
    """
    if is_local or not items:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_READERS, len(items)), thread_name_prefix="torchinstruments-reader") as pool:
        return list(pool.map(function, items))


class FileSorter:
    """Puts each listed file where it belongs."""

    def __init__(self, *, run_id: str, storages: Sequence[Storage]) -> None:
        self._run_id = run_id
        self._storages = storages
        self.set_aside: list[SetAside] = []
        self.strange: set[tuple[int, str]] = set()
        self._generation_files: list[LocatedFile] = []
        self._manifest_files: list[LocatedFile] = []
        self._catalog_files: list[LocatedFile] = []
        self._checks_files: list[LocatedFile] = []
        self._documents = (
            (layout.parse_manifest, self._manifest_files),
            (layout.parse_modules, self._catalog_files),
            (layout.parse_checks, self._checks_files),
        )
        self._part_files: list[tuple[LocatedFile, str, layout.PartName]] = []
        self._manifests: dict[str, list[ManifestFile]] = {}
        self._generations: list[GenerationRecord] = []
        self._not_files: set[SetAside] = set()

    def belongs(self, file: LocatedFile) -> bool:
        """Takes a file if it is of this run, and tells whether it did."""
        above, inside, rest = file.info.path.partition(f"{_PARTS}/")
        if inside and (file.info.is_folder or "/" in rest):
            self._note_folder(file.source, f"{above}{inside}{rest.partition('/')[0]}")
            return False
        folder_of_document = _folder_of_document(file)
        if folder_of_document:
            # Known by its own entry, and behind a network only by what lies in it.
            self._not_files.add(SetAside(file.source, folder_of_document, _FOLDER))
            return False
        if file.info.is_folder:
            return False
        if self._is_of_no_rank(file):
            return False
        if file.folder == layout.GENERATIONS:
            if layout.parse_generation(file.name) is None:
                self._note_strange(file)
                return False
            self._generation_files.append(file)
            return True
        folder, _, last = file.folder.rpartition("/")
        if last.endswith(_PARTS):
            return self._take_part(file, folder, last.removesuffix(_PARTS))
        if file.folder and layout.parse_rank_folder(file.folder) is None:
            return False  # merged/, tensorboard/, another run beside this one, whatever the user keeps here
        for parsed, taken in self._documents:
            if parsed(file.name) is not None:
                taken.append(file)
                return True
        if file.folder and not _is_known(file.name):
            self._note_strange(file)
        return file.folder == "" and file.name == layout.RUN_FILE

    def _is_of_no_rank(self, file: LocatedFile) -> bool:
        """Returns whether a file's folder is called like a rank's and is none; the folder is noted."""
        top, inside, _ = file.info.path.partition("/")
        if not inside:
            return False
        if layout.is_rank_folder_beyond(top):
            reason = f"misplaced: there is no rank above {layout.MAX_RANK}"
            self._not_files.add(SetAside(file.source, top, reason))
            return True
        if not layout.is_folder_of_no_rank(top):
            return False
        if not file.name.startswith("."):
            # Told once, by its own name: no number says whose its files are.
            self.strange.add((file.source, top))
        return True

    def _take_part(self, file: LocatedFile, rank_folder: str, table: str) -> bool:
        if table not in layout.TABLES or (rank_folder and layout.parse_rank_folder(rank_folder) is None):
            return False
        name = layout.parse_part(file.name)
        if name is None:
            self._note_strange(file)
            return False
        self._part_files.append((file, table, name))
        return True

    def _note_folder(self, source: int, path: str) -> None:
        # Known by its own entry, and behind a network only by what lies in it.
        rank_folder, _, last = path.rpartition("/")[0].rpartition("/")
        is_of_rank = not rank_folder or layout.parse_rank_folder(rank_folder) is not None
        is_ours = is_of_rank and last.removesuffix(_PARTS) in layout.TABLES
        if is_ours and not path.rpartition("/")[2].startswith("."):
            self.strange.add((source, path))

    def _note_strange(self, file: LocatedFile) -> None:
        # A name with a leading dot is a file that is being written, or was when its writer died.
        if not file.name.startswith("."):
            self.strange.add((file.source, file.info.path))

    def read_documents(self) -> None:
        """Reads manifests and generations, several at a time where they lie behind a network."""
        self.set_aside += self._not_files
        is_local = all(storage.is_local for storage in self._storages)
        files = [*self._manifest_files, *self._generation_files]
        for file, document in zip(files, map_over_network(self._read, files, is_local=is_local), strict=True):
            if isinstance(document, UnusableFileError):
                self.set_aside.append(SetAside(file.source, file.info.path, document.reason))
            elif isinstance(document, GenerationRecord):
                self._generations.append(document)
            else:
                found = ManifestFile(document, file.source, file.info.path, file.info.modified_at)
                self._manifests.setdefault(document.process, []).append(found)

    def _read(self, file: LocatedFile) -> Manifest | GenerationRecord | UnusableFileError:
        try:
            is_generation = file.folder == layout.GENERATIONS
            data = read_document(
                self._storages[file.source],
                file.info.path,
                file.info.size_bytes,
                MAX_DOCUMENT_BYTES if is_generation else MAX_STATE_BYTES,
            )
            if is_generation:
                return self._check_generation(file, decode_document(data, decode_generation))
            return self._check_manifest(file, decode_document(data, decode_manifest))
        except UnusableFileError as error:
            return error

    def _check_generation(self, file: LocatedFile, record: GenerationRecord) -> GenerationRecord:
        if record.run_id != self._run_id:
            raise UnusableFileError("foreign_run")
        if record.generation != layout.parse_generation(file.name):
            raise UnusableFileError("misplaced", f"it is of generation {record.generation}")
        return record

    def _check_manifest(self, file: LocatedFile, manifest: Manifest) -> Manifest:
        if manifest.run_id != self._run_id:
            raise UnusableFileError("foreign_run")
        if manifest.process != layout.parse_manifest(file.name):
            raise UnusableFileError("misplaced", f"it is of process {manifest.process}")
        if not 0 <= manifest.rank <= layout.MAX_RANK:
            raise UnusableFileError("schema_mismatch", f"its rank is {manifest.rank}")
        if not 0 <= manifest.generation < _UNKNOWN_GENERATION:
            raise UnusableFileError("schema_mismatch", f"its generation is {manifest.generation}")
        _check_tables(manifest)
        named = layout.parse_rank_folder(file.folder)
        if named is not None and named != manifest.rank:
            raise UnusableFileError("misplaced", f"it is of rank {manifest.rank}")
        return manifest

    def generation_records(self) -> tuple[GenerationRecord, ...]:
        """The fullest record of each generation, by number."""
        fullest: dict[int, GenerationRecord] = {}
        for record in self._generations:
            seen = fullest.get(record.generation)
            if seen is None or len(record.members) > len(seen.members):
                fullest[record.generation] = record
        return tuple(fullest[number] for number in sorted(fullest))

    def ranks(self) -> dict[int, RankInventory]:
        """Files by rank."""
        manifests: dict[int, list[ManifestFile]] = {}
        for found in self._manifests.values():
            newest = max(found, key=_by_progress)
            manifests.setdefault(newest.manifest.rank, []).append(newest)
        catalogs: dict[int, list[CatalogFile]] = {}
        for file in self._catalog_files:
            process = layout.parse_modules(file.name) or ""
            catalog = CatalogFile(process, file.source, file.info.path, file.info.size_bytes)
            catalogs.setdefault(self._rank_of(file.folder, process), []).append(catalog)
        checks: dict[int, list[CatalogFile]] = {}
        for file in self._checks_files:
            process = layout.parse_checks(file.name) or ""
            report = CatalogFile(process, file.source, file.info.path, file.info.size_bytes)
            checks.setdefault(self._rank_of(file.folder, process), []).append(report)
        parts = self._parts()
        return {
            rank: RankInventory(
                rank=rank,
                manifests=tuple(sorted(manifests.get(rank, ()), key=_by_generation)),
                catalogs=tuple(sorted(catalogs.get(rank, ()), key=_by_process)),
                parts=parts.get(rank, {}),
                checks=tuple(sorted(checks.get(rank, ()), key=_by_process)),
            )
            for rank in sorted({*manifests, *catalogs, *parts, *checks})
        }

    def _parts(self) -> dict[int, dict[str, tuple[PartFile, ...]]]:
        seen: dict[tuple[str, str, int], PartFile] = {}
        for file, table, name in sorted(self._part_files, key=_by_fullness):
            folder = file.folder.rpartition("/")[0]
            part = PartFile(
                table=table,
                rank=self._rank_of(folder, name.process),
                process=name.process,
                sequence=name.sequence,
                source=file.source,
                path=file.info.path,
                size_bytes=file.info.size_bytes,
                modified_at=file.info.modified_at,
            )
            first = seen.setdefault((table, name.process, name.sequence), part)
            if first is not part:
                # A part never changes, so that a copy of another size is one that was cut off.
                whole = first.size_bytes == part.size_bytes
                reason = DUPLICATE if whole else f"truncated: a copy of it has {first.size_bytes} bytes"
                self.set_aside.append(SetAside(part.source, part.path, reason))
        for key, part in list(seen.items()):
            if self._is_beyond_manifest(part):
                self.set_aside.append(SetAside(part.source, part.path, BEYOND_MANIFEST))
                del seen[key]
        grouped: dict[int, dict[str, list[PartFile]]] = {}
        for part in seen.values():
            grouped.setdefault(part.rank, {}).setdefault(part.table, []).append(part)
        return {
            rank: {
                table: tuple(sorted(found, key=self._by_writing)) for table, found in sorted(tables.items())
            }
            for rank, tables in grouped.items()
        }

    def _is_beyond_manifest(self, part: PartFile) -> bool:
        """Whether a process that closed well never wrote such a part; what its spool holds may still come."""
        found = self._manifests.get(part.process)
        if not found:
            return False
        manifest = max(found, key=_by_progress).manifest
        state = manifest.tables.get(part.table)
        if manifest.status != "closed" or state is None or state.rows_in_spool:
            return False
        return part.sequence >= state.next_part

    def _by_writing(self, part: PartFile) -> tuple[int, str, int]:
        return (self._generation_of(part.process), part.process, part.sequence)

    def _generation_of(self, process: str) -> int:
        found = self._manifests.get(process)
        return found[0].manifest.generation if found else _UNKNOWN_GENERATION

    def _rank_of(self, folder: str, process: str) -> int:
        """The run's own folder does not tell a rank; the manifest does, and else it is a world of one."""
        named = layout.parse_rank_folder(folder)
        if named is not None:
            return named
        found = self._manifests.get(process)
        return found[0].manifest.rank if found else 0


def _folder_of_document(file: LocatedFile) -> str:
    """Returns the folder on the way to an entry that stands where a document is due, ``""`` for none."""
    segments = file.info.path.split("/")
    if not file.info.is_folder:
        segments.pop()
    for depth in (1, 2):
        *above, name = segments[:depth] or [""]
        if len(above) != depth - 1:
            break
        is_document = layout.parse_manifest(name) is not None or layout.parse_modules(name) is not None
        if above == [layout.GENERATIONS]:
            is_document = layout.parse_generation(name) is not None
        elif above and layout.parse_rank_folder(above[0]) is None:
            break
        if is_document:
            return "/".join((*above, name))
    return ""


def _check_tables(manifest: Manifest) -> None:
    """Refuses a manifest that speaks of other tables than ours, a path elsewhere among them."""
    for table, state in manifest.tables.items():
        if table not in layout.TABLES:
            raise UnusableFileError("schema_mismatch", f"it has a table {table!r}")
        counts = (state.next_part, state.rows, state.bytes, state.rows_in_spool, state.rows_dropped)
        if min(*counts, *state.missing) < 0:
            raise UnusableFileError("schema_mismatch", f"a count of {table} is below 0")


def _is_known(name: str) -> bool:
    return name in _KNOWN_FILES or name.startswith((".", *_KNOWN_PREFIXES))


def _by_generation(found: ManifestFile) -> tuple[int, str]:
    return (found.manifest.generation, found.manifest.process)


def _by_process(found: CatalogFile) -> tuple[str, int]:
    return (found.process, found.source)


def _by_progress(found: ManifestFile) -> tuple[bool, str, int]:
    return (found.manifest.status == "closed", found.manifest.written_at, -found.source)


def _by_fullness(entry: tuple[LocatedFile, str, layout.PartName]) -> tuple[int, int, str]:
    """Of a part that was copied twice the longer file first: the other copy may have been cut off."""
    file = entry[0]
    return (-file.info.size_bytes, file.source, file.info.path)
