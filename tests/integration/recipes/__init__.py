"""Recipes in real processes: alone, on several unequal ranks, killed and resumed, and launched on nodes."""
