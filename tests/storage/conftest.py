"""Stores for the tests of this folder."""

from storage.stores import bucket, fault_proxy, moto_store, proxied, seaweed

__all__ = ["bucket", "fault_proxy", "moto_store", "proxied", "seaweed"]
