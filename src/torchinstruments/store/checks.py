"""``checks-<process>.json``: what the training checks of one process have found."""

from typing import Any

import msgspec

from torchinstruments.store.documents import require_plain

__all__ = ["ChecksDocument", "FoundChecks", "SessionReport", "decode_checks"]


class ChecksDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document as it is written into a rank's folder.

    Attributes:
        schema_version: Of the run's documents; each report has its own.
        run_id: Run that it belongs to.
        generation: Of the process group.
        rank: The process's rank in it.
        process: 8 hex digits.
        sessions: The latest report of each session of checks, in the order in which they were attached.
    """

    schema_version: int
    run_id: str
    generation: int
    rank: int
    process: str
    sessions: tuple[msgspec.Raw, ...]


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What readers take of a session's report.

    Attributes:
        findings: Gravest first, as plain values.
        unavailable: What could not be looked at.
        checks_run: Names of the checks that have looked at something.
        counters: What was counted, findings that were not kept among it.
        finalized_reason: ``running``, or how the session ended.
    """

    findings: tuple[dict[str, Any], ...] = ()
    unavailable: tuple[dict[str, Any], ...] = ()
    checks_run: tuple[str, ...] = ()
    counters: dict[str, Any] = {}
    finalized_reason: str = ""


class _Finding(msgspec.Struct):
    """What readers take of a finding."""

    severity: str = ""
    code: str = ""
    check: str = ""
    attempt: int | None = None
    names: tuple[str, ...] = ()


class _Unavailable(msgspec.Struct):
    """What readers take of an entry on what could not be looked at."""

    check: str = ""
    reason: str = ""
    names: tuple[str, ...] = ()


class FoundChecks(msgspec.Struct, frozen=True, kw_only=True):
    """The document as readers take it; see `ChecksDocument`."""

    schema_version: int
    run_id: str
    generation: int
    rank: int
    process: str
    sessions: tuple[SessionReport, ...] = ()


def decode_checks(data: bytes) -> FoundChecks:
    """Returns the document that lies in some bytes; unknown fields are ignored.

    Raises:
        msgspec.DecodeError: The bytes are no JSON, or no such document.
    """
    found = msgspec.json.decode(data, type=FoundChecks)
    for session in found.sessions:
        require_plain("a finding", session.findings)
        for finding in session.findings:
            msgspec.convert(finding, type=_Finding)
        for entry in session.unavailable:
            msgspec.convert(entry, type=_Unavailable)
    return found
