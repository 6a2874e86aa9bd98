"""``ugro map`` and ``ugro estimate``."""
