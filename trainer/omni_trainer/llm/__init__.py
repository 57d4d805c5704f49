"""The language model, built from megatron-core."""
