"""Encoders and language model on the same ranks."""
