"""How new policy weights reach the generators: sent in buckets, verified on arrival, applied as a whole."""
