"""`make e2e`: a job on real nodes, broken in every way, held against one left alone."""
