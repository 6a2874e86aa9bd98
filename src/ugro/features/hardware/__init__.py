"""Measured speed of devices, disks and links. Does not choose nodes: it says how fast they are."""
