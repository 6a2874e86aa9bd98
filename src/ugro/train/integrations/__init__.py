"""Balanced training for Hugging Face, Accelerate and Lightning. Does not import them before they are used."""
