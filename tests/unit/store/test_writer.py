"""What a writer makes durable, when, and what it does while it cannot."""

import errno
import json
import math
from dataclasses import replace

import pytest

from torchinstruments.records import ChecksRecord, Counters, ErrorRecord, Signal
from torchinstruments.store.catalog import decode_catalog
from torchinstruments.store.checks import decode_checks
from torchinstruments.store.waiting import RETRY_AFTER_S
from unit.store.material import (
    attempt,
    backward,
    fingerprint,
    forward,
    measurement,
    module,
    run_record,
)
from unit.store.rigs import Rig


def test_the_first_manifest_says_who_runs_at_once() -> None:
    """Status can be asked before the first row is durable."""
    rig = Rig(spool_path="/spool")
    rig.writer.start(run_record(), [module(0)])

    manifest = rig.manifest()
    assert (manifest.rank, manifest.process, manifest.pid, manifest.status) == (
        0,
        "1a2b3c4d",
        4711,
        "running",
    )
    assert manifest.next_write_due_s == 300
    assert manifest.spool_path == "/spool"


def test_the_manifest_beats_at_least_every_five_minutes_when_nothing_happens() -> None:
    """Readers tell a live process from a dead one by it."""
    rig = Rig()
    rig.writer.start(run_record(), ())

    rig.pass_time(301)

    assert rig.num_manifests() == 2


def test_the_manifest_is_written_at_most_once_a_minute_however_much_happens() -> None:
    """Its cost does not grow with the number of parts."""
    rig = Rig(buffer_rows=1)
    rig.writer.start(run_record(), ())

    for ordinal in range(120):
        rig.writer.add_sample(forward(ordinal, measurement(), settled=True))
        rig.pass_time(1)

    assert rig.num_manifests() == 3
    assert len(rig.target.of("history")) == 120


def test_the_size_of_the_manifest_does_not_grow_with_the_parts() -> None:
    """It has counts, never a list of parts."""
    rig = Rig(buffer_rows=1)
    rig.writer.start(run_record(), ())
    before = len(rig.target.last("process-"))

    for ordinal in range(50):
        rig.writer.add_sample(forward(ordinal, measurement(), settled=True))
    rig.pass_time(61)

    assert len(rig.target.last("process-")) < before + 200


def test_the_manifest_tells_the_last_durable_sample_and_the_counters() -> None:
    """What lies in the buffer does not count as durable."""
    rig = Rig()
    rig.training = Counters(forwards=12, samples=2, rows_dropped=5)
    rig.writer.start(run_record(), ())
    rig.writer.add_sample(forward(3, measurement(), settled=True))
    assert rig.manifest().last_sample_id is None

    rig.writer.close(0)

    manifest = rig.manifest()
    assert manifest.last_sample_id == 3
    assert manifest.last_sample_at.startswith("2023-11-14T22:13:20.000003")
    assert (manifest.counters.forwards, manifest.counters.rows, manifest.counters.rows_dropped) == (12, 3, 5)
    assert manifest.counters.parts == 2
    assert manifest.tables["history"].rows_in_spool == 3


def test_closing_makes_everything_durable_and_says_closed() -> None:
    """Nothing is left in memory, and the target is waited for before and after the manifest."""
    rig = Rig()
    rig.writer.start(run_record(), [module(0)])
    rig.writer.add_sample(forward(0, measurement()))
    rig.writer.add_attempts([attempt(0)])

    assert rig.writer.close(5.0)

    assert (len(rig.rows("history")), len(rig.rows("samples")), len(rig.rows("steps"))) == (3, 1, 1)
    assert rig.manifest().status == "closed"
    assert rig.target.finished_within == [5.0, 5.0]


def test_closing_twice_writes_nothing_twice() -> None:
    """A second close finds everything done."""
    rig = Rig()
    rig.writer.start(run_record(), ())
    rig.writer.close(0)
    documents = len(rig.target.documents)

    assert rig.writer.close(0)

    assert len(rig.target.documents) == documents


def test_a_flush_tells_the_manifest_of_new_losses_and_errors_alone() -> None:
    """A writer that never gets to its close has told what was given up; a flush without any writes none."""
    rig = Rig()
    rig.writer.start(run_record(), [module(0)])
    assert rig.num_manifests() == 1

    rig.training = Counters(rows_dropped=7)
    rig.writer.flush()
    assert rig.manifest().counters.rows_dropped == 7

    rig.writer.add_error(ErrorRecord("sink", "", "RuntimeError", "the writer thread ended"))
    rig.writer.flush()
    assert [error.message for error in rig.manifest().errors] == ["the writer thread ended"]

    rig.writer.flush()
    assert rig.num_manifests() == 3
    assert rig.manifest().status == "running"


def test_the_catalog_is_written_when_layers_change_and_with_the_heartbeat_when_they_fire() -> None:
    """At once, then at most once a minute; what only counts calls waits, and is told at the close."""
    rig = Rig()

    def fired() -> list[int]:
        written = [data for name, data in rig.target.documents if name == "modules-1a2b3c4d.json"]
        return [
            one.fired
            for data in written
            for one in decode_catalog(data).modules
            if one.layer == module(0).layer
        ]

    rig.writer.start(run_record(), [module(0)])
    for number in range(1, 240):
        rig.writer.set_modules([module(0, fired=number)])
        rig.pass_time(1)
    assert fired() == [0]
    rig.pass_time(1)
    assert fired() == [0, 239]

    rig.writer.set_modules([module(0, fired=240), module(1)])
    rig.pass_time(59)
    assert fired() == [0, 239]
    rig.pass_time(1)
    assert fired() == [0, 239, 240]

    rig.writer.set_modules([module(0, fired=241), module(1)])
    rig.writer.close(1.0)
    assert fired() == [0, 239, 240, 241]
    catalog = decode_catalog(rig.target.last("modules-"))
    assert (catalog.run_id, catalog.rank, catalog.process) == ("run-1", 0, "1a2b3c4d")


def test_a_report_of_checks_that_was_refused_is_written_when_there_is_room() -> None:
    """At a flush, a minute later and at the close; a flush that could not write it says so."""
    rig = Rig()
    rig.writer.start(run_record(), [module(0)])

    def numbers() -> list[int]:
        written = [data for name, data in rig.target.documents if name == "checks-1a2b3c4d.json"]
        return [len(decode_checks(data).sessions[0].checks_run) for data in written]

    def put(number: int) -> None:
        rig.target.is_full = True
        report = {"checks_run": ["change"] * number}
        rig.writer.write_checks(ChecksRecord(0, json.dumps(report).encode()))
        assert rig.writer.flush() is False
        rig.target.is_full = False

    put(1)
    assert numbers() == []
    assert rig.writer.flush() is True
    assert numbers() == [1]
    put(2)
    rig.pass_time(61)
    assert numbers() == [1, 2]
    put(3)
    assert rig.writer.close(10.0) is True
    assert numbers() == [1, 2, 3]


def test_an_unchanged_catalog_is_not_written_again() -> None:
    """The same layers with the same counts give no new document."""
    rig = Rig()
    rig.writer.start(run_record(), [module(0)])

    rig.writer.set_modules([module(0)])
    rig.pass_time(120)

    assert sum(name.startswith("modules-") for name, _ in rig.target.documents) == 1


def test_errors_stand_in_the_manifest_counted_by_probe() -> None:
    """The last hundred are listed, all are counted."""
    rig = Rig()
    rig.writer.start(run_record(), ())
    for index in range(150):
        rig.writer.add_error(ErrorRecord("reducer", "layer", "ValueError", f"{index} " + "x" * 1000))

    rig.writer.close(0)

    manifest = rig.manifest()
    assert manifest.counters.errors == {"reducer": 150}
    assert len(manifest.errors) == 100
    assert manifest.errors[-1].message.startswith("149 ")
    assert len(manifest.errors[-1].message) == 500
    assert manifest.errors[-1].at.startswith("2023-11-14T22:")


def test_a_full_disk_loses_nothing_that_memory_can_hold() -> None:
    """Rows wait while the target refuses, and become durable in order when it takes them again."""
    rig = Rig(buffer_rows=3)
    rig.target.is_full = True
    for ordinal in range(5):
        rig.writer.add_sample(forward(ordinal, measurement(), settled=True))
    assert not rig.writer.flush()

    rig.target.is_full = False
    rig.pass_time(int(RETRY_AFTER_S))

    assert [row["sample_id"] for row in rig.rows("history")[::3]] == [0, 1, 2, 3, 4]
    assert rig.writer.counters().rows_dropped == 0
    assert rig.writer.counters().rows == 15


def test_a_full_disk_is_not_hammered() -> None:
    """A refused part is tried again after some seconds, not with every sample."""
    rig = Rig(buffer_rows=3)
    rig.target.is_full = True

    for ordinal in range(50):
        rig.writer.add_sample(forward(ordinal, measurement(), settled=True))

    assert len(rig.reported) == 1


def test_beyond_the_bound_the_oldest_rows_are_given_up_and_counted() -> None:
    """Memory stays bounded, and the newest rows survive."""
    rig = Rig(buffer_rows=3, max_bytes=20_000)
    rig.target.is_full = True
    for ordinal in range(40):
        rig.writer.add_sample(forward(ordinal, measurement(), settled=True))
    rig.target.is_full = False

    rig.writer.start(run_record(), ())
    assert rig.writer.close(0)

    kept = sorted({row["sample_id"] for row in rig.rows("history")})
    dropped = rig.writer.counters().rows_dropped
    assert kept == list(range(40 - len(kept), 40))
    assert len(kept) * 3 + dropped == 120
    assert dropped > 0
    assert rig.manifest().tables["history"].rows_dropped == dropped


def test_what_a_full_disk_did_is_told_in_the_manifest_and_to_the_owner() -> None:
    """The same failure again and again is counted, but listed once."""
    rig = Rig(buffer_rows=3)
    rig.target.is_full = True
    for ordinal in range(4):
        rig.writer.add_sample(forward(ordinal, measurement(), settled=True))
        rig.clock.now_s += RETRY_AFTER_S
    rig.target.is_full = False

    rig.writer.close(0)

    manifest = rig.manifest()
    assert manifest.counters.errors == {"storage": 4}
    assert [(error.probe, error.type) for error in manifest.errors] == [("storage", "OSError")]
    assert {probe for probe, _ in rig.reported} == {"storage"}


def test_a_manifest_that_could_not_be_written_is_tried_again() -> None:
    """A disk that was full at the start does not hide the process for ever."""
    rig = Rig()
    rig.target.is_full = True
    rig.writer.start(run_record(), ())
    rig.target.is_full = False

    rig.pass_time(60)

    assert rig.num_manifests() == 1


def test_closing_on_a_full_disk_says_that_rows_are_left() -> None:
    """The answer is False, each time it is asked for, and nothing is raised."""
    rig = Rig()
    rig.writer.add_sample(forward(0, measurement()))
    rig.target.is_full = True

    assert not rig.writer.close(0)
    assert not rig.writer.close(0)


@pytest.mark.parametrize("complete", [True, False], ids=["close", "exit"])
def test_what_is_refused_until_the_close_is_counted_in_the_last_manifest(complete: bool) -> None:
    """Each table tells its own rows, the counters those of history, the errors why."""
    rig = Rig()
    rig.target.refused_tables = {"history", "samples", "steps", "fingerprints"}
    rig.training = Counters(rows_dropped=1)
    rig.writer.start(run_record(), ())
    for ordinal in range(4):
        rig.writer.add_sample(forward(ordinal, measurement()))
    rig.writer.add_attempts([attempt(0), attempt(1)])
    rig.writer.add_fingerprints([fingerprint(0)])

    assert not rig.writer.close(5.0, complete=complete)

    manifest = rig.manifest()
    assert manifest.status == "closed"
    dropped = {table: state.rows_dropped for table, state in manifest.tables.items() if state.rows_dropped}
    assert dropped == {"history": 12, "samples": 4, "steps": 2, "fingerprints": 1}
    assert (manifest.counters.rows, manifest.counters.rows_dropped) == (0, 13)
    assert rig.writer.counters().rows_dropped == 13
    messages = [error.message for error in manifest.errors]
    assert "12 rows of history given up at the close: [Errno 27] File too large" in messages
    assert "2 rows of steps given up at the close: [Errno 27] File too large" in messages


def test_a_part_that_fits_is_kept_though_one_before_it_did_not() -> None:
    """At the close each part is tried by itself, so that one refused part costs its own rows alone."""
    rig = Rig()
    rig.writer.start(run_record(), ())
    rig.target.refused_tables = {"history"}
    rig.writer.add_sample(forward(0, measurement()))
    rig.writer.add_attempts([attempt(0)])

    assert not rig.writer.close(0)

    assert (len(rig.rows("history")), len(rig.rows("samples")), len(rig.rows("steps"))) == (0, 1, 1)
    tables = rig.manifest().tables
    assert [tables[table].rows_dropped for table in ("history", "samples", "steps")] == [3, 0, 0]


def test_a_close_tries_as_long_as_there_is_time() -> None:
    """A disk that has room again before the end costs nothing, and what carries parts further is asked."""
    rig = Rig()
    rig.writer.start(run_record(), ())
    rig.writer.add_sample(forward(0, measurement()))
    rig.target.is_full = True
    began_s = rig.clock.now_s

    def make_room() -> None:
        rig.target.is_full = rig.clock.now_s < began_s + 8

    rig.clock.on_sleep = make_room

    assert rig.writer.close(10.0)

    assert len(rig.rows("history")) == 3
    assert rig.manifest().counters.rows_dropped == 0
    assert len(rig.target.finished_within) == 8 + 2


def test_giving_up_leaves_time_for_the_manifest() -> None:
    """The last second of a close is not spent on trying, so that a caller who waits sees the counts."""
    rig = Rig()
    rig.writer.start(run_record(), ())
    rig.writer.add_sample(forward(0, measurement()))
    rig.target.refused_tables = {"history"}
    began_s = rig.clock.now_s

    rig.writer.close(10.0)

    assert rig.clock.now_s == began_s + 9


def test_a_manifest_that_cannot_be_written_at_the_close_is_told() -> None:
    """Rows may be durable, but readers would take the process for one that died."""
    rig = Rig()
    rig.writer.start(run_record(), ())
    rig.target.is_full = True

    assert not rig.writer.close(0)


def test_at_the_end_of_the_interpreter_nobody_waits_for_what_carries_on_alone() -> None:
    """The spool is asked to go on, with no time to wait for it."""
    rig = Rig()
    rig.writer.start(run_record(), ())
    rig.writer.add_sample(forward(0, measurement()))

    assert rig.writer.close(5.0, complete=False)

    assert rig.target.finished_within == [0.0]
    assert rig.manifest().status == "closed"


def test_the_target_is_asked_every_thirty_seconds_to_keep_alive_what_it_needs() -> None:
    """What the carrier last failed at is listed once."""
    rig = Rig()
    rig.writer.start(run_record(), ())
    rig.target.trouble = "StorageUnreachableError: no answer"

    rig.pass_time(90)

    assert rig.target.kept_alive == 3
    assert [text for _, text in rig.reported] == ["StorageUnreachableError: no answer"]


def test_documents_are_strict_json() -> None:
    """No NaN and no infinity stands in a manifest, a catalog or a result."""
    rig = Rig()
    rig.writer.start(run_record(), [module(0)])
    rig.writer.add_sample(forward(0, measurement(values=(math.nan, math.inf, 1.0)), settled=True))
    rig.writer.close(5.0)

    documents = [data for name, data in rig.target.documents if name.endswith(".json")]
    assert len(documents) == 5
    for data in documents:
        json.loads(data, parse_constant=pytest.fail)


def test_the_first_documents_for_people_have_the_layers_and_zero_counts() -> None:
    """From attach on the folder explains itself, and lists what will be measured."""
    rig = Rig()
    rig.writer.start(run_record(), [module(0)])

    assert json.loads(rig.target.last("result.json")) == [
        {"layer": "layer99", "type": "Linear", "aliases": [], "tensors": []}
    ]
    assert "* Samples: 0 forward, 0 backward\n" in rig.target.last("index.md").decode()


def test_an_orderly_close_leaves_summaries_and_counts() -> None:
    """Both documents say what the process measured, up to its last row."""
    rig = Rig()
    rig.training = Counters(forwards=2, samples=2)
    rig.writer.start(run_record(), [module(0)])
    rig.writer.add_sample(forward(0, measurement()))
    rig.writer.add_sample(forward(1, measurement(values=(0.5, 2.5, 1.0)), settled=True))
    rig.writer.add_sample(backward(0, measurement(signal=Signal.OUTPUT_GRADIENT)))

    assert rig.writer.close(5.0)

    (layer,) = json.loads(rig.target.last("result.json"))
    output, gradient = layer["tensors"]
    assert [one["metric"] for one in output["statistics"]] == ["mean", "std", "zero_fraction"]
    assert output["statistics"][0]["latest"]["value"] == 2.5
    assert gradient["statistics"][0]["observations"] == 1
    page = rig.target.last("index.md").decode()
    assert "* Samples: 2 forward, 1 backward\n" in page
    assert "* Rows of history: 9; dropped: 0\n" in page


@pytest.mark.parametrize("seconds", [0.0, 5.0], ids=["no-time", "time-is-over"])
def test_without_time_the_first_documents_for_people_stand(seconds: float) -> None:
    """SIGTERM and the interpreter's end make rows and manifest durable, nothing else."""
    rig = Rig()
    rig.writer.start(run_record(), [module(0)])
    rig.writer.add_sample(forward(0, measurement(), settled=True))
    if seconds:
        rig.target.on_part = rig.clock.sleep_ten_seconds

    rig.writer.close(seconds)

    assert [name for name, _ in rig.target.documents].count("result.json") == 1
    assert rig.manifest().status == "closed"
    assert len(rig.rows("history")) == 3


def test_a_full_disk_at_attach_does_not_stop_the_rows() -> None:
    """Documents for people are tried, reported, and made at the close."""
    rig = Rig()
    rig.target.is_full = True
    rig.writer.start(run_record(), [module(0)])
    rig.target.is_full = False
    rig.writer.add_sample(forward(0, measurement(), settled=True))

    assert rig.writer.close(5.0)

    assert rig.reported[-1] == ("storage", "[Errno 28] No space left on device")
    assert len(json.loads(rig.target.last("result.json"))[0]["tensors"]) == 1


def test_a_target_that_fails_otherwise_than_with_an_oserror_is_not_hidden() -> None:
    """A mistake in the program reaches whoever isolates sinks."""
    rig = Rig()
    rig.target.refusal = RuntimeError("a mistake")
    rig.writer.add_sample(forward(0, measurement()))

    with pytest.raises(RuntimeError, match="a mistake"):
        rig.writer.flush()


def test_the_error_of_a_full_disk_is_the_systems_own() -> None:
    """ENOSPC keeps its number on the way to the owner."""
    rig = Rig()
    rig.target.is_full = True
    rig.writer.add_sample(forward(0, measurement()))

    rig.writer.flush()

    assert f"[Errno {errno.ENOSPC}]" in rig.reported[0][1]


LATIN = "caf\udce9"


ESCAPED = "caf\\udce9"


def test_a_lone_surrogate_anywhere_in_text_costs_nothing() -> None:
    """As a layer's name, a tensor's path, a metric's name, a reason, a device or an error's message."""
    rig = Rig()
    odd = replace(
        measurement(metrics=(LATIN, "mean", "std"), values=(None, 1.0, 2.0), reasons=(LATIN, "", "")),
        layer=LATIN,
        tensor_path=f"output.{LATIN}",
        device=LATIN,
    )
    layers = (replace(module(0), layer=LATIN, aliases=(LATIN,)), module(1))
    run = replace(run_record(), sampling={"type": LATIN, "settings": {LATIN: [LATIN]}})

    rig.writer.start(run, layers)
    rig.writer.add_sample(forward(0, measurement(1), odd, settled=True))
    rig.writer.add_error(ErrorRecord("reducer", LATIN, "ValueError", f"no {LATIN}"))
    assert rig.writer.close(10.0)

    rows = rig.rows("history")
    assert len(rows) == 6
    [row] = [row for row in rows if row["metric"] == ESCAPED]
    assert (row["layer"], row["tensor_path"], row["device"]) == (ESCAPED, f"output.{ESCAPED}", ESCAPED)
    assert row["unavailable_reason"] == ESCAPED
    manifest = rig.manifest()
    assert (manifest.status, manifest.errors[0].message) == ("closed", f"no {ESCAPED}")
    assert manifest.counters.rows_dropped == 0
    [odd_layer, _] = decode_catalog(rig.target.last("modules-")).modules
    assert (odd_layer.layer, odd_layer.aliases) == (ESCAPED, (ESCAPED,))
    result = json.loads(rig.target.last("result.json"))
    assert [(layer["layer"], bool(layer["tensors"])) for layer in result] == [
        (ESCAPED, True),
        ("layer98", True),
    ]


def test_an_error_to_store_with_a_lone_surrogate_does_not_stop_the_manifest() -> None:
    """A path of another encoding in the message of a full disk."""
    rig = Rig()
    rig.writer.start(run_record(), ())
    rig.target.refusal = OSError(errno.ENOSPC, f"No space left on {LATIN}")
    rig.writer.add_sample(forward(0, measurement(), settled=True))
    rig.pass_time(100)
    rig.target.refusal = None
    rig.pass_time(100)

    assert any(ESCAPED in error.message for error in rig.manifest().errors)
