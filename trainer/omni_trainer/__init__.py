"""Multiplexed training engine of one rank, and the supervisor of the ranks of one pod."""
