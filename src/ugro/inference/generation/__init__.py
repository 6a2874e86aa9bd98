"""Text from a causal language model: many sequences at once, each with its own length, stops and randomness."""
