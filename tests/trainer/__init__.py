"""Tests of omni_trainer."""
