"""The Python API over the agent's socket, and what starts the agent. `ugro.Client` is the entry."""
