"""Connections to what listens on this node, forwarded over the link."""
