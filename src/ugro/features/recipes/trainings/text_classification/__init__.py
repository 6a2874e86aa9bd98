"""Trains a model that sorts texts into classes, for ``--model``."""
