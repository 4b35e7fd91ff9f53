"""How cost grows with a model's size and with the length of responses, role by role.

`python -m benchmarks.growth` measures real roles alone in their processes and fits exponents. See docs/benchmarks.md.
"""
