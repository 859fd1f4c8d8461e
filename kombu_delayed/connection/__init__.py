"""How a process reaches the servers: URLs, options and the connections themselves."""
