"""The dashboard: pages, templates, and the stream that keeps them live."""
