"""What integration tests and benchmarks stand on: real sshds, cables that can be cut, and honest waiting."""
