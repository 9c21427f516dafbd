"""The cluster: who leads, who follows, who has what. Pure: no clock, no socket, no file."""
