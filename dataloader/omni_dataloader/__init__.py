"""Data service of one node: plans, fetches, decodes and serves exactly the samples its ranks consume."""
