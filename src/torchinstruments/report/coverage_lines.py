"""What a merge says of what was there, in lines."""

from torchinstruments.report.document import Record, as_integer, as_list, as_record, as_records
from torchinstruments.report.texts import count_text

__all__ = ["coverage_lines", "headline", "not_compared_text", "num_samples"]

_MAX_NAMED_FILES = 10
_MAX_NAMED_ENDS = 5

_NOT_COMPARED_TEXTS = {
    "shard_without_replica_key": "of parts of sharded tensors, for nothing says which ranks hold the same",
    "scope_not_known": "of tensors that may be whole or a part",
    "two_processes": "of forwards that two processes of a rank have",
    "repeated": "that a later row of the same forward replaced",
}


def num_samples(result: Record) -> int:
    """Returns how many samples the processes of all ranks took, from ``result.json``."""
    return sum(as_integer(one["samples"]) for one in as_records(result["ranks"]))


def headline(samples: int, *, is_complete: bool) -> str:
    """Returns whether all that was expected was there."""
    if is_complete:
        return "complete" if samples else "complete, but no sample was taken"
    return "NOT COMPLETE" if samples else "NOT COMPLETE, and no sample was found"


def coverage_lines(coverage: Record) -> list[tuple[str, str]]:
    """Returns name and text of each line, from the section of ``result.json``."""
    from torchinstruments.merge.rank_sets import ranks_text

    present = _integers(coverage["present_ranks"])
    lines = [("present", f"{count_text(len(present), 'rank')} ({ranks_text(present)})")]
    for name in ("missing", "interrupted", "running", "unexpected"):
        ranks = _integers(coverage[f"{name}_ranks"])
        if ranks:
            lines.append((name, f"{count_text(len(ranks), 'rank')} ({ranks_text(ranks)})"))
    ends = as_records(coverage["ended_by"])
    if ends:
        shown = [f"{one['kind']} on {_ranks_text(str(one['ranks']))}" for one in ends[:_MAX_NAMED_ENDS]]
        if len(ends) > _MAX_NAMED_ENDS:
            shown.append(count_text(len(ends) - _MAX_NAMED_ENDS, "further kind"))
        lines.append(("ended by", ", ".join(shown)))
    if not coverage["expected_ranks_known"]:
        lines.append(("expected", "not known in full: the rank policy does not tell which ranks observe"))
    for overlap in as_records(coverage["overlapping_ranks"]):
        processes = ", ".join(str(one) for one in as_list(overlap["processes"]))
        where = f"rank {overlap['rank']} of generation {overlap['generation']}"
        how = "by several processes, which gave out the same sample ids"
        if not overlap["same_sample_ids"]:
            how = "by several live processes"
        lines.append(("overlap", f"{where} was held {how}: {processes}"))
    unverified = _integers(coverage["unverified_ranks"])
    if unverified:
        ranks = f"{count_text(len(unverified), 'rank')} ({ranks_text(unverified)})"
        lines.append(("unverified", f"{ranks}: began without an answer of leader or store"))
    lines += _file_lines(coverage)
    for noun, key in (("dropped", "rows_dropped"), ("foreign", "foreign_parts")):
        number = as_integer(coverage[key])
        if number:
            lines.append((noun, count_text(number, "row" if noun == "dropped" else "part of another run")))
    for host, rows in as_record(coverage["rows_in_spool"]).items():
        lines.append(("in spool", f"{count_text(as_integer(rows), 'row')} still on host {host}"))
    lines += _alignment_lines(as_record(coverage["alignment"]))
    return lines


def not_compared_text(comparison: Record) -> str:
    """Says in one sentence which rows no other rank was held against; empty where there are none."""
    reasons = as_record(comparison["rows_not_compared"])
    parts = [
        f"{as_integer(number):,} {_NOT_COMPARED_TEXTS[reason]}"
        for reason, number in reasons.items()
        if number
    ]
    if not parts:
        return ""
    number = sum(as_integer(one) for one in reasons.values())
    all_rows = count_text(as_integer(comparison["rows"]), "row")
    why = "; ".join(parts)
    return f"{number:,} of {all_rows} were not compared between ranks and are in no picture: {why}."


def _file_lines(coverage: Record) -> list[tuple[str, str]]:
    quarantined = as_records(coverage["quarantined"])
    lines = [("set aside", f"{one['file']}: {one['reason']}") for one in quarantined[:_MAX_NAMED_FILES]]
    if len(quarantined) > _MAX_NAMED_FILES:
        more = len(quarantined) - _MAX_NAMED_FILES
        lines.append(("set aside", f"{count_text(more, 'more file')}, named in result.json"))
    for one in as_records(coverage["missing_parts"]):
        parts = count_text(as_integer(one["parts"]), "part")
        lines.append(("lost", f"{parts} of {one['table']} of rank {one['rank']}, process {one['process']}"))
    disagreements = as_records(coverage["disagreements"])
    if disagreements:
        rows = sum(as_integer(one["rows"]) for one in disagreements)
        first = disagreements[0]
        text = f"{count_text(rows, 'row')}, first in {first['file']}: {first['column']} {first['found']}"
        lines.append(("disagree", f"{text} where {first['expected']} is due"))
    return lines


def _alignment_lines(alignment: Record) -> list[tuple[str, str]]:
    """Returns how samples line up between ranks; nothing where fewer than two ranks have any."""
    share = alignment["share_common_to_all_ranks"]
    num_ranks = as_integer(alignment["ranks"])
    if num_ranks < 2 or not isinstance(share, float):
        return []
    samples = count_text(as_integer(alignment["samples"]), "sample")
    by = ", ".join(_texts(alignment["key"]))
    return [("aligned", f"{samples} by {by}; {share:.1%} common to {count_text(num_ranks, 'rank')}")]


def _ranks_text(ranks: str) -> str:
    return f"rank {ranks}" if ranks.isdecimal() else f"ranks {ranks}"


def _integers(value: object) -> list[int]:
    return [as_integer(one) for one in as_list(value)]


def _texts(value: object) -> list[str]:
    return [str(one) for one in as_list(value)]
