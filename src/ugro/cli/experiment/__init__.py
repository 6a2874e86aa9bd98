"""``ugro experiment``: trainings compared."""
