"""Estimates what a run needs on given machines before it starts: memory, placement, disk and time.

Formulas of operations, bytes and bandwidths, each with its source. Nothing is started and no weight is loaded. The
formulas are checked against measured roles by `python -m benchmarks.cluster_model` and `benchmarks.plan_memory`
(docs/benchmarks.md).
"""
