"""Whether somebody uses this machine: at a terminal, a keyboard or a display, or with one of its GPUs."""
