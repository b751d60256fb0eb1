"""``torchinstruments doctor``: tries a store out and looks at this host's spools, before a job is started."""

import argparse
import math
import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from torchinstruments import environment
from torchinstruments._version import __version__
from torchinstruments.cli.command import Command, add_reading_arguments, seconds, storage_options
from torchinstruments.cli.console import count_text, print_table, shown_text
from torchinstruments.errors import ConfigurationError

if TYPE_CHECKING:
    from torchinstruments.store.diagnosis import Probe
    from torchinstruments.store.spools import SpoolContents

__all__ = ["COMMAND"]

_TIMEOUT_S = 15.0
_MAX_SPOOLS = 20
_PACKAGES = ("torch", "fsspec", "s3fs", "pyarrow", "polars")
_VARIABLES = (
    environment.RANK,
    environment.WORLD_SIZE,
    environment.LOCAL_RANK,
    environment.GROUP_RANK,
    environment.MASTER_ADDR,
    environment.MASTER_PORT,
    environment.TORCHELASTIC_RUN_ID,
    environment.TORCHELASTIC_RESTART_COUNT,
    environment.SLURM_JOB_ID,
    environment.SLURM_STEP_ID,
    environment.SLURM_PROCID,
    environment.SLURM_NTASKS,
    environment.SLURM_RESTART_COUNT,
)


@dataclass(frozen=True, slots=True)
class _Identity:
    """Who this process is, as a job started here would see it.

    Attributes:
        host: Host name.
        user_id: Effective user id.
        pid: Process id.
        launcher: The variables of a launcher that are set; empty outside a job.
        is_disabled: Whether ``TORCHINSTRUMENTS_DISABLED`` turns every observer off.
    """

    host: str
    user_id: int
    pid: int
    launcher: Mapping[str, str]
    is_disabled: bool


@dataclass(frozen=True, slots=True)
class _SpoolRoot:
    """Where spools lie on this host.

    Attributes:
        path: The folder.
        problem: Why nothing could be written there, else ``""``.
        free_bytes: Free space there, None where that is not known.
        spools: What lies in each.
    """

    path: str
    problem: str
    free_bytes: int | None
    spools: "tuple[SpoolContents, ...]"


@dataclass(frozen=True, slots=True)
class _Diagnosis:
    url: str
    credentials_source: str
    versions: Mapping[str, str]
    identity: _Identity
    probes: "tuple[Probe, ...]"
    spool: _SpoolRoot
    problems: tuple[str, ...]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="where a run is to write: a path or an fsspec URL")
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=_TIMEOUT_S,
        metavar="SECONDS",
        help="bound of one request to the store (default: %(default)g)",
    )
    add_reading_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    from torchinstruments.store.credentials import credentials_source
    from torchinstruments.store.diagnosis import probe_store
    from torchinstruments.store.filesystem import redact
    from torchinstruments.store.urls import check_url, check_writable

    url: str = arguments.url
    timeout_s: float = arguments.timeout_s
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ConfigurationError(f"--timeout-s is {timeout_s}, but has to be more than 0 seconds, such as 15")
    options = storage_options(arguments)
    check_url(url)
    check_writable(url)
    probes = probe_store(url, options, timeout_s=timeout_s)
    spool = _spool_root()
    found = _Diagnosis(
        url=redact(url),
        credentials_source=credentials_source(url, options),
        versions=_versions(),
        identity=_Identity(
            host=socket.gethostname(),
            user_id=os.geteuid(),
            pid=os.getpid(),
            launcher={name: value for name in _VARIABLES if (value := environment.text(name)) is not None},
            is_disabled=environment.is_disabled(),
        ),
        probes=probes,
        spool=spool,
        problems=_problems(probes, spool),
    )
    if arguments.as_json:
        from torchinstruments.store.manifest import encode_document

        sys.stdout.write(encode_document(found).decode())
    _print(found, sys.stderr if arguments.as_json else sys.stdout)
    if any(probe.outcome == "failed" for probe in probes):
        return 2
    return 1 if found.problems else 0


COMMAND = Command(
    name="doctor",
    summary="try out the store and the spool that a job would use",
    description="Creates, writes, reads, lists and deletes a file of its own at the URL, with the settings "
    "given here or in the environment, and tells what took how long, which credentials were used, how far "
    "the clocks are apart, and what lies in this host's spools. Leaves nothing behind.",
    example="torchinstruments doctor runs/first --timeout-s 5",
    exit_codes="0 all is well, 1 something needs attention, 2 the store cannot be used",
    add_arguments=_add_arguments,
    run=_run,
)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"torchinstruments": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _spool_root() -> _SpoolRoot:
    from torchinstruments.store.private_folders import own_spool_root
    from torchinstruments.store.spools import find_spools, look_into

    root = own_spool_root(environment.spool_root().expanduser().absolute())
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    problem = ""
    if not existing.is_dir():
        problem = f"{existing} is no folder; set {environment.SPOOL_DIR} to a folder on a local disk"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"nothing can be written to {existing}; set {environment.SPOOL_DIR} to a folder of your own"
    free = os.statvfs(existing)
    spools = tuple(look_into(spool) for spool in find_spools(root)) if root.is_dir() and not problem else ()
    return _SpoolRoot(str(root), problem, free.f_bavail * free.f_frsize, spools)


def _problems(probes: "tuple[Probe, ...]", spool: _SpoolRoot) -> tuple[str, ...]:
    """Returns what needs attention, one sentence each."""
    found = [f"{probe.name}: {probe.detail}" for probe in probes if probe.outcome in ("failed", "warning")]
    if spool.problem:
        found.append(f"spool: {spool.problem}")
    for one in spool.spools:
        if one.last_error:
            found.append(f"spool: the uploader of {one.spool} fails with {one.last_error}")
        elif one.num_files and one.uploader_pid is None:
            found.append(
                f"spool: {count_text(one.rows, 'row')} of run {one.run_id} lie in {one.spool} and no "
                f"uploader is at work; carry them with: torchinstruments upload {one.spool}"
            )
        if one.num_unreadable:
            parts = count_text(one.num_unreadable, "part")
            found.append(f"spool: {parts} that Parquet cannot read in {one.spool}/unreadable")
        if one.num_unknown:
            folders = count_text(one.num_unknown, "folder")
            found.append(f"spool: {folders} of another release in {one.spool}, to be carried by that one")
    return tuple(found)


def _print(found: _Diagnosis, file: TextIO) -> None:
    identity = found.identity
    launcher = ", ".join(f"{name}={value}" for name, value in identity.launcher.items())
    print(f"store        {shown_text(found.url)}", file=file)
    print(f"credentials  {found.credentials_source}", file=file)
    print(f"versions     {', '.join(f'{name} {value}' for name, value in found.versions.items())}", file=file)
    print(f"host         {shown_text(identity.host)}, user {identity.user_id}", file=file)
    print(f"launcher     {shown_text(launcher) or 'no variables of one are set'}", file=file)
    if identity.is_disabled:
        print(f"disabled     {environment.DISABLED} turns every observer off", file=file)
    rows = [
        (
            probe.name,
            probe.outcome,
            shown_text(probe.detail) if probe.outcome in ("ok", "skipped") else "see below",
            "-" if probe.duration_s is None else f"{1000 * probe.duration_s:,.0f} ms",
        )
        for probe in found.probes
    ]
    print_table(("probe", "outcome", "found", "took"), rows, file=file, num_text_columns=3)
    spool = found.spool
    free = "" if spool.free_bytes is None else f", {spool.free_bytes / 1e9:,.1f} GB free"
    print(f"spool        {shown_text(spool.path)}: {count_text(len(spool.spools), 'run')}{free}", file=file)
    for one in spool.spools[:_MAX_SPOOLS]:
        uploader = "no uploader" if one.uploader_pid is None else f"uploader {one.uploader_pid}"
        writers = count_text(one.num_writers, "live process", "live processes")
        print(
            f"  run {shown_text(one.run_id) or '?'}: {count_text(one.rows, 'row')} "
            f"({one.size_bytes:,} bytes), {writers}, {uploader}",
            file=file,
        )
    if len(spool.spools) > _MAX_SPOOLS:
        print(f"  and {len(spool.spools) - _MAX_SPOOLS:,} more; --json has all", file=file)
    for problem in found.problems:
        print(f"problem      {shown_text(problem)}", file=file)
    print("all is well" if not found.problems else count_text(len(found.problems), "problem"), file=file)
