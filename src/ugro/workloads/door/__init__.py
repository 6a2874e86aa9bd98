"""The program that runs ON a node as the door of a service: HAProxy, what it must remember, and what it measures.

It is sent as text (``workloads.door_job``): Python 3.9 or newer, the standard library, and nothing of ours outside this
folder but three modules, which go with it.
"""
