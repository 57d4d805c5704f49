"""What the programs of MegaScale-Omni must agree on: job spec, plan, wire format, names."""
