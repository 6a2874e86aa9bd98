"""One typed request for each operation; its route, role, audit line and OpenAPI shape follow.

Does not do what is asked.
"""
