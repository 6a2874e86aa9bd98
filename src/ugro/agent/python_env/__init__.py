"""The agent's side of Python environments: read, resolved here, brought to the nodes, made there."""
