"""What `ugro doctor` and a launch look at on a node, each in a process that may hang."""
