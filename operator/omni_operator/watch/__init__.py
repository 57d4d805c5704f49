"""What the watches tell, reduced to what decisions read and kept by job and node."""
