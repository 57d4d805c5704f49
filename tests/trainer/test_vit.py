"""The picture encoder: any grid, pictures that do not see each other, tokens as planned."""

import numpy as np
import pytest
import torch

from omni_contract.spec_model import VitSpec
from omni_planner.cost import out_len
from omni_trainer.encoders.vit import Vit
from omni_trainer.weights import initialize
from tests.trainer.inputs import Piece, make_piece, pack

CPU = torch.device("cpu")


def make_vit(**fields: object) -> Vit:
    spec = VitSpec(layers=2, hidden_size=48, heads=4, patch_size=4, max_patches=256, **fields)
    vit = Vit(spec, 32)
    initialize(vit.named_parameters(), seed=1, num_layers=2)
    return vit


def pictures(number: int) -> list[Piece]:
    rng = np.random.default_rng(5)
    return [make_piece(rng, "image", i) for i in range(number)]


def test_packed_equals_one_by_one() -> None:
    vit, pieces = make_vit(), pictures(4)
    packed = vit.encode(pack(pieces, num_tokens=200), CPU)
    alone = torch.cat([vit.encode(pack([piece]), CPU) for piece in pieces])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_another_picture_in_the_pack_changes_nothing() -> None:
    vit = make_vit()
    first, second, third, _ = pictures(4)
    count = first.num_modality_tokens
    a = vit.encode(pack([first, second]), CPU)[:count]
    b = vit.encode(pack([first, third]), CPU)[:count]
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not torch.equal(vit.encode(pack([second]), CPU)[: len(a)][:1], a[:1])


@pytest.mark.parametrize("size", [(8, 8), (64, 8), (8, 640), (50, 33), (1, 1), (4000, 3000)])
def test_tokens_are_as_many_as_the_planner_counts(size: tuple[int, int]) -> None:
    from omni_planner.cost import image_grid

    vit = make_vit()
    rows, columns = (int(x) for x in image_grid(*size, vit.spec))
    inputs = pack([])
    inputs = type(inputs)(
        index=1,
        samples=inputs.samples,
        spans=inputs.spans,
        image_patches=torch.zeros(rows * columns, 48, dtype=torch.uint8),
        image_grid=torch.tensor([[rows, columns]], dtype=torch.int32),
    )
    assert len(vit.encode(inputs, CPU)) == int(out_len(np.array(size), vit.spec))


def test_the_place_of_a_patch_matters() -> None:
    vit, (piece,) = make_vit(), pictures(1)
    assert piece.patches is not None
    rows, columns = piece.grid
    turned = Piece(
        ids=piece.ids, tokens=piece.tokens, modality=piece.modality, patches=piece.patches,
        num_modality_tokens=piece.num_modality_tokens, grid=(columns * rows // 2, 2),
    )  # fmt: skip
    assert turned.grid != piece.grid
    straight, bent = (vit.encode(pack([p]), CPU) for p in (piece, turned))
    assert not torch.allclose(straight, bent)


def test_no_pictures_make_no_tokens_and_no_graph() -> None:
    tokens = make_vit().encode(pack([]), CPU)
    assert tokens.shape == (0, 32)
    assert not tokens.requires_grad


@pytest.mark.parametrize(
    ("trained", "learning"),
    [("full", {"embed", "blocks", "projector"}), ("projector", {"projector"}), ("frozen", set())],
)
def test_only_what_learns_builds_a_graph(trained: str, learning: set[str]) -> None:
    vit = make_vit()
    vit.train_only(trained)  # type: ignore[arg-type]
    found = {name.split(".")[0] for name, p in vit.named_parameters() if p.requires_grad}
    assert found == learning
    assert vit.learns == bool(learning)
    tokens = vit.encode(pack(pictures(1)), CPU)
    assert tokens.requires_grad == bool(learning)
    if learning:
        tokens.sum().backward()
        touched = {n.split(".")[0] for n, p in vit.named_parameters() if p.grad is not None}
        assert touched == learning
