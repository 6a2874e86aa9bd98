"""Python environments on this node: made, used, removed."""
