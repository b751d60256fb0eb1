"""Settings of the documentation: ``sphinx-build -nW docs docs/_build``."""
# ruff: noqa: INP001  a settings file, not a package

from torchinstruments import __version__

project = "torchinstruments"
author = "the torchinstruments authors"
project_copyright = author
release = __version__
version = __version__

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
nitpicky = True
myst_heading_anchors = 3
html_theme = "furo"
html_title = "torchinstruments"
