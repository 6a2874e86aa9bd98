"""A job written for Slurm, Kubernetes or torchrun. Does not submit it there."""
