"""What the standard library lacks: errors, JSON of dataclasses, quantities, asyncio helpers.

Does not know jobs or nodes.
"""
