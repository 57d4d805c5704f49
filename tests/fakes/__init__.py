"""Small real inputs and stand-ins, shared by all tests."""
