"""Tests of omni_dataloader."""
