"""One sampled forward and its backward: observer, capture, gradients, sampling, selection."""
