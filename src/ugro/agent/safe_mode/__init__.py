"""Whether this agent's state is the newest: its key, its marks, its journal, and safe mode for when it is not."""
