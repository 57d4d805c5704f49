"""Data service of one node: plans, fetches, decodes and serves the samples its ranks consume."""
