"""Limits, fair share and usage of users. Does not record use: the kernel's book of device time does."""
