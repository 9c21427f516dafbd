"""Client-side assignors: the algorithms of a classic group's leader."""
