"""Pure planning on numpy: what two programs must compute alike, without torch and without I/O."""
