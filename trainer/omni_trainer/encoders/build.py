"""Encoders from the job file: the registry of kinds."""

import torch
from torch import nn

from omni_contract.spec_model import ModelSpec, UsmSpec, VitSpec
from omni_trainer.encoders.plugin import Encoder
from omni_trainer.encoders.usm import Usm
from omni_trainer.encoders.vit import Vit
from omni_trainer.weights import initialize


def build_encoders(
    spec: ModelSpec, *, seed: int, device: torch.device, dtype: torch.dtype
) -> list[Encoder]:
    """The job's encoders in the order image, audio, with starting weights that depend on the seed.

    The same on every rank of the world, without a message.
    """
    encoders: list[Encoder] = []
    for modality, encoder_spec in spec.encoders.items():
        match encoder_spec:
            case VitSpec():
                encoder: Encoder = Vit(encoder_spec, spec.llm.hidden_size)
            case UsmSpec():
                encoder = Usm(encoder_spec, spec.llm.hidden_size)
        named = ((f"encoders.{modality}.{name}", p) for name, p in encoder.named_parameters())
        initialize(named, seed=seed, num_layers=encoder_spec.layers)
        encoder.train_only(encoder_spec.train)
        encoders.append(encoder.to(device=device, dtype=dtype))
    return encoders


def as_module(encoders: list[Encoder]) -> nn.ModuleDict:
    """All encoders under their modality's name, as one module for the optimizer."""
    return nn.ModuleDict({str(encoder.modality): encoder for encoder in encoders})
