"""The whole system on small jobs."""
