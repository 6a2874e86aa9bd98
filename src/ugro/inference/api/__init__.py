"""The HTTP API: OpenAI's routes, and plain ones for what OpenAI's have no name for."""
