"""What a machine has: CPU, memory, disks and GPUs, and who holds them."""
