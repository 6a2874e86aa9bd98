"""``ugro plan``: how fast a training will be on each set of nodes. Does not place jobs."""
