"""Trainings for ``ugro launch --model``. Does not download models: the job does."""
