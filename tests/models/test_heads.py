from __future__ import annotations

import torch

from models.heads import RotationHead
from models.network import rotations


def test_the_ensemble_scores_each_rotation_with_its_own_layer_and_calibrates_the_mean() -> None:
    torch.manual_seed(0)
    head = RotationHead(features=5, classes=3)
    head.bias.data.normal_()
    head.scale.fill_(2.0)
    head.shift.fill_(-0.5)
    features = torch.randn(4, 6, 5)
    # Class c under rotation r stands at r * classes + c.
    own = [head.all_logits(features[turn])[:, turn * 3 : turn * 3 + 3] for turn in range(4)]
    wanted = torch.stack(own).mean(dim=0) * 2 - 0.5
    torch.testing.assert_close(head.ensemble(features), wanted)


def test_a_live_part_says_the_same_on_the_features_that_are_left() -> None:
    torch.manual_seed(0)
    head = RotationHead(features=5, classes=3)
    head.scale.fill_(3.0)
    features, live = torch.randn(4, 6, 5), torch.tensor([1, 4])
    others = torch.tensor([0, 2, 3])
    features[:, :, others] = 0
    part = head.live_part(live)
    assert part.weight.shape == (4, 2, 3)
    torch.testing.assert_close(part.ensemble(features[:, :, live]), head.ensemble(features))


def test_rotations_turn_pixels_by_quarter_circles_and_keep_images_together() -> None:
    images = torch.arange(8.0).view(2, 1, 2, 2)
    turned = rotations(images)[:, 0].tolist()
    assert turned == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[1, 3], [0, 2]],
        [[5, 7], [4, 6]],
        [[3, 2], [1, 0]],
        [[7, 6], [5, 4]],
        [[2, 0], [3, 1]],
        [[6, 4], [7, 5]],
    ]
