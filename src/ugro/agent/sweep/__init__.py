"""Sweeps: trials as jobs, one after the other as devices become free."""
