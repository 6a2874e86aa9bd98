"""``python -m ugro.inference.ray_serve``: an application of Ray Serve on an UGRO Ray cluster, as a service's replica.

Each replica is an application of its own in the cluster, with a path of its own, so that an update starts the new one
beside the old one. Serve's proxy listens on the loopback of the cluster's head, where nobody else reaches it: what
listens at the replica's port is a relay (``relay``) that asks for the service's secret and adds the path.
"""
