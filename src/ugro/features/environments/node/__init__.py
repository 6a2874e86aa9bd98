"""The part that runs on nodes: finds interpreters, makes and removes environments."""
