"""What README and docs say is run, and what they list is compared with the code."""

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

import torchinstruments
from merge.run_folder import process_of, whole_run
from torchinstruments import environment, inject_observer, merge_run, open_run
from torchinstruments.environment import SPOOL_DIR
from torchinstruments.merge.entries import SUMMARY_SCHEMA
from torchinstruments.records import Counters, ErrorRecord, Evidence, ModuleRecord, Outcome, Reason
from torchinstruments.store.catalog import ModuleCatalog
from torchinstruments.store.manifest import Manifest, TableState
from torchinstruments.store.schema import TABLE_SCHEMAS
from torchinstruments.testing.object_store import ObjectStore

pytestmark = pytest.mark.timeout(300)

PROJECT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(PROJECT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "launch/*.md")
    for path in PROJECT.glob(pattern)
)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDER = re.compile(r'output_dir="([^"]+)"')
TEXTLESS_LINK = re.compile(r"(?<!!)\[\s*\]\(")
LINK = re.compile(r"\[[^\]]*\]\(([^)#:]+)\)")
WRITES_A_SCRIPT = re.compile(r"cat > \w+\.py <<'EOF'\n.*\nEOF\n\Z", re.DOTALL)
# A model and a loop, as the pages say; whatever else a block uses it has to import itself.
GIVEN = """
def given():
    import torch

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(25):
            output = model(torch.randn(8, 4))
            torch.nn.functional.cross_entropy(output, torch.randint(2, (8,))).backward()
            optimizer.step()
            optimizer.zero_grad()

    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)), train


model, train = given()
del given
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    text: str


BLOCKS = [
    Block(page, language, text)
    for page in PAGES
    for language, text in FENCE.findall((PROJECT / page).read_text(encoding="utf-8"))
]
FIRST_COMMANDS = next(block for block in BLOCKS if block.page == "README.md" and block.language == "bash")


def run(*command: str, cwd: Path, variables: dict[str, str] | None = None) -> str:
    """Runs a command that must succeed and returns what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"PATH": path} | (variables or {}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def run_shell(text: str, cwd: Path, variables: dict[str, str] | None = None) -> str:
    """Runs a shell block, every command of which must succeed."""
    return run("bash", "-euo", "pipefail", "-c", text, cwd=cwd, variables=variables)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the project's, in which README's first commands were run."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("launch", "examples"):
        (folder / name).symlink_to(PROJECT / name)
    run_shell(FIRST_COMMANDS.text, folder)
    return folder


def test_the_first_commands_write_what_the_readme_shows(checkout: Path) -> None:
    """After README's two commands both ranks' folders and the merged files lie where its tree shows them."""
    folder = checkout / "runs" / "first"
    for name in ("run.json", "generations/000.json", "merged/result.json", "merged/summary.parquet"):
        assert (folder / name).is_file(), name
    for rank in ("rank-000", "rank-001"):
        for pattern in (
            "process-*.json",
            "modules-*.json",
            "history.parts/part-*-000000.parquet",
            "samples.parts/*",
        ):
            assert list((folder / rank).glob(pattern)), f"{rank}/{pattern}"


@pytest.mark.parametrize(
    "block",
    [
        block
        for block in BLOCKS
        if block.language == "bash" and block is not FIRST_COMMANDS and "s3://" not in block.text
    ],
    ids=lambda block: block.page,
)
def test_shell_blocks_run(checkout: Path, block: Block) -> None:
    """Every command of a block marked bash succeeds, and a run that it names has that name."""
    assert run_shell(block.text, checkout) or WRITES_A_SCRIPT.match(block.text)
    for run_id, folder in re.findall(r"RUN_ID=(\S+) OUTPUT_DIR=(\S+)", block.text):
        assert json.loads((checkout / folder / "run.json").read_bytes())["run_id"] == run_id


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.language == "bash" and "s3://" in block.text],
    ids=lambda block: block.page,
)
def test_shell_blocks_with_an_object_store_run_on_a_real_one(
    checkout: Path, seaweed: ObjectStore, block: Block, tmp_path: Path
) -> None:
    """The same on SeaweedFS: its endpoint and credentials stand in the environment, its bucket exists."""
    for bucket in set(re.findall(r"s3://([\w-]+)/", block.text)):
        seaweed.make_bucket(bucket)
    commands = "\n".join(line for line in block.text.splitlines() if not line.startswith("export AWS_"))
    output = run_shell(commands, checkout, seaweed.env | {SPOOL_DIR: str(tmp_path / "spool")})
    assert "s3://" in output


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.language == "python"}))
def test_python_blocks_run(checkout: Path, page: str, tmp_path: Path) -> None:
    """The Python blocks of a page run one after the other, and each run lies where they say, with samples."""
    text = "\n".join(block.text for block in BLOCKS if block.page == page and block.language == "python")
    variables = {SPOOL_DIR: str(tmp_path / "spool")}
    given = GIVEN if re.search(r"\b(model|train)\b", text) else ""
    output = run(sys.executable, "-c", given + text, cwd=checkout, variables=variables)
    for folder in re.findall(FOLDER, text):
        assert open_run(str(checkout / folder)).samples().collect().height > 0, folder
    for bucket in re.findall(r"make_bucket\('([\w-]+)'\)", text):
        assert re.search(rf"MergeResult\('s3://{bucket}/run/merged', ranks='0', complete\)", output)


def test_ranks_that_hold_the_same_are_no_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's count of extremes names the ranks that differ, and not rank 0 for cells that are equal."""
    folder = whole_run(tmp_path / "runs" / "first", 3, num_samples=1)
    for rank in range(3):
        rows = [{"layer": "equal", "value": 1.0}, {"layer": "odd", "value": (2.0, 1.0, 9.0)[rank]}]
        folder.history(rank, [one | {"sample_id": 0, "metric": "std"} for one in rows], process_of(rank))
    merge_run(folder.url)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    [block] = [
        one for one in BLOCKS if one.page == "docs/finding-a-bad-rank.md" and "lowest_rank" in one.text
    ]
    exec(block.text, names)
    found = names["extremes"].select("end", "rank", "cells").rows()
    assert sorted(found) == [("highest", 2, 1), ("lowest", 1, 1)]


def test_no_two_pages_or_scripts_share_a_folder() -> None:
    """Whoever follows README, pages and examples in turn finds each run in a folder of its own."""
    folders = [
        folder for block in BLOCKS if block.language == "python" for folder in re.findall(FOLDER, block.text)
    ]
    for path in sorted(PROJECT.glob("examples/*.py")):
        folders += re.findall(
            r'"--output-dir",\s+default=[^"]*(?:"OUTPUT_DIR", )?"([^"]+)"', path.read_text()
        )
    folders += re.findall(r"OUTPUT_DIR=(runs/\w+)", FIRST_COMMANDS.text)
    assert {"runs/first", "runs/basic", "runs/language-model"} <= set(folders)
    assert len(folders) == len(set(folders))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every link of a page to another file names one that exists."""
    for target in LINK.findall((PROJECT / page).read_text(encoding="utf-8")):
        assert (PROJECT / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_links_have_a_text(page: str) -> None:
    """A plain view of Markdown shows nothing of a link without one."""
    assert not TEXTLESS_LINK.search((PROJECT / page).read_text(encoding="utf-8"))


def test_every_column_is_described() -> None:
    """The page on storage names each column of each table."""
    text = (PROJECT / "docs" / "storage-layout.md").read_text(encoding="utf-8")
    for table, schema in TABLE_SCHEMAS.items():
        section = text[text.index(f"**{table}**") :]
        for name in schema.names[3:]:
            assert f"`{name}`" in section, f"{table}.{name}"


def described(heading: str) -> set[str]:
    """Returns the names in the first column and, in code, in the second of a table of the page on storage."""
    text = (PROJECT / "docs" / "storage-layout.md").read_text(encoding="utf-8")
    table = text[text.index(f"| {heading} |") :].partition("\n\n")[0]
    return set(re.findall(r"`(\w+)`", table))


def first_column(heading: str) -> set[str]:
    """Returns the names in the first column alone."""
    text = (PROJECT / "docs" / "storage-layout.md").read_text(encoding="utf-8")
    rows = text[text.index(f"| {heading} |") :].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_every_column_of_the_merged_summary_is_described() -> None:
    """The page on storage names each column of summary.parquet, and no other."""
    text = (PROJECT / "docs" / "storage-layout.md").read_text(encoding="utf-8")
    table = text[text.index("`summary.parquet` has one row") :].split("\n\n")[1]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(names) == sorted(SUMMARY_SCHEMA.names)


def test_every_field_of_the_documents_is_described() -> None:
    """The page on storage names what manifests and catalogs hold, down to their nested records."""
    of_manifest = {field.name for field in dataclasses.fields(Manifest)}
    assert first_column("of `process-*.json`") == of_manifest
    nested = {field.name for one in (TableState, Counters, ErrorRecord) for field in dataclasses.fields(one)}
    assert nested <= described("of `process-*.json`")
    assert first_column("of `modules-*.json`") == {field.name for field in dataclasses.fields(ModuleCatalog)}
    assert {field.name for field in dataclasses.fields(ModuleRecord)} <= described("of `modules-*.json`")


def test_every_name_under_coverage_is_described(checkout: Path) -> None:
    """The page on storage names what a merge writes there, in its first column."""
    coverage = open_run(str(checkout / "runs" / "first")).coverage()
    assert first_column("of `coverage`") == set(coverage)
    alignment = coverage["alignment"]
    assert isinstance(alignment, dict)
    assert set(alignment) <= described("of `coverage`")


@pytest.mark.parametrize(("column", "values"), [("outcome", Outcome), ("evidence", Evidence)])
def test_what_a_step_can_say_is_described(column: str, values: type[StrEnum]) -> None:
    """Each value of the two columns stands in the column's own row."""
    text = (PROJECT / "docs" / "storage-layout.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{column}` \|.*$", text, re.MULTILINE)
    assert {value.value for value in values} <= set(re.findall(r"`(\w+)`", row))


def test_described_reasons_exist() -> None:
    """The reason codes that the page on storage lists are among those that the package writes."""
    text = (PROJECT / "docs" / "storage-layout.md").read_text(encoding="utf-8")
    listed = re.search(r"Reasons are codes.*?: (`.*?)\n\n", text, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) <= {reason.value for reason in Reason}


def test_the_arguments_described_are_those_that_exist() -> None:
    """The table of arguments lists what inject_observer takes, in its order, and nothing else."""
    text = (PROJECT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    table = text[text.index("| argument |") :]
    described = re.findall(r"^\| `(\w+)` \|", table[: table.index("\n\n")], re.MULTILINE)
    assert described == list(inspect.signature(inject_observer).parameters)[1:]


def test_every_public_name_is_described() -> None:
    """The pages on the Python interface have an entry for each name and a section for each module."""
    text = (PROJECT / "docs" / "api.md").read_text(encoding="utf-8")
    modules = (PROJECT / "docs" / "api-modules.md").read_text(encoding="utf-8")
    public = set(torchinstruments.__all__) - {"__version__"}
    rooms = {name for name in public if inspect.ismodule(getattr(torchinstruments, name))}
    entries = re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)$", text, re.MULTILINE)
    assert sorted(entries) == sorted(public - rooms)
    pictures = re.findall(r"^\.\. autofunction:: (\w+)$", modules, re.MULTILINE)
    assert sorted(pictures) == sorted(torchinstruments.report.__all__)  # its names hide from automodule
    assert set(re.findall(r"^## `torchinstruments\.(\w+)`$", modules, re.MULTILINE)) == rooms


def test_every_environment_variable_is_described() -> None:
    """The page on the environment lists what environment.py reads, and nothing else."""
    text = (PROJECT / "docs" / "environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    described = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    read = [value for name, value in vars(environment).items() if name.isupper() and isinstance(value, str)]
    assert sorted(described) == sorted(read)
