"""Who consumes a sample: the delivery thread and the directory."""
