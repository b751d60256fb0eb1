"""Settings of the documentation: ``make docs``."""
# ruff: noqa: INP001  a settings file, not a package

import re
import sys
from collections.abc import MutableSequence
from pathlib import Path

from sphinx.application import Sphinx

from torchinstruments import __version__

sys.path.insert(0, str(Path(__file__).parent))

project = "torchinstruments"
author = "the torchinstruments authors"
project_copyright = author
release = __version__
version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "command_pages",
]
exclude_patterns = ["_build"]
nitpicky = True
# Types of torch, Polars and typing stand in signatures; their own documentation is on the network.
nitpick_ignore_regex = [("py:.*", ".*")]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "torchinstruments"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
python_maximum_signature_line_length = 90
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
default_role = "code"
smartquotes = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Only what is marked with >>> is a doctest; blocks of pages are run by tests/e2e/test_docs.py.
doctest_test_doctest_blocks = "default"


def for_readers(*event: object) -> tuple[str, object] | None:
    """Returns a signature without what only the code needs.

    That is the marks of arguments that are not given, and what enums and protocols seem to be called with.
    """
    *_, signature, returned = event
    if not isinstance(signature, str) or signature in ("(value)", "(*args, **kwargs)"):
        return None if signature is None else ("", returned)
    shown = re.sub(r" \| ~?[\w.]*\bUnset\b", "", signature)
    return shown.replace("UNSET", "...").replace("<factory>", "..."), returned


def sentences_of_properties(
    app: Sphinx,  # noqa: ARG001 - what Sphinx gives every such function
    what: str,
    name: str,  # noqa: ARG001
    documented: object,  # noqa: ARG001
    options: object,  # noqa: ARG001
    lines: MutableSequence[str],
) -> None:
    """Keeps napoleon from taking what stands before a colon in a property's docstring for its type.

    It takes what stands before the first colon: so there is one with nothing before it.
    """
    if what == "property" and lines:
        lines[0] = f": {lines[0]}"


def setup(app: Sphinx) -> None:
    """Connects what this file changes."""
    app.connect("autodoc-process-docstring", sentences_of_properties, priority=1)
    app.connect("autodoc-process-signature", for_readers)
