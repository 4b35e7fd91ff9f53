"""`launch/gpu_check`: every path that needs a GPU, run once on one, and a table of what came out."""
