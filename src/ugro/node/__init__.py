"""What runs ON nodes: Python 3.9 or newer, its standard library, and nothing else of UGRO.

Decides nothing that the agent can decide.
"""
