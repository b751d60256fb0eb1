"""A merge in a few lines: how a `MergeResult` shows itself."""

import html
from collections.abc import Mapping

import msgspec

from torchinstruments.merge.answers import (
    Coverage,
    Divergence,
    FirstNonfinite,
    ModeSplit,
    StepDisagreement,
    WidestSeries,
    answer,
    answers,
)
from torchinstruments.merge.rank_sets import ranks_text

__all__ = ["digest_html", "digest_lines", "distance_text"]

MAX_SHOWN_CHARACTERS = 200
"""Of the text of a line, which may name a layer; the rest is in ``result.json``."""

_COLUMNS = ("layer", "signal", "metric", "rank", "value", "median of ranks", "median deviations", "where")


def digest_lines(result: Mapping[str, object]) -> list[tuple[str, str]]:
    """Returns name and text of four lines, of five where ranks ran a forward in different modes."""
    lines = [
        ("coverage", _coverage_text(result)),
        ("steps", _steps_and_replicas_text(result)),
        *_modes_lines(result),
        ("first nonfinite", _nonfinite_text(result)),
        ("widest", _widest_text(result)),
    ]
    return [(name, _on_one_line(text)) for name, text in lines]


def digest_html(title: str, result: Mapping[str, object]) -> str:
    """Returns the lines and the widest series as HTML; every text is escaped and shortened."""
    rows = "".join(
        f"<tr><th>{_escaped(name)}</th><td>{_escaped(text)}</td></tr>" for name, text in digest_lines(result)
    )
    head = "".join(f"<th>{_escaped(name)}</th>" for name in _COLUMNS)
    widest = "".join(_widest_row(one) for one in answers(result["comparison"], "widest", WidestSeries))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{widest}</tbody></table>" if widest else ""
    return f"<div><p><code>{_escaped(title)}</code></p><table><tbody>{rows}</tbody></table>{table}</div>"


def _coverage_text(result: Mapping[str, object]) -> str:
    coverage = msgspec.convert(result["coverage"], Coverage)
    text = f"{len(coverage.present_ranks)} of {len(coverage.expected_ranks)} expected ranks"
    for name in ("missing", "interrupted", "running"):
        ranks: tuple[int, ...] = getattr(coverage, f"{name}_ranks")
        if ranks:
            text += f", {name}: {ranks_text(ranks)}"
    if coverage.ended_by:
        text += f", ended by {', '.join(f'{one.kind} on {one.ranks}' for one in coverage.ended_by[:3])}"
    if coverage.quarantined:
        text += f", files set aside: {len(coverage.quarantined)}"
    if coverage.rows_dropped:
        text += f", rows dropped: {coverage.rows_dropped:,}"
    share = coverage.alignment.share_common_to_all_ranks
    if share is not None:
        text += f"; {coverage.alignment.samples:,} forwards, {share:.1%} common to all ranks"
    return text


def _steps_and_replicas_text(result: Mapping[str, object]) -> str:
    coverage = msgspec.convert(result["coverage"], Coverage)
    if len({*coverage.expected_ranks, *coverage.present_ranks}) < 2:
        return "of one rank, which has none to be compared with"
    return f"{_steps_text(result)}; replicas {_replicas_text(result)}"


def _steps_text(result: Mapping[str, object]) -> str:
    same = answer(result["steps"], "same_steps", bool)
    if same is None:
        return "not compared, for no two ranks have the same attempt"
    if same:
        return "the same on all ranks"
    first = answer(result["steps"], "first_disagreement", StepDisagreement)
    assert first is not None
    difference = first.differences[0]
    held = ", ".join(f"{one.value} on {one.ranks}" for one in difference.values[:2])
    return f"DIFFER, first at {_place(first.generation, first.attempt)}: {difference.column} {held}"


def _modes_lines(result: Mapping[str, object]) -> list[tuple[str, str]]:
    first = answer(result["comparison"], "first_in_different_modes", ModeSplit)
    if first is None:
        return []
    number = answer(result["comparison"], "forwards_in_different_modes", int)
    held = ", ".join(f"{one.value} on {one.ranks}" for one in first.values)
    place = _place(first.generation, first.attempt, first.forward_in_attempt, first.forward_index)
    return [("modes", f"DIFFER in {number:,} forwards, which are not compared, first at {place}: {held}")]


def _replicas_text(result: Mapping[str, object]) -> str:
    equal = answer(result["replicas"], "equal", bool)
    if equal is None:
        reason = answer(result["replicas"], "unavailable_reason", str) or ""
        return f"not judged ({reason.replace('_', ' ')})"
    if equal:
        return "equal"
    first = answer(result["replicas"], "first_divergence", Divergence)
    assert first is not None
    return f"DIFFER, first at {_place(first.generation, first.attempt)}: {first.tensor}"


def _nonfinite_text(result: Mapping[str, object]) -> str:
    found = answer(result["first_nonfinite"], "found", bool)
    if found is None:
        return "not known, for no statistic tells"
    first = answer(result["first_nonfinite"], "first", FirstNonfinite)
    if first is None:
        return "none"
    place = _place(first.generation, first.attempt, first.forward_in_attempt, first.forward_index)
    what = f"{first.layer or '(root)'} {first.signal}"
    ranks = f"rank {first.ranks}" if first.ranks.isdecimal() else f"ranks {first.ranks}"
    return f"{ranks} at {place}, {first.phase}: {what}"


def _widest_text(result: Mapping[str, object]) -> str:
    widest = answers(result["comparison"], "widest", WidestSeries)
    if not widest:
        return "none among three ranks or more; of two neither is the furthest"
    one = widest[0]
    text = (
        f"{one.layer or '(root)'} {one.signal} {one.metric}, rank {one.rank}: "
        f"{distance_text(one.value, one.median_of_ranks, one.mads, one.unavailable_reason)}, at {_where(one)}"
    )
    return f"{text}; ranks differ in {one.differs_in}" if one.differs_in else text


def distance_text(value: float, median: float, mads: float | None, reason: str) -> str:
    """Returns how far a value is from the median over ranks, as people read it."""
    shown, middle = f"{value:.4g}", f"{median:.4g}"
    if shown == middle:
        shown, middle = repr(value), repr(median)
    if mads is not None:
        return f"{shown}, {mads:.3g} median deviations from {middle}"
    if reason == "mad_is_zero":
        return f"{shown}, where half of the ranks or more hold {middle}"
    return f"{shown}, too far from the median {middle} for a number of median deviations"


def _widest_row(one: WidestSeries) -> str:
    cells = (
        one.layer or "(root)",
        f"{one.signal} {one.stage}".rstrip(),
        one.metric,
        str(one.rank),
        f"{one.value:.6g}",
        f"{one.median_of_ranks:.6g}",
        one.unavailable_reason if one.mads is None else f"{one.mads:.3g}",
        _where(one),
    )
    return f"<tr>{''.join(f'<td>{_escaped(_on_one_line(cell))}</td>' for cell in cells)}</tr>"


def _where(one: WidestSeries) -> str:
    return _place(one.generation, one.attempt, one.forward_in_attempt, one.forward_index)


def _place(generation: int, attempt: int | None, forward: int | None = None, index: int | None = None) -> str:
    parts = [f"generation {generation}"]
    if attempt is not None:
        parts.append(f"attempt {attempt}")
    number = forward if index is None else index
    if number is not None:
        parts.append(f"forward {number}")
    return ", ".join(parts)


def _on_one_line(text: str) -> str:
    """Returns a text that a program's own names cannot break: no line ends, nothing that moves a cursor."""
    shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
    return shown if len(shown) <= MAX_SHOWN_CHARACTERS else f"{shown[: MAX_SHOWN_CHARACTERS - 3]}..."


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)
