"""The data of each page, computed from the state of the agent. No I/O."""
