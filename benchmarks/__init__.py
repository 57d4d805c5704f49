"""Measurements that are too long for tests. Each writes its figures into out/bench."""
