"""Shared parts of the agent: change signals, keyed tasks, additions to asyncio."""
