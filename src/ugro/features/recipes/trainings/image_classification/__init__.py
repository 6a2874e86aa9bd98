"""Trains a model that sorts images into classes, for ``--model``."""
