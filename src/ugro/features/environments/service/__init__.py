"""The agent's side: resolves packages, sends wheels, has nodes make environments."""
