"""``ugro.Client``: how commands, scripts and notebooks reach an agent. Does not open the agent's database."""
