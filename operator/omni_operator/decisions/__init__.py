"""What is to be done about a job now. Pure: what is observed in, the next step out."""
