"""What a subcommand is, and the arguments that several of them share."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

from torchinstruments.errors import ConfigurationError

__all__ = ["Command", "add_place_arguments", "add_reading_arguments", "seconds", "storage_options"]


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand.

    Attributes:
        name: As it is typed.
        summary: One line for the list of commands.
        description: For its own help.
        example: A command line that does what people call it for most.
        exit_codes: What its exit codes say, for its own help.
        add_arguments: Declares its arguments.
        run: Does it and returns the exit code.
    """

    name: str
    summary: str
    description: str
    example: str
    exit_codes: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the run's folders, their storage options, and ``--json``."""
    parser.add_argument(
        "urls",
        nargs="+",
        metavar="URL",
        help="the run's folder: a path or an fsspec URL; several where each host has its own",
    )
    add_reading_arguments(parser)


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares storage options and ``--json``."""
    parser.add_argument(
        "--storage-options",
        metavar="JSON",
        help='fsspec settings as a JSON object, such as \'{"client_kwargs": {"endpoint_url": "..."}}\'',
    )
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print one JSON document to standard output"
    )


def seconds(text: str) -> float:
    """Reads a number of seconds from the command line.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds; give one, such as 60") from None


def storage_options(arguments: argparse.Namespace) -> dict[str, object] | None:
    """Returns ``--storage-options`` decoded, or None where it is not given.

    Raises:
        ConfigurationError: It is no JSON object. The message does not repeat it, for it may hold secrets.
    """
    text: str | None = arguments.storage_options
    if text is None:
        return None
    try:
        options = json.loads(text)
    except ValueError as error:
        place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigurationError(
            f"--storage-options is no JSON{place}; give a JSON object in single quotes, "
            f"like '{{\"anon\": true}}'"
        ) from None
    if not isinstance(options, dict):
        raise ConfigurationError(
            f"--storage-options is a JSON {type(options).__name__}, but has to be an object, "
            f"like '{{\"anon\": true}}'"
        )
    return options
