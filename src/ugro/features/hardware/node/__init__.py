"""The part that runs on nodes: measures the machine, its devices and the network."""
