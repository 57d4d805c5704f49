"""Tests of omni_operator."""
