"""The objects of a job as documents. Pure: job, plan and placement in, what to POST out."""
