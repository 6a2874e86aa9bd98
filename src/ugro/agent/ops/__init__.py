"""One-off operations on nodes that users ask for: doctor, exec, host keys."""
