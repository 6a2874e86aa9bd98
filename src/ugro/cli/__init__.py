"""Commands: parse, ask the agent, print. Does not decide anything, and prints in ``output.py`` alone."""
