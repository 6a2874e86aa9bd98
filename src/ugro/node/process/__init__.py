"""Processes on a node: started, limited, found and ended with all that they left behind."""
