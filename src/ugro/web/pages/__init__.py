"""Pages about the cluster, nodes, jobs and logs. Pages of features are in their folders."""
