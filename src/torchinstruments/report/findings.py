"""What a merge says in lines: steps, replicas, the first nonfinite value, checks, late ranks."""

from collections.abc import Sequence

from torchinstruments.report.document import Record, as_integer, as_list, as_number, as_record
from torchinstruments.report.texts import count_text

__all__ = ["finding_lines"]


_MAX_CODES = 5
_MAX_COUNTS = 3
"""With more different counts of outcomes than this between ranks only their range is printed."""

_OUTCOMES = ("applied", "skipped", "abandoned", "unknown")
_SPOKEN_OF = ("critical", "warning")

_NOT_JUDGED = {
    "no_fingerprints": "not known: the run has no fingerprints (fingerprints=True takes them)",
    "no_replica_keys": "not known: no tensor is known to be the same on several ranks",
    "no_replicas": "not known: each rank holds parts of the model that no other rank holds",
    "no_common_attempts": "not known: no attempt has fingerprints of two replicas",
    "no_timed_attempts": "not known: no attempt after the first has times",
    "single_rank": "not known: one rank alone has times",
    "few_common_attempts": "not known: the ranks have too few attempts in common",
    "other_model_trained": "not known: another model is trained beside this one, so that no time is a rank's "
    "own work alone",
    "clock_differs": "not known: ranks were timed by different clocks",
    "no_statistic_tells": "not known: no statistic of this run tells",
}

_NO_TIMES = "not known: the run has no steps"

_UNKNOWN = "not known"
_NOT_YET = {
    _NOT_JUDGED["no_fingerprints"]: "not known: none of the ranks, which still run, has written fingerprints "
    "(fingerprints=True takes them)",
    _NO_TIMES: "not known: none of the ranks, which still run, has written steps",
}
"""What is said instead of a run whose ranks may write it still."""


def finding_lines(result: Record) -> list[tuple[str, str]]:
    """Returns name and text of each line, from ``result.json`` (the merge command)."""
    lines = _lines(result)
    if not as_list(as_record(result["coverage"])["running_ranks"]):
        return lines
    return [(name, _NOT_YET.get(text, text).replace(_UNKNOWN, f"{_UNKNOWN} yet", 1)) for name, text in lines]


def _lines(result: Record) -> list[tuple[str, str]]:
    return [
        ("same steps", _steps_text(as_record(result["steps"]), as_record(result["coverage"]))),
        *_modes_lines(as_record(result["comparison"])),
        *_outcomes_lines(as_record(result["steps"])),
        ("replicas", _replicas_text(as_record(result["replicas"]))),
        ("nonfinite", _nonfinite_text(as_record(result["first_nonfinite"]))),
        *_checks_lines(as_record(result["findings"])),
        ("late", _late_text(as_record(result["own_work"]))),
        *_unsynchronised_lines(as_record(as_record(result["steps"])["unsynchronised_steps"])),
        ("furthest", _furthest_text(as_record(result["comparison"]))),
    ]


def _steps_text(steps: Record, coverage: Record) -> str:
    compared = as_integer(steps["compared_attempts"])
    if steps["same_steps"] is None:
        if len({*as_list(coverage["expected_ranks"]), *as_list(coverage["present_ranks"])}) < 2:
            return "not asked: the run has one rank, and none to compare it with"
        return "not known: no two ranks have the same attempt"
    if not steps["same_steps"]:
        first = as_record(steps["first_disagreement"])
        difference = as_record(as_list(first["differences"])[0])
        number = as_integer(steps["disagreeing_attempts"])
        return (
            f"NO, {number:,} of {count_text(compared, 'attempt')} differ, first {_moment(first)}: "
            f"{difference['column']} {_values_text(difference)}"
        )
    text = f"yes, in {count_text(compared, 'attempt')}"
    incomplete = as_integer(steps["incomplete_attempts"])
    if incomplete:
        first = as_record(steps["first_incomplete"])
        without = first["ranks_without_row"]
        without = _ranks_text({"ranks": without})
        text += f"; {incomplete:,} not on all ranks, first {_moment(first)}, without {without}"
    return text


def _modes_lines(comparison: Record) -> list[tuple[str, str]]:
    """Returns which ranks ran the same forward in another mode; nothing where none did."""
    if comparison["first_in_different_modes"] is None:
        return []
    first = as_record(comparison["first_in_different_modes"])
    number = count_text(as_integer(comparison["forwards_in_different_modes"]), "forward")
    layers = as_integer(first["num_layers"])
    where = str(first["layer"]) or "(root)"
    if layers > 1:
        where += f" and {count_text(layers - 1, 'further layer')}"
    text = f"DIFFER in {number}, not compared for that, first {_moment(first)}: {_values_text(first)}"
    return [("modes", f"{text}, in {where}")]


def _outcomes_lines(steps: Record) -> list[tuple[str, str]]:
    """Returns what became of the optimizers' steps; ranks that counted the same stand together."""
    ranks = [as_record(one) for one in as_list(steps["ranks"])]
    if not ranks:
        return []
    counted: dict[tuple[int, ...], list[int]] = {}
    for one in ranks:
        counts = tuple(as_integer(one[name]) for name in _OUTCOMES)
        counted.setdefault(counts, []).append(as_integer(one["rank"]))
    if len(counted) > _MAX_COUNTS:
        ranges = (_range_text(name, ranks) for name in _OUTCOMES)
        return [("outcomes", f"optimizer steps by rank: {', '.join(text for text in ranges if text)}")]
    groups = "; ".join(_counts_text(counts, held) for counts, held in counted.items())
    return [("outcomes", f"optimizer steps: {groups}")]


def _counts_text(counts: Sequence[int], ranks: Sequence[int]) -> str:
    """Says how many steps ended how, of each of these ranks; no count is a sum over ranks."""
    from torchinstruments.merge.rank_sets import ranks_text

    shown = [f"{number:,} {name}" for name, number in zip(_OUTCOMES, counts, strict=True) if number]
    of = f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {ranks_text(ranks)}"
    return f"{', '.join(shown) or 'none'} on {of}"


def _range_text(name: str, ranks: Sequence[Record]) -> str:
    """Names the lowest and the highest count of ranks, each with the first rank that has it."""
    counts = [(as_integer(one[name]), as_integer(one["rank"])) for one in ranks]
    low = min(counts)
    high = max(counts, key=lambda one: (one[0], -one[1]))
    if low[0] == high[0]:
        return f"{low[0]:,} {name} on each" if low[0] else ""
    return f"{low[0]:,} (rank {low[1]}) to {high[0]:,} (rank {high[1]}) {name}"


def _replicas_text(replicas: Record) -> str:
    if replicas["equal"] is None:
        return _NOT_JUDGED[str(replicas["unavailable_reason"])]
    judged = count_text(as_integer(replicas["judged_attempts"]), "attempt")
    if replicas["equal"]:
        return f"equal, in {judged}"
    first = as_record(replicas["first_divergence"])
    again = first["equal_again"]
    ending = f"equal again {_moment(as_record(again))}" if first["healed"] else "not seen equal since"
    return f"DIFFER, first {_moment(first)}: {first['tensor']} {_values_text(first)}; {ending}"


def _nonfinite_text(found: Record) -> str:
    if found["found"] is None:
        return _NOT_JUDGED[str(found["unavailable_reason"])]
    if not found["found"]:
        return "none"
    first = as_record(found["first"])
    layer = str(first["layer"]) or "(root)"
    signal = f"{first['signal']} {first['stage']}".rstrip()
    text = f"FIRST on {_ranks_text(first)}, {_moment(first)}, {first['phase']}: {layer} {signal}"
    scale = first["loss_scale"]
    if isinstance(scale, float) and scale != 1.0:
        text += f", at loss scale {scale:g}"
    if not first["before_reduction"]:
        text += "; after the reduction, so that the rank where it was born is not known"
    missing = as_record(first["ranks_missing"])
    for reason, ranks in missing.items():
        who = _ranks_text({"ranks": ranks})
        text += f"; {who} {'does' if who.startswith('rank ') else 'do'} not tell ({reason})"
    return text


def _late_text(own_work: Record) -> str:
    generations = [as_record(one) for one in as_list(own_work["generations"])]
    judged = [one for one in generations if one["judged"]]
    if not judged:
        return _NOT_JUDGED[str(generations[-1]["unavailable_reason"])] if generations else _NO_TIMES
    late = [one for one in judged if one["latest"] is not None]
    if not late:
        return "none by its own work"
    last = late[-1]
    latest = as_record(last["latest"])
    host = f" on {latest['host']}" if latest["host"] else ""
    text = (
        f"rank {latest['rank']}{host} by its own work, {as_number(latest['late_by_s']):.3g} s an attempt "
        f"({as_number(latest['share_of_attempt']):.0%} of its time), generation {last['generation']}"
    )
    if not last["waiting_ranks"]:
        return text
    waiting = _ranks_text({"ranks": last["waiting_ranks"]})
    return f"{text}; {waiting} {'waits' if waiting.startswith('rank ') else 'wait'} for it"


def _furthest_text(comparison: Record) -> str:
    from torchinstruments.merge.digest import distance_text

    widest = as_list(comparison["widest"])
    if not widest:
        if not as_integer(comparison["cells"]):
            if comparison["first_in_different_modes"] is not None:
                return "not known: no forward was measured on two ranks in the same mode"
            return "not known: no forward was measured on two ranks"
        return "none among three ranks or more; of two neither is the furthest"
    one = as_record(widest[0])
    layer = str(one["layer"]) or "(root)"
    what = f"{layer} {one['signal']} {one['stage']}".rstrip()
    mads = None if one["mads"] is None else as_number(one["mads"])
    reason = str(one["unavailable_reason"])
    distance = distance_text(as_number(one["value"]), as_number(one["median_of_ranks"]), mads, reason)
    text = f"rank {one['rank']}, {_moment(one)}: {what} {one['metric']} {distance}"
    return f"{text}; ranks differ in {one['differs_in']}" if one["differs_in"] else text


def _unsynchronised_lines(found: Record) -> list[tuple[str, str]]:
    number = as_integer(found["steps"])
    if not number:
        return []
    first = as_record(found["first"])
    steps = count_text(number, "step")
    text = f"{steps} applied to gradients that were not synchronised, first {_moment(first)}"
    return [("NOT SYNCED", f"{text}, {_ranks_text(first)}")]


def _checks_lines(found: Record) -> list[tuple[str, str]]:
    """Returns a line for each kind of finding, the gravest ones; nothing where no rank has checks."""
    checked = str(found["ranks_with_checks"])
    if not checked:
        return []
    kinds = [as_record(one) for one in as_list(found["by_code"])]
    grave = [one for one in kinds if one["severity"] in _SPOKEN_OF]
    lines = [("checks", _kind_text(one)) for one in grave[:_MAX_CODES]]
    left_out = len(kinds) - len(lines) + as_integer(found["codes_left_out"])
    if left_out:
        kinds_text = count_text(left_out, "kind of finding", "kinds of findings")
        which = "further ones" if lines else "none graver than information"
        lines.append(("checks", f"{kinds_text} in result.json, {which}"))
    if not kinds:
        ran = ", ".join(as_record(found["checks_run"]))
        lines.append(("checks", f"nothing found; ran: {ran or 'none'}"))
    if found["ranks_without_checks"]:
        without = _ranks_text({"ranks": found["ranks_without_checks"]})
        lines.append(("checks", f"{without} had none"))
    unavailable = len(as_list(found["unavailable"])) + as_integer(found["unavailable_left_out"])
    if unavailable:
        reasons = count_text(unavailable, "reason")
        lines.append(("checks", f"{reasons} why something could not be looked at, in result.json"))
    if found["findings_not_kept"]:
        number = count_text(as_integer(found["findings_not_kept"]), "finding")
        where = _ranks_text({"ranks": found["ranks_with_findings_not_kept"]})
        lines.append(("checks", f"{number} of {where} were counted and not kept"))
    return lines


def _kind_text(kind: Record) -> str:
    first = as_record(kind["first"])
    finding = as_record(first["finding"])
    names = [str(name) for name in as_list(finding.get("names", ()))]
    about = f", {names[0]}" if names else ""
    if len(names) > 1:
        about += f" and {as_integer(finding.get('num_names', len(names))) - 1:,} more"
    text = f"{str(kind['severity']).upper()} {kind['code']} on {_ranks_text(kind)}"
    text += f", first on rank {first['rank']} {_moment(first)}{about}"
    others = kind["ranks_that_did_not_see_it"]
    return f"{text}; not on {_ranks_text({'ranks': others})}" if others else text


def _moment(record: Record) -> str:
    names = {"attempt": "attempt", "forward_in_attempt": "forward", "forward_index": "forward"}
    parts = [f"{noun} {record[name]}" for name, noun in names.items() if record.get(name) is not None]
    return f"in generation {record['generation']}, {', '.join(parts)}"


def _values_text(record: Record) -> str:
    values = [as_record(one) for one in as_list(record["values"])]
    shown = [f"{one['value']} on {_ranks_text(one)}" for one in values[:3]]
    more = as_integer(record["num_values"]) - len(shown)
    return ", ".join(shown) + (f", {count_text(more, 'further value')}" if more else "")


def _ranks_text(record: Record) -> str:
    ranks = str(record["ranks"])
    return f"rank {ranks}" if ranks.isdecimal() else f"ranks {ranks}"
