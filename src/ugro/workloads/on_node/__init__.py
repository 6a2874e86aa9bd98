"""What the programs share that run ON a node as ranks of UGRO's own jobs. Standard library alone; sent as text."""
