"""Files of a run that go to the agent: logs, outputs, checkpoints."""
