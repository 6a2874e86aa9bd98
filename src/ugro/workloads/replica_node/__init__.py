"""The program that runs ON a node as a replica of a service: starts its server, probes it, starts it again.

It is sent as text (``workloads.sent``) and run by any Python from 3.9: it uses the standard library alone, and imports
nothing of ours outside this folder and ``on_node``.
"""
