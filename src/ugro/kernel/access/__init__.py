"""Who asks, what they may do, and the tokens of programs."""
