"""From rows to durable Parquet on any filesystem, and back."""
