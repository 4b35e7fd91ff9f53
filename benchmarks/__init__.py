"""What the project's own layers cost or gain, each as a ratio to a plain way of doing the same work.

`python -m benchmarks` runs them; one file a benchmark, named after its figure. See docs/benchmarks.md.
"""
