"""What every test rank imports, done once in the fork server: it takes seconds per process."""

from omni_trainer.device import Device

DEVICE = Device.open("cpu")

import omni_trainer.llm.megatron  # noqa: E402, F401  (after the device is open)
import omni_trainer.train  # noqa: E402, F401
