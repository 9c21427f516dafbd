"""Server-side assignors of the consumer protocol: who shall read which partition."""
