"""What the operator costs and how fast it is, on a real control plane with a thousand simulated
nodes. Run it with `python -m benchmarks.operator.main`; docs/benchmarks.md has the method."""
