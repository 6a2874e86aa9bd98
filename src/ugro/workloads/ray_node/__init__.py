"""The program that runs ON a node as a rank of a Ray cluster: starts Ray there, watches it and cleans up after it.

It is sent as text (``workloads.ray_jobs``) and run by the Python that has Ray: it uses the standard library alone, and
imports neither Ray, which would cost every rank memory, nor anything of ours outside this folder.
"""
