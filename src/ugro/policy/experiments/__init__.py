"""Comparing jobs: parameters, columns, filters, tables."""
