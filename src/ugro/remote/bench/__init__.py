"""What measures a node for ``ugro node bench``."""
