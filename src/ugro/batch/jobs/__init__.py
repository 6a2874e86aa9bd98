"""The engine ``jobs``: a pool whose processes are jobs of UGRO, one on each node. Needs no Ray.

``session``, ``host`` run on the nodes too, beside ``local``: what they need travels with them (``shipped``).
"""
