"""A job on a real cluster that is broken in many ways and ends all the same: `make e2e`."""
