"""Tests of every project, packages all the way down so that started ranks import them by name."""
