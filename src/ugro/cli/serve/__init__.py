"""``ugro serve``."""
