"""The version, alone, so that the build and every record can read it without imports."""

__version__ = "0.1.0"
