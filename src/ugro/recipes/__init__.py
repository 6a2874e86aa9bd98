"""Recipes: complete trainings that need no script of the user's. Each folder can be copied and changed."""
