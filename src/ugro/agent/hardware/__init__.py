"""``ugro node bench``: measures nodes, the links between them, and all-reduces over them."""
