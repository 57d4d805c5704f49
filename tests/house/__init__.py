"""Tests of the repository itself: layout, setup, documents."""
