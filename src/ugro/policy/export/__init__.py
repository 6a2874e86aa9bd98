"""A job for those who outgrow us: as a script of Slurm, a JobSet of Kubernetes, or a shell script for torchrun."""
