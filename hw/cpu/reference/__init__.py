"""Plain torch meaning of every op: the oracle that all other backends are tested against. Written for reading, not for speed."""
