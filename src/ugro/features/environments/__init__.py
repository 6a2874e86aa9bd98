"""The Python that a job has: resolved, made by uv on nodes, checked, removed.

Does not install anything outside its folder.
"""
