"""Telemetry for PyTorch training jobs that run on many ranks.

Importing the package imports neither torch nor Polars: names are loaded when they are first used.
"""
