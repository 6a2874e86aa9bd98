"""Brings jobs from decision to end: launch, watch, finish, retry; records first, then acts. Does not choose nodes."""
