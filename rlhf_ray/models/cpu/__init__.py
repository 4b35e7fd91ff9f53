"""What only CPUs need: linear layers by oneDNN, attention over short rows by matrix products, and when to use them."""
