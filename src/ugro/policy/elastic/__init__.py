"""Trainings that go on with fewer ranks: who belongs to the next group, and what becomes of the attempt."""
