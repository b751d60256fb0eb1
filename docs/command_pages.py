"""The directive ``{commands}``: what each subcommand takes, read from the parser itself."""
# ruff: noqa: INP001  beside the settings of the documentation, not a package

import argparse
from functools import partial

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typing_extensions import override

from torchinstruments.cli.main import _parser

__all__ = ["setup"]


class Commands(SphinxDirective):
    """One section for each subcommand: its description, its usage, a table of its arguments."""

    @override
    def run(self) -> list[nodes.Node]:
        """Returns the sections, in the order of the command's own help."""
        text = "\n".join(_section(sub) for sub in _subcommands(_parser()))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def _subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    (group,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001 - argparse tells nowhere else
    return list(group.choices.values())


def _section(sub: argparse.ArgumentParser) -> str:
    rows = "\n".join(
        f"| {_spelling(action)} | {_escaped(_help(sub, action))} |"
        for action in sub._actions  # noqa: SLF001 - the same
        if action.help != argparse.SUPPRESS and action.dest != "help"
    )
    sub.formatter_class = partial(argparse.RawDescriptionHelpFormatter, width=100)
    epilog = f"\n```text\n{sub.epilog.strip()}\n```\n" if sub.epilog else ""
    return (
        f"## {sub.prog}\n\n{_escaped(' '.join((sub.description or '').split()))}\n\n"
        f"```text\n{sub.format_usage().strip()}\n```\n\n"
        f"| argument | meaning |\n|---|---|\n{rows}\n{epilog}"
    )


def _spelling(action: argparse.Action) -> str:
    """Returns an argument as it is typed, `--ranks RANKS`."""
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else "")
    if action.nargs != 0 and not value:
        value = action.dest.upper()
    names = action.option_strings or [str(value)]
    shown = ", ".join(names)
    return f"`{shown} {value}`" if action.option_strings and action.nargs != 0 else f"`{shown}`"


def _help(sub: argparse.ArgumentParser, action: argparse.Action) -> str:
    return sub._get_formatter()._expand_help(action) if action.help else ""  # noqa: SLF001 - fills in %(default)s


def _escaped(text: str) -> str:
    """Returns help text as Markdown that shows every character of it."""
    for character in "\\`*_{}[]<>#|":
        text = text.replace(character, f"\\{character}")
    return text


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive with Sphinx."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
