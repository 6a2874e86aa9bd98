"""Who asks, what they may do, tokens and the audit log. Does not know what an operation does."""
