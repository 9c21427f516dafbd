"""Client-side assignors: what the leader of a classic group computes for its members."""
