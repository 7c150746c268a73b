"""ResNet-50 in plain torch (He et al., CVPR 2016, table 1; strides are in the 3x3 convolutions, as in torchvision)."""

from __future__ import annotations

from typing import Any

from torch import nn

EXPANSION = 4
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride of the first block


def convolution(inside: int, outside: int, size: int, stride: int = 1) -> list[Any]:
    return [nn.Conv2d(inside, outside, size, stride, size // 2, bias=False), nn.BatchNorm2d(outside)]


class Bottleneck(nn.Module):  # type: ignore[misc]
    """1x1, 3x3 and 1x1 convolutions around a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = EXPANSION * width
        self.layers = nn.Sequential(
            *convolution(inside, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outside, 1),
        )
        same = inside == outside and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(inside, outside, 1, stride))

    def forward(self, x: Any) -> Any:
        return nn.functional.relu(self.layers(x) + self.shortcut(x))


def resnet50(classes: int = 1000) -> Any:
    layers = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for width, blocks, stride in STAGES:
        for number in range(blocks):
            layers.append(Bottleneck(inside, width, stride if number == 0 else 1))
            inside = EXPANSION * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))
