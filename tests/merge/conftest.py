"""Stores for the tests of this folder."""

from storage.stores import bucket, seaweed

__all__ = ["bucket", "seaweed"]
