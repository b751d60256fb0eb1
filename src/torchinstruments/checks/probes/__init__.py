"""Probes of a model's activations while it runs: ranges, zeros, attention sinks and outlier dimensions."""
