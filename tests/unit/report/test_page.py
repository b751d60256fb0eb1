"""The page: what stands in it, what never does, and that it stays small."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from merge.run_folder import RunFolder, process_of, whole_run
from merge.synthetic_run import SyntheticRun
from merge.wide_result import wide_result
from torchinstruments.errors import RunFormatError
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.reopened import reopen_result
from torchinstruments.report import page, write_report
from torchinstruments.report.packing import pack_overview

HOSTILE = '</script><script>alert(1)</script><img src="x" onerror="alert(2)">&amp;\nline\x1b[31m'


class Elements(HTMLParser):
    """Gathers tags with their attributes, and the text of scripts by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes a tag."""
        self.tags.append((tag, dict(attrs)))
        self.text += " "
        self._inside = (dict(attrs).get("id") or "own") if tag in {"script", "style"} else ""

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 - part of the parser's seam
        """Takes the end of a tag."""
        self._inside = ""

    def handle_data(self, data: str) -> None:
        """Takes text."""
        if self._inside:
            self.scripts[self._inside] = self.scripts.get(self._inside, "") + data
        else:
            self.text += data


def unpacked(text: str) -> bytes:
    """Returns what a script of the page embeds."""
    return gzip.decompress(base64.b64decode(text))


def written(folder: RunFolder) -> Elements:
    """Returns the page of a merged run."""
    merged = reopen_result(folder.url)
    assert merged is not None
    write_report(merged)
    return Elements((folder.root / "merged" / "report.html").read_text("utf-8"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A merged run whose layer, host and run are named by somebody who means harm."""
    run = whole_run(tmp_path_factory.mktemp("hostile"), 3, run_id=f"run-{HOSTILE}")
    for rank in range(3):
        rows = [
            {"sample_id": one, "value": rank + one / 8, "layer": HOSTILE, "metric": HOSTILE}
            for one in range(4)
        ]
        run.history(rank, rows, process_of(rank))
    merge_run(run.url)
    return run


def test_no_text_of_a_run_becomes_markup(hostile: RunFolder) -> None:
    """The page has the scripts of the template and no other, no handler and no foreign element."""
    found = written(hostile)
    assert [one.get("id") for tag, one in found.tags if tag == "script"] == [
        "names",
        "numbers",
        "plotly",
        None,
    ]
    assert not [tag for tag, _ in found.tags if tag in {"img", "iframe", "object", "link", "form"}]
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert "</script><script>alert(1)" in found.text
    assert "\x1b" not in found.text
    assert "\\x1b[31m" in found.text


def test_names_for_pictures_are_escaped(hostile: RunFolder) -> None:
    """Plotly reads labels as markup: none of those that it is given has any."""
    names = json.loads(unpacked(written(hostile).scripts["names"]))
    labels = [*names["overview"]["columns"], *names["overview"]["metrics"], *names["overview"]["choices"]]
    assert any("alert" in one for one in labels)
    assert not [one for one in labels if "<" in one or ">" in one or "\n" in one]


def test_nothing_is_fetched(hostile: RunFolder) -> None:
    """There is no address in the page, and the policy of the page forbids every request."""
    found = written(hostile)
    text = (hostile.root / "merged" / "report.html").read_text("utf-8")
    assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+", re.sub(r"[A-Za-z0-9+/=]{400,}", "", text))
    links = [
        one for _, attributes in found.tags for name, one in attributes.items() if name in {"href", "src"}
    ]
    assert links
    assert all(one is not None and one.startswith("#") for one in links)
    policy = next(one["content"] for tag, one in found.tags if tag == "meta" and "http-equiv" in one)
    assert policy is not None
    assert policy.startswith("default-src 'none';")


def test_the_facts_come_first_and_name_what_is_missing(tmp_path: Path) -> None:
    """What the merge command says stands in the page before any picture."""
    run = whole_run(tmp_path / "run", 2)
    run.manifest(1, process_of(1), status="running")
    merge_run(run.url)
    merged = reopen_result(run.url)
    assert merged is not None
    assert not write_report(merged).complete
    text = " ".join(Elements((run.root / "merged" / "report.html").read_text("utf-8")).text.split())
    facts, _, _ = text.partition("Values of ranks")
    for line in (
        "NOT COMPLETE",
        "same steps",
        "nonfinite",
        "running 1 rank (1)",
        "present 2 ranks (0-1)",
    ):
        assert line in facts, line


def test_two_ranks_have_a_table_of_what_is_apart(tmp_path: Path) -> None:
    """At most ten tensors with their path, as text; both ranks are named."""
    run = whole_run(tmp_path / "run", 2)
    for rank in range(2):
        rows = [
            {"sample_id": 0, "metric": "std", "layer": f"fc{layer:02d}", "tensor_path": "output['<b>']"}
            | {"value": 4.0 - rank * layer / 4}
            for layer in range(12)
        ]
        run.history(rank, rows, process_of(rank))
    merge_run(run.url)
    found = written(run)
    facts = " ".join(found.text.split()).partition("Values of ranks")[0]
    _, _, table = facts.partition("Widest between ranks: std or mean of each layer's signal")
    assert "fc11 output output['<b>'] std 1.25 1 4 0 68.8% attempt 0" in table
    assert "fc02" in table
    assert "fc01" not in table
    assert not [tag for tag, _ in found.tags if tag == "b"]
    assert json.loads(unpacked(found.scripts["names"]))["overview"]["opening"]["column"].startswith("fc11 ")


def test_what_was_not_compared_is_said(tmp_path: Path) -> None:
    """How many rows and why, though there is no picture at all; nothing where all could be."""
    run = whole_run(tmp_path / "run", 2)
    for rank in range(2):
        rows = [
            {"sample_id": one, "attempt": one, "value": 1.0, "scope": "unknown" if one else "local_shard"}
            for one in range(4)
        ]
        run.history(rank, rows, process_of(rank))
    merge_run(run.url)
    sentence = (
        "8 of 8 rows were not compared between ranks and are in no picture: 2 of parts of sharded "
        "tensors, for nothing says which ranks hold the same; 6 of tensors that may be whole or a part."
    )
    assert sentence in " ".join(written(run).text.split())
    whole = SyntheticRun(RunFolder(tmp_path / "whole", world_size=2), 1, 1).write()
    merge_run(whole.folder.url)
    assert "were not compared" not in written(whole.folder).text


def test_the_numbers_in_the_page_are_those_of_the_table(tmp_path: Path) -> None:
    """Unpacked as a browser does it, each rank's value is the one that was written."""
    run = SyntheticRun(RunFolder(tmp_path / "run", world_size=3), 5, 2).write()
    overview = merge_run(run.folder.url).overview()
    packed = pack_overview(overview, ["layers.001", "layers.000"])
    arrays = packed.names["arrays"]
    assert isinstance(arrays, dict)

    def column(name: str) -> np.ndarray:
        place = arrays[name]
        planes = np.frombuffer(packed.numbers, np.uint8)[
            place["start"] : place["start"] + 4 * place["length"]
        ]
        kind = "<f4" if place["kind"] == "float" else "<i4"
        return np.ascontiguousarray(planes.reshape(4, -1).T).view(kind).ravel()

    values = np.stack([run.values(rank) for rank in range(3)])
    median = np.repeat(column("median_of_ranks"), column("num_shown"))
    own = np.where(np.isnan(column("value")), median + column("distance"), column("value"))
    rows = [
        np.repeat(column(name), column("num_shown")) for name in ("forward", "column", "choice", "metric")
    ]
    # The first column is the first layer of the model, here the second one of the run.
    expected = values[column("rank"), rows[0], 1 - rows[1], rows[2], rows[3]]
    np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-3)
    assert packed.names["columns"] == ["layers.001", "layers.000"]
    np.testing.assert_allclose(
        column("lowest_value").sum(), overview["lowest_value"].to_numpy().sum(), rtol=1e-4
    )


def test_a_page_that_would_be_too_large_has_fewer_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is thinned until it fits, keeps the last forward, and says how many there are."""
    run = SyntheticRun(RunFolder(tmp_path / "run", world_size=3), 40, 3).write()
    merge_run(run.folder.url)
    size = len((run.folder.root / "merged" / "report.html").read_bytes()) if written(run.folder) else 0
    monkeypatch.setattr(page, "MAX_PAGE_BYTES", size - 50_000)
    found = written(run.folder)
    assert (run.folder.root / "merged" / "report.html").stat().st_size <= size - 50_000
    forwards = json.loads(unpacked(found.scripts["names"]))["overview"]["forwards"]
    assert 0 < len(forwards) < 40
    assert forwards[-1]["attempt"] == 39
    assert f"The page holds {len(forwards)} of them." in found.text


def test_a_result_of_an_earlier_release_has_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    """Without the tables for pictures the facts are there, and each missing picture has its sentence."""
    run = whole_run(tmp_path / "run", 2)
    merge_run(run.url)
    folder = run.root / "merged"
    document = json.loads((folder / "result.json").read_bytes())
    old = ("overview.parquet", "timeline.parquet")
    document["files"] = [one for one in document["files"] if one["file"] not in old]
    (folder / "result.json").write_text(json.dumps(document))
    for name in old:
        (folder / name).unlink()
    merged = reopen_result(run.url)
    assert merged is not None
    report = write_report(merged)
    assert len(report.missing) == 2
    assert not report.complete
    text = Elements((folder / "report.html").read_text("utf-8")).text
    for sentence in report.missing:
        assert sentence in text


def test_a_table_of_another_merge_is_refused(tmp_path: Path) -> None:
    """A table whose digest is not the one in the result was written by another merge."""
    run = whole_run(tmp_path / "run", 2)
    merged = merge_run(run.url)
    path = run.root / "merged" / "overview.parquet"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(RunFormatError, match=r"overview\.parquet .* merge the run again"):
        write_report(merged)


def test_a_thousand_ranks_fit(tmp_path: Path) -> None:
    """The largest table that a merge makes for pictures is a few MB, and its page has at most 6 MB."""
    run = wide_result(tmp_path / "run")
    assert (run.root / "merged" / "overview.parquet").stat().st_size < 10_000_000
    found = written(run)
    assert (run.root / "merged" / "report.html").stat().st_size <= page.MAX_PAGE_BYTES == 6_000_000
    assert "of every 16 consecutive ranks" in " ".join(found.text.split())


def test_the_page_goes_where_it_is_wanted(tmp_path: Path) -> None:
    """`output` names the file."""
    run = whole_run(tmp_path / "run", 1)
    report = write_report(merge_run(run.url), str(tmp_path / "elsewhere" / "one.html"))
    assert (tmp_path / "elsewhere" / "one.html").stat().st_size == report.size_bytes
    assert report.url == str(tmp_path / "elsewhere" / "one.html")
