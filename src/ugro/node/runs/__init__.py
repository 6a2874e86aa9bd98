"""One attempt's part on this node: its directory, its supervisor, its guards."""
