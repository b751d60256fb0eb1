"""Offline: one answer from the folders of many ranks."""
