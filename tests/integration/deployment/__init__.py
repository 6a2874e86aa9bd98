"""UGRO where it runs: as a service, in containers, on another machine, and its jobs on other systems."""
