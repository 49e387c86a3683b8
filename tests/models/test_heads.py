from __future__ import annotations

import torch

from models.heads import RotationHead
from models.network import rotations


def test_each_rotation_is_scored_with_its_own_layer() -> None:
    torch.manual_seed(0)
    head = RotationHead(features=5, classes=3)
    head.bias.data.normal_()
    features = torch.randn(4, 6, 5)
    # Class c under rotation r stands at r * classes + c.
    own = [head.all_logits(features[turn])[:, turn * 3 : turn * 3 + 3] for turn in range(4)]
    torch.testing.assert_close(head.each_rotation(features), torch.stack(own))


def test_a_live_part_has_the_same_outputs_on_the_remaining_features() -> None:
    torch.manual_seed(0)
    head = RotationHead(features=5, classes=3)
    head.scale.fill_(3.0)
    features, live = torch.randn(4, 6, 5), torch.tensor([1, 4])
    others = torch.tensor([0, 2, 3])
    features[:, :, others] = 0
    part = head.live_part(live)
    assert part.weight.shape == (4, 2, 3)
    torch.testing.assert_close(part.each_rotation(features[:, :, live]), head.each_rotation(features))
    assert (part.scale, part.shift) == (head.scale, head.shift)


def test_rotations_turn_pixels_by_quarter_circles_and_keep_images_together() -> None:
    images = torch.arange(8.0).view(2, 1, 2, 2)
    rotated = rotations(images)[:, 0].tolist()
    assert rotated == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[1, 3], [0, 2]],
        [[5, 7], [4, 6]],
        [[3, 2], [1, 0]],
        [[7, 6], [5, 4]],
        [[2, 0], [3, 1]],
        [[6, 4], [7, 5]],
    ]
