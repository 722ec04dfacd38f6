"""Parameter servers: server process, discovery, connections, and the strategy `ps`."""
