"""Readers of the files in which trainings write metrics: new bytes in, points out. They trust nothing."""
