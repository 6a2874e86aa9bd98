"""Sources of machines that the cluster file does not list, each behind the protocol of ``source``."""
