"""Experiments: the same trainings in several ways on the same nodes, what their records say, and a report of it."""
