"""Decisions about Python environments: what is asked for, what an environment is called, why one cannot be made."""
