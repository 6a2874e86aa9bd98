"""The state's database: engines, schema, migrations, backups.

Does not hold the queries of features: their ``store.py`` does.
"""
