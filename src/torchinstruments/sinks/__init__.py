"""Who consumes a sample: the writer thread, the run's folder, and the sinks that users add to it."""
