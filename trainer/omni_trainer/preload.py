"""What every rank on a CPU imports, done once in the nursery: it takes seconds per process."""

import importlib

from omni_trainer.device import Device


def on_cpu() -> None:
    """Import all of a rank. Opens no socket, starts no thread: the process is forked after it."""
    Device.open("cpu")  # before megatron is first imported
    for module in (
        "omni_trainer.llm.megatron",
        "omni_trainer.main",
        "torch._dynamo",  # the first torch optimizer imports it
    ):
        importlib.import_module(module)
