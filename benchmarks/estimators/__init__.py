"""Does every estimator learn? All of them on the quickstart's task, from one SFT model, with one budget of samples.

`python -m benchmarks.estimators` runs them for several seeds and writes one table and one plot. See docs/benchmarks.md.
"""
