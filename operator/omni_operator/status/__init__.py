"""What a job's status says. Pure: the old status and what is observed in, the new one out."""
