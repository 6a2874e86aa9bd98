"""Processes on a node: find a whole tree, end it, run a command under guard."""
