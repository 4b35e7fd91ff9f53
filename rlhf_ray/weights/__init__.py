"""How new policy weights reach the generators: cut into buckets, checked on arrival, applied as a whole."""
