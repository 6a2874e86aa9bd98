"""A recipe: train.py is the script, recipe.yaml describes it."""
