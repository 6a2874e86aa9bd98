"""Trains a language model, for ``--model``."""
