"""Who asks, what they may do, their tokens, and the audit log. Does not know what an operation does."""
