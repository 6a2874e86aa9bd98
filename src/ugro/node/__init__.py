"""What runs ON nodes: Python 3.9 or newer and its standard library. Does not decide what the agent can decide."""
