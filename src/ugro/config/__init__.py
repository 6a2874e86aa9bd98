"""Configuration files: cluster.yaml and job files, checked, edited and documented."""
