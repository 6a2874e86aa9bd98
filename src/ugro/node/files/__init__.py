"""Files on a node: code by content hash, working directories, outputs and checkpoints, received and sent."""
