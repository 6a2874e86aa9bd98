"""How machines become nodes: ssh configuration, LAN, ZooKeeper, Consul, a command. Does not connect to nodes itself."""
