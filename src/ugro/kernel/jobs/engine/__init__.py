"""Brings jobs from decision to end: launch, watch, finish, retry. Records first, then acts. Does not choose nodes."""
