"""Folders of the submitter that jobs read on a node: received by content, kept once, shared by all runs."""
