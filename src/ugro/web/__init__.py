"""The frame of the dashboard: sign-in, layout, live stream, charts, pages of nodes and jobs.

Does not change state by itself.
"""
