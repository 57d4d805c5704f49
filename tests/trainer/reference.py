"""The model without anchor, pipeline, packing or replicas: what every layout must agree with."""

from itertools import chain

import torch
from torch import Tensor

from omni_contract.plan import JobPlan
from omni_contract.spec_model import Modality
from omni_trainer.device import Device
from omni_trainer.encoders.build import build_encoders
from tests.trainer.inputs import Content, pack


def reference_step(
    rank: int, plan: JobPlan, batches: list[Content]
) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients by parameter name of each batch, sample by sample, on one rank.

    `plan` is of one stage and one replica; only its model is used.
    """
    from omni_trainer.llm import megatron

    assert rank == 0
    device = Device.open("cpu")
    cpu = device.torch_device
    megatron.initialize_parallel(plan.layout, seed=1)
    stage = megatron.build_stage(plan, device=cpu, dtype=torch.float32)
    seed = plan.spec.train.seed
    encoders = build_encoders(plan.spec.model, seed=seed, device=cpu, dtype=torch.float32)
    named = megatron.global_parameters(stage) + [
        (f"encoders.{encoder.modality}.{name}", parameter)
        for encoder in encoders
        for name, parameter in encoder.named_parameters()
    ]
    by_modality = {encoder.modality: encoder for encoder in encoders}
    results = []
    for batch in batches:
        for _, parameter in named:
            parameter.grad = None
        total, num_tokens = 0.0, 0
        for piece in chain.from_iterable(chain.from_iterable(batch)):
            alone = pack([piece], num_tokens=len(piece.tokens))
            assert alone.tokens is not None
            hidden = megatron.embed(stage, alone.tokens.long())  # [t, 1, W]
            if piece.modality is not Modality.TEXT:
                number = piece.num_modality_tokens
                tokens = by_modality[piece.modality].encode(alone, cpu)
                if piece.is_corrupt:
                    tokens = torch.zeros(number, hidden.shape[2])
                hidden = torch.cat([tokens[:, None], hidden[number:]])
            labels, mask = (torch.from_numpy(x) for x in piece.targets)
            blocks = megatron.blocks_of([len(piece.tokens)], cpu)
            losses = megatron.run_stage(stage, embedded=hidden, labels=labels, blocks=blocks)
            loss: Tensor = (losses[0] * mask).sum()
            loss.backward()
            total += float(loss.detach())
            num_tokens += int(mask.sum())
        gradients = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad) / num_tokens
            for name, p in named
        }
        results.append((total / num_tokens, {n: g.clone() for n, g in gradients.items()}))
    megatron.release_parallel()
    return results
