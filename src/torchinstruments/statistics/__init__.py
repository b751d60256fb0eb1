"""From tensors to numbers: reducers, the exact profile, batching of scalars."""
