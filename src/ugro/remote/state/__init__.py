"""What a node keeps on disk: run directories, their specs, fences against older attempts."""
