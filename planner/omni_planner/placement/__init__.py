"""Where the nodes of a plan run: whole reorder groups under one network domain. Pure."""
