"""``ugro sweep``."""
