"""`launch/gpu_check`: what only a GPU can show, each part on its own, and a table of what came out.

`parts.py` lists the checks. `runner.py` runs each one in a process of its own, `results.py` saves its rows.
"""
