"""Ways to controllers and to other brokers: what a broker of a cluster does on its own account."""
