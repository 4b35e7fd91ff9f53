"""What a run would take on machines that are not at hand, by arithmetic alone.

Formulas of operations, bytes and bandwidths, each with its source; nothing here starts or measures anything. They are
checked against measured roles by `python -m benchmarks.cluster_model` (docs/benchmarks.md).
"""
