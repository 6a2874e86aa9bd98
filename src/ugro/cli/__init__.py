"""Commands: parse, ask the agent, print.

Does not decide anything, and knows no feature: features bring their own commands.
"""
