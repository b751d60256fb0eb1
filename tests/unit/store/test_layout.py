"""Names of files and folders, made and parsed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchinstruments.store import layout


@given(st.integers(0, 10**7))
def test_a_rank_folder_parses_back_to_its_rank(rank: int) -> None:
    """Ranks beyond 999 have more digits and still parse."""
    assert layout.parse_rank_folder(layout.rank_folder(rank, alone=False)) == rank


def test_a_world_of_one_uses_the_runs_own_folder() -> None:
    """Its files have no folder in front."""
    folder = layout.rank_folder(0, alone=True)

    assert layout.manifest_file(folder, "1a2b3c4d") == "process-1a2b3c4d.json"


@given(st.integers(0, 2**32 - 1), st.integers(0, 10**9))
def test_a_part_parses_back_to_its_process_and_sequence(process: int, sequence: int) -> None:
    """Sequences beyond six digits still parse."""
    name = layout.part_file("rank-000", "history", f"{process:08x}", sequence).rpartition("/")[2]

    assert layout.parse_part(name) == layout.PartName(f"{process:08x}", sequence)


def test_documents_parse_back_to_what_they_are_named_after() -> None:
    """Manifest, catalog and generation each know their own name and no other."""
    assert layout.parse_manifest("process-1a2b3c4d.json") == "1a2b3c4d"
    assert layout.parse_modules("modules-1a2b3c4d.json") == "1a2b3c4d"
    assert layout.parse_generation(layout.generation_file(12).rpartition("/")[2]) == 12
    assert layout.parse_manifest("modules-1a2b3c4d.json") is None


@pytest.mark.parametrize(
    "name",
    ["part-1A2B3C4D-000000.parquet", "part-1a2b3c4d-00000.parquet", "part-1a2b3c4d-000000.parquet.tmp", ""],
)
def test_what_is_no_part_is_not_taken_for_one(name: str) -> None:
    """Upper case, too few digits and temporary names are refused."""
    assert layout.parse_part(name) is None


@pytest.mark.parametrize(
    ("run_id", "safe"), [("a/b c", "a-b-c"), ("../../etc", "etc"), ("ä-1", "1"), ("x" * 300, "x" * 120)]
)
def test_a_run_id_is_made_safe_for_a_path(run_id: str, safe: str) -> None:
    """Nothing that could leave the folder is left in it."""
    assert layout.safe_run_id(run_id) == safe


def test_a_run_id_of_which_nothing_is_left_is_refused() -> None:
    """The message names the id."""
    with pytest.raises(ValueError, match="'///'"):
        layout.safe_run_id("///")
