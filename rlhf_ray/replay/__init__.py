"""Experience between generation and learning: what may be admitted, what is held, what is too old to train on."""
