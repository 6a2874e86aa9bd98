"""What a node is and how busy it is: CPU, memory, disks, GPUs."""
