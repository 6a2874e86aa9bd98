"""Signed calls when queues grow, nodes idle or jobs end. Does not start or stop machines itself."""
