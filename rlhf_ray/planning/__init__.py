"""What a run would take on which machines, before it is paid for: memory, places, disk and time, by arithmetic.

Formulas of operations, bytes and bandwidths, each with its source; nothing here starts anything or loads a weight. They
are checked against measured roles by `python -m benchmarks.cluster_model` and `benchmarks.plan_memory`
(docs/benchmarks.md).
"""
