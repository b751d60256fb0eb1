"""Who am I, and what do my steps mean: identity, policy, agreement, clock, gradient sync, loss scale."""
