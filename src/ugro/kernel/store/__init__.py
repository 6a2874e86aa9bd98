"""Database engines, tables, migrations, backups.

The only place that opens a database; rooms bring their own queries.
"""
