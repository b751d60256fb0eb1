"""One self-contained HTML file of a merged run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from torchinstruments._version import __version__
from torchinstruments.merge.overview import OVERVIEW_FILE, OVERVIEW_KEY
from torchinstruments.merge.rank_sets import parse_ranks, ranks_text
from torchinstruments.merge.reopened import merged_table, shaped_like_a_merge
from torchinstruments.merge.timeline import TIMELINE_FILE
from torchinstruments.report.coverage_lines import coverage_lines, headline, not_compared_text, num_samples
from torchinstruments.report.document import Record, as_integer, as_list, as_record, as_records
from torchinstruments.report.extra import plotly_script, require_report_extra
from torchinstruments.report.fact_tables import furthest_table, spread_table
from torchinstruments.report.findings import finding_lines
from torchinstruments.report.heat_map import MADS_ENDS, SHARE_ENDS
from torchinstruments.report.opening import opening_row, row_choice
from torchinstruments.report.packing import embedded, embedded_json, pack_overview
from torchinstruments.report.spreads import spread_metrics
from torchinstruments.report.texts import count_text, shown_text
from torchinstruments.report.timeline_plots import coverage_map, loss_scale_lines, skipped_steps_map
from torchinstruments.report.work_plot import own_work_plot
from torchinstruments.store.filesystem import open_storage

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

    from torchinstruments.merge.result import MergeResult

__all__ = ["MAX_PAGE_BYTES", "REPORT_FILE", "WrittenReport", "write_report"]

REPORT_FILE = "report.html"

MAX_PAGE_BYTES = 6_000_000
"""Size of the file; where it does not suffice, fewer forwards are pictured, and the page says so."""

_OLD = "this result is one of an earlier release and has no {}; merge the run again to have this picture"
_MAX_NAMES = 200


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """A report that was written.

    Attributes:
        url: The file, without secrets.
        size_bytes: Its size.
        complete: Whether the merge was complete, and all its tables were there.
        missing: What is not in it, one sentence each.
    """

    url: str
    size_bytes: int
    complete: bool
    missing: tuple[str, ...]


def write_report(
    merged: "MergeResult", output: str | None = None, *, storage_options: Mapping[str, object] | None = None
) -> WrittenReport:
    """Writes what a merge found as one HTML file that needs no network.

    Args:
        merged: From `merge_run`.
        output: The file, a path or an fsspec URL; else ``report.html`` beside the merged files.
        storage_options: In fsspec's dialect, for `output`.

    Raises:
        ConfigurationError: The extra ``report`` is not installed, or `output` cannot work.
        RunFormatError: A table of the merge cannot be read, or it or the result is not what a merge writes.
        StorageError: A store refused or did not answer.
    """
    require_report_extra()
    with shaped_like_a_merge(merged):
        page, missing = _page(merged)
    data = page.encode("utf-8", "backslashreplace")
    storage, name = merged.storage, REPORT_FILE
    if output is not None:
        folder, _, name = output.rpartition("/")
        storage = open_storage(folder or ("/" if output.startswith("/") else "."), storage_options)
        name = name or REPORT_FILE
    storage.replace_together({name: data})
    is_complete = merged.complete and not missing
    return WrittenReport(f"{storage.url.rstrip('/')}/{name}", len(data), is_complete, tuple(missing))


def _page(merged: "MergeResult") -> tuple[str, list[str]]:
    missing: list[str] = []
    notes: dict[str, str] = {}
    overview, timeline = _table(merged, OVERVIEW_FILE), _table(merged, TIMELINE_FILE)
    for name, table in ((OVERVIEW_FILE, overview), (TIMELINE_FILE, timeline)):
        if table is None:
            notes[name] = _OLD.format(name)
            missing.append(notes[name])
    figures = _figures(merged.result, None if timeline is None else timeline.rows, notes)
    texts = _texts(merged, notes)
    plotly = embedded(plotly_script().encode())
    rows = None if overview is None else overview.rows
    told = {} if overview is None else overview.told
    while True:
        page = _rendered(merged.result, rows, told, texts, {"figures": figures}, plotly)
        if rows is None or len(page) <= MAX_PAGE_BYTES:
            return page, missing
        rows = _thinner(rows, notes)


@dataclass(frozen=True, slots=True)
class _Table:
    rows: "pl.DataFrame"
    told: Record


def _table(merged: "MergeResult", name: str) -> _Table | None:
    import polars as pl

    found = merged_table(merged, name)
    if found is None:
        return None
    metadata = found.metadata.metadata or {}
    told = json.loads(metadata.get(OVERVIEW_KEY.encode(), b"{}"))
    return _Table(pl.DataFrame(pl.from_arrow(found.read())), told)


def _texts(merged: "MergeResult", notes: Mapping[str, str]) -> dict[str, object]:
    result = merged.result
    run = as_record(result["run"])
    coverage = as_record(result["coverage"])
    lines = [*finding_lines(result), *coverage_lines(coverage)]
    lines += [_generation_line(one) for one in as_records(result["generations"])]
    return {
        "run_id": shown_text(str(run["run_id"])),
        "headline": headline(num_samples(result), is_complete=merged.complete),
        "facts": [(name, shown_text(text)) for name, text in lines],
        "run_facts": _run_facts(merged, run),
        "never_fired": _never_fired(coverage),
        "version": __version__,
        "notes": notes,
    }


def _rendered(
    result: Mapping[str, object],
    overview: "pl.DataFrame | None",
    told: Record,
    texts: Mapping[str, object],
    names: Mapping[str, object],
    plotly: str,
) -> str:
    import jinja2
    from markupsafe import Markup

    names_generation = overview is not None and overview["generation"].n_unique() > 1
    furthest = furthest_table(result, names_generation=names_generation)
    apart = spread_table(result, names_generation=names_generation)
    ranks = _integers(as_record(result["run"])["merged_ranks"])
    packed: dict[str, object] | None = None
    numbers = b""
    if overview is not None and overview.height:
        found = pack_overview(overview, [str(one["layer"]) for one in as_records(result["layers"])])
        shown = str(told.get("ranks_of_every_forward", ranks_text(ranks)))
        opening = opening_row(result, overview)
        settings = {
            "group_ranks": told.get("group_ranks", 1),
            "line_ranks": sorted(parse_ranks(shown)),
            "colour_ends": {"mads": MADS_ENDS, "share": SHARE_ENDS},
            "opening": None if opening is None else row_choice(opening, names_generation=names_generation),
        }
        packed, numbers = found.names | settings, found.numbers
    names = {**names, "overview": packed, "ranks": ranks, "rows": [*apart.choices, *furthest.choices]}
    assets = files("torchinstruments.report").joinpath("assets")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(assets.joinpath("page.html.j2").read_text("utf-8"))
    return template.render(
        **texts,
        furthest=furthest.cells,
        apart=apart.cells,
        spread_metrics=shown_text(" or ".join(spread_metrics(result))),
        not_compared=not_compared_text(as_record(result["comparison"])),
        chosen=_chosen_text(told, len(ranks)),
        has_overview=packed is not None,
        # Files of this package, in which nothing comes from a run.
        style=Markup(assets.joinpath("page.css").read_text("utf-8")),  # noqa: S704 - the same
        script=Markup(assets.joinpath("page.js").read_text("utf-8")),  # noqa: S704 - the same
        names=embedded_json(names),
        numbers=embedded(numbers),
        plotly=plotly,
    )


def _figures(
    result: Mapping[str, object], timeline: "pl.DataFrame | None", notes: dict[str, str]
) -> dict[str, object]:
    figures: dict[str, object] = {}
    if timeline is not None:
        scales = timeline["loss_scale_last"]
        if scales.null_count() < len(scales):
            figures["loss_scale"] = _plain(loss_scale_lines(timeline))
        else:
            notes["loss_scale"] = "No rank has a row of steps with a loss scale."
        if timeline["skipped"].sum():
            figures["skipped"] = _plain(skipped_steps_map(timeline))
        else:
            notes["skipped"] = "No rank has a row of steps that was skipped."
        if timeline["samples_of_any_rank"].sum():
            figures["coverage"] = _plain(
                coverage_map(timeline, _integers(as_record(result["coverage"])["expected_ranks"]))
            )
        else:
            notes["coverage"] = "No rank has a measured forward."
    own_work = as_record(result["own_work"])
    if any(one["ranks"] for one in as_records(own_work["generations"])):
        figure = own_work_plot(own_work)
        notes["own_work_shown"] = (
            f"Shown: {as_record(as_record(figure.to_dict()['layout'])['title'])['text']}."
        )
        figures["own_work"] = _plain(figure)
    else:
        notes["own_work"] = "There are no times of several ranks to hold beside each other."
    return figures


def _integers(value: object) -> list[int]:
    return [as_integer(one) for one in as_list(value)]


def _plain(figure: "go.Figure") -> object:
    return json.loads(figure.update_layout(template="none", title=None).to_json())


def _thinner(overview: "pl.DataFrame", notes: dict[str, str]) -> "pl.DataFrame":
    """Leaves out every other forward, so that the page gets smaller; the last one stays."""
    place = ("generation", "attempt", "forward_in_attempt", "forward_index")
    forwards = overview.select(place).unique().sort(place)
    kept = forwards.reverse().gather_every(2)
    if forwards.height == 1:
        # A single forward of very many series: the first half of them.
        notes["thinned"] = "The page holds no more, so that series are left out; the tables have them."
        return overview.head(overview.height // 2)
    notes["thinned"] = f"The page holds {kept.height} of them."
    return overview.join(kept, on=place, how="semi", nulls_equal=True)


def _chosen_text(told: Record, num_ranks: int) -> str:
    if not told:
        return ""
    chosen, detailed = as_integer(told["forwards_chosen"]), as_integer(told["forwards_with_all_groups"])
    all_forwards = count_text(as_integer(told["forwards"]), "measured forward")
    text = f"{chosen:,} of {all_forwards} are pictured."
    size, ranks = as_integer(told["group_ranks"]), told["ranks_of_every_forward"]
    if size > 1:
        text += (
            f" Each has the values of ranks {ranks}; {detailed:,} also have, of every {size} consecutive "
            f"ranks, the one furthest from the median."
        )
    elif detailed < chosen:
        text += f" Each has the values of ranks {ranks}; {detailed:,} have those of all {num_ranks} ranks."
    if told["metrics"] is not None:
        text += f" Of the statistics these are pictured: {', '.join(map(str, as_list(told['metrics'])))}."
    return text


def _run_facts(merged: "MergeResult", run: Record) -> list[tuple[str, str]]:
    versions = as_record(run["versions"])
    rows = sum(as_integer(one["rows"]) for one in as_records(merged.result["ranks"]))
    facts = [
        ("began", str(run["created_at"])),
        ("rows read", f"{rows:,}"),
        ("signals", ", ".join(str(one) for one in as_list(run["signals"]))),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("merged files", merged.url),
    ]
    return [(name, shown_text(text)) for name, text in facts]


def _generation_line(one: Record) -> tuple[str, str]:
    present = ranks_text(_integers(one["present_ranks"]))
    missing = ranks_text(_integers(one["missing_ranks"]))
    size = count_text(as_integer(one["world_size"]), "rank")
    text = f"{one['generation']} of {size}, present: {present or 'none'}"
    return "generation", f"{text}, missing: {missing}" if missing else text


def _never_fired(coverage: Record) -> list[str]:
    found = as_records(coverage["modules_never_fired"])
    lines = [
        f"{one['layer'] or '(root)'} ({one['type'] or 'type not known'}): "
        + "; ".join(f"{reason} on {ranks}" for reason, ranks in as_record(one["reasons"]).items())
        for one in found[:_MAX_NAMES]
    ]
    if len(found) > _MAX_NAMES:
        lines.append(f"{len(found) - _MAX_NAMES:,} more, in result.json")
    return [shown_text(line) for line in lines]
