"""``torchinstruments compare``: two merged runs beside each other, and conditions for a script to stop at."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from torchinstruments.cli.command import Command, add_reading_arguments, storage_options
from torchinstruments.cli.console import count_text, print_table, shown_text
from torchinstruments.errors import ConfigurationError
from torchinstruments.report.document import Record, as_integer, as_list, as_number, as_record, as_records

if TYPE_CHECKING:
    from torchinstruments.merge.compare_runs import RunComparison

__all__ = ["CONDITION_MET", "COMMAND"]

CONDITION_MET = 3
"""Exit code: a number changed more than ``--max-change`` allows."""

_MAX_NAMED_LAYERS = 5
_NUM_LARGEST = 20


_MEASURE_TEXTS = {
    "recent_window": "mean of the last samples of each series",
    "latest": "last value of each series",
}
_REASON_TEXTS = {
    "world_sizes_differ": "the worlds have different sizes",
    "no_common_ranks": "the runs have no rank in common",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a run's folder, the folder of its merged files, or result.json there; merge it first"
    parser.add_argument("a", metavar="A", help=f"the run to compare with: {text}")
    parser.add_argument("b", metavar="B", help="the other one")
    parser.add_argument(
        "--max-change",
        metavar="METRIC=SHARE",
        action="append",
        default=[],
        help="exit with 3 where a series of this metric changed more, or lost its value; a share of the "
        "larger magnitude of the two numbers, such as std=0.1; can be given several times",
    )
    parser.add_argument(
        "--measure",
        choices=tuple(_MEASURE_TEXTS),
        default="recent_window",
        help="what is compared: the mean of each series' last samples, or its last value "
        "(default: recent_window)",
    )
    add_reading_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    from torchinstruments.merge.compare_runs import compare_runs

    compared = compare_runs(
        arguments.a,
        arguments.b,
        storage_options=storage_options(arguments),
        measure=arguments.measure,
        max_change=_limits(arguments.max_change),
    )
    if arguments.as_json:
        from torchinstruments.store.manifest import encode_document

        sys.stdout.write(encode_document(compared.to_dict()).decode())
    _print_comparison(compared, sys.stderr if arguments.as_json else sys.stdout)
    if compared.met:
        return CONDITION_MET
    return 0 if compared.complete else 1


COMMAND = Command(
    name="compare",
    summary="compare two merged runs: layers that came and went, largest changes first",
    description="Compares two runs by what their merges left: series by series and rank by rank, never "
    "averaged over ranks. The change of a number is |b - a| / max(|a|, |b|): 0.1 is 10 % of the larger one, "
    "1 is a number that became 0, and 2 one that changed its sign. Where the worlds have different sizes, "
    "the lowest and the highest value over ranks are compared instead. Series are listed by their change as "
    "a share of the tensor's size, so that a number that is 0 but for rounding does not come first.",
    example="torchinstruments compare runs/first runs/second --max-change std=0.1",
    exit_codes="0 both were complete, 1 done, but one was not complete when it was merged, 2 could not, "
    "3 a limit of --max-change did not hold",
    add_arguments=_add_arguments,
    run=_run,
)


def _limits(texts: Sequence[str]) -> dict[str, float]:
    limits: dict[str, float] = {}
    for text in texts:
        metric, equals, share = text.rpartition("=")
        try:
            limit = float(share)
        except ValueError:
            equals = ""
            limit = 0.0
        if not equals or not metric:
            raise ConfigurationError(
                f"--max-change {text!r} cannot be read; give a metric and the largest change that is let "
                f"pass, like std=0.1 for 10 %"
            )
        if metric in limits:
            raise ConfigurationError(f"--max-change {metric!r} is given twice; give each metric once")
        limits[metric] = limit
    return limits


def _print_comparison(compared: "RunComparison", file: TextIO) -> None:
    result = compared.result
    for side in ("a", "b"):
        print(shown_text(_side_text(side.upper(), as_record(result[side]))), file=file)
    is_by_rank = result["compared_by"] == "rank"
    for name, text in (*_series_lines(result), *_layer_lines(as_record(result["layers"]))):
        print(f"  {name:<12} {shown_text(text)}", file=file)
    for name in ("lost_values", "gained_values"):
        for text in _one_sided_lines(result, name):
            print(f"  {name.replace('_', ' '):<12} {shown_text(text)}", file=file)
    for condition in as_records(result["conditions"]):
        print(f"  {'condition':<12} {shown_text(_condition_text(condition))}", file=file)
    _print_largest(result, file, is_by_rank=is_by_rank)


def _side_text(name: str, side: Record) -> str:
    state = "complete" if side["complete"] else "NOT COMPLETE when it was merged"
    ranks = side["ranks"] or "none"
    world = count_text(as_integer(side["world_size"]), "rank")
    return f"{name}: run {side['run_id']}, {world}, series of {ranks}, {state}, {side['url']}"


def _series_lines(result: Record) -> list[tuple[str, str]]:
    series = as_record(result["series"])
    how = f"rank by rank ({result['ranks_compared']})"
    if result["compared_by"] != "rank":
        reason = _REASON_TEXTS[str(result["not_by_rank_reason"])]
        how = f"lowest and highest over ranks, for {reason}"
    text = f"{count_text(as_integer(series['compared']), 'series', 'series')} {how}"
    lines = [("compared", f"{text}; {_MEASURE_TEXTS[str(result['measure'])]}")]
    if result["compared_by"] == "rank":
        only = ((side, result[f"ranks_only_in_{side}"]) for side in ("a", "b"))
        lines += [(f"only in {side.upper()}", f"ranks {ranks}") for side, ranks in only if ranks]
    for side in ("a", "b"):
        number = as_integer(series[f"only_in_{side}"])
        if number:
            lines.append((f"only in {side.upper()}", count_text(number, "series", "series")))
    for reason, number in as_record(series["not_compared"]).items():
        lines.append(("not compared", f"{count_text(as_integer(number), 'series', 'series')}: {reason}"))
    return lines


def _layer_lines(layers: Record) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for name in ("added", "removed", "type_changed"):
        found = as_records(layers[name])
        if found:
            named = ", ".join(_layer_text(one) for one in found[:_MAX_NAMED_LAYERS])
            more = len(found) - _MAX_NAMED_LAYERS
            text = f"{count_text(len(found), 'layer')}: {named}" + (f", {more:,} more" if more > 0 else "")
            lines.append((name.replace("_", " "), text))
    return lines


def _layer_text(layer: Record) -> str:
    name = str(layer["layer"]) or "(root)"
    if "type_a" in layer:
        return f"{name} ({layer['type_a']} in A, {layer['type_b']} in B)"
    return f"{name} ({layer['type']})" if layer["type"] else name


def _one_sided_lines(result: Record, name: str) -> list[str]:
    number = as_integer(as_record(result["series"])[name])
    if not number:
        return []
    text = count_text(number, "series", "series")
    shown = as_records(result[name])
    if not shown:
        return [text]
    first = shown[0]
    ranks = first.get(f"ranks_{name.removesuffix('_values')}")
    where = "" if not ranks else f" on {'rank' if str(ranks).isdecimal() else 'ranks'} {ranks}"
    return [f"{text}, first {_series_text(first)}{where}"]


def _series_text(one: Record) -> str:
    return f"{_layer_name(one)} {_signal_text(one)} {one['metric']}"


def _layer_name(one: Record) -> str:
    name = str(one["layer"]) or "(root)"
    return f"{name} call {one['call_index']}" if one["call_index"] else name


def _signal_text(one: Record) -> str:
    text = f"{one['signal']} {one['stage']}".rstrip()
    return text if one["tensor_path"] in {"output", "grad_output"} else f"{text} {one['tensor_path']}"


def _condition_text(condition: Record) -> str:
    text = f"{condition['metric']} by at most {as_number(condition['max_change']):.4g}: "
    if condition["met"] is None:
        return f"{text}NOT JUDGED, nothing was compared"
    beyond, lost = as_integer(condition["series_beyond"]), as_integer(condition["series_lost_values"])
    compared = count_text(as_integer(condition["series_compared"]), "series", "series")
    largest = condition["largest_change"]
    tail = "" if largest is None else f", the largest {as_number(largest):.4g}"
    if not condition["met"]:
        return f"{text}held, {compared}{tail}"
    parts = [f"{beyond:,} of {compared} beyond"] if beyond else []
    parts += [f"{count_text(lost, 'series', 'series')} lost the value"] if lost else []
    verdict = "EXCEEDED" if beyond else "NOT HELD"
    return f"{text}{verdict}, {' and '.join(parts)}{tail}"


def _print_largest(result: Record, file: TextIO, *, is_by_rank: bool) -> None:
    largest = as_records(result["largest_changes"])[:_NUM_LARGEST]
    if not largest:
        return
    rows = []
    for one in largest:
        cells = _cells_by_rank(one) if is_by_rank else _cells_by_range(one)
        beside = ", ".join(str(name) for name in as_list(one["differs_in"]))
        rows.append([_layer_name(one), _signal_text(one), str(one["metric"]), beside, *cells])
    changed = as_integer(as_record(result["series"])["changed"])
    of = f"the first {len(largest)} of {count_text(changed, 'series', 'series')} that changed"
    print(
        f"\nlargest changes by share of size, {of}\nchange = |b - a| / larger magnitude of the two; "
        "share of size = |b - a| / largest of both and the tensor's std in A and in B",
        file=file,
    )
    headings = ["layer", "signal", "metric", "differs in", "rank", "A", "B", "change", "share of size"]
    print_table(headings, rows, file=file, num_text_columns=4)


def _cells_by_rank(one: Record) -> list[str]:
    pair = as_record(one["largest"])
    return [str(pair["rank"]), *_pair_cells(pair)]


def _cells_by_range(one: Record) -> list[str]:
    end = "lowest" if as_record(one["lowest"])["share_of_size"] == one["share_of_size"] else "highest"
    pair = as_record(one[end])
    a, b = as_record(pair["a"]), as_record(pair["b"])
    return [f"{end} {a['rank']}, {b['rank']}", *_pair_cells(pair)]


def _pair_cells(pair: Record) -> list[str]:
    values = [f"{as_number(as_record(pair[side])['value']):.4g}" for side in ("a", "b")]
    return [*values, *(f"{as_number(pair[name]):.2%}" for name in ("change", "share_of_size"))]
