"""The command line: parse, make one client call, hand the result to Output."""
