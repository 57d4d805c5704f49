"""Tests of omni_planner."""
