"""Tests of omni_contract."""
