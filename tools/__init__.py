"""Tools beside the running broker: moving logs, changing a cluster, and sweeping crash points."""
