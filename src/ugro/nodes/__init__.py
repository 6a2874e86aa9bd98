"""The agent's side of a node: transport, link, typed calls."""
