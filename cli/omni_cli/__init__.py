"""Command line: runs, plans and inspects jobs, and builds their data."""
