"""The daemon: it alone writes state, decides, and talks to nodes."""
