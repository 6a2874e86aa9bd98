"""Programs that travel with jobs as text: a service's door and its replicas.

Python 3.9 or newer, standard library alone.
"""
