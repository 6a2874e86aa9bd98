"""The part that runs on nodes: who uses the machine, how it sleeps and wakes."""
