"""Small parts the agent's rooms share: signals, tasks by key, asyncio helpers."""
