"""Settings of the documentation: ``make docs``."""
# ruff: noqa: INP001  a settings file, not a package

import sys
from pathlib import Path

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
templates_path: list[str] = []
python_maximum_signature_line_length = 90
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
default_role = "code"
napoleon_use_ivar = True
# Only what is marked with >>> is a doctest; blocks of pages are run by tests/e2e/test_docs.py.
doctest_test_doctest_blocks = "default"
