"""Launches without a script: recipes, models and data that nodes lack, and whether it fits."""
