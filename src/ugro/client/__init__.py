"""``ugro.Client``: how commands, scripts and notebooks reach an agent. Does not read the agent's state or files."""
