"""Tests of omni_cli."""
