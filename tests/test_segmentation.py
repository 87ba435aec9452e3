"""Segmentation heads of dynamic height and width: pyramids, pooled context and decoders as libraries write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.check import check
from tests.support.tolerances import looser

#: Heights and widths that the models are run at, odd ones among them; exported at (64, 96).
SIZES = ((64, 96), (33, 65), (95, 47), (128, 32), (71, 100))


def block(channels: int, out: int, kernel: int = 3, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, stride, padding, dilation, bias=False), nn.BatchNorm2d(out), nn.ReLU()
    )


class Backbone(nn.Module):
    """Feature maps of a half, a quarter, an eighth and a sixteenth of the size."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stages = nn.ModuleList(block(3 if not n else width, width, stride=2) for n in range(4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


class PyramidPooling(nn.Module):
    """PSPNet's head: means over grids of several sizes, resized to the map's size."""

    def __init__(self, width: int, grids: tuple[int, ...] = (1, 2, 3, 6), align_corners: bool = False) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.AdaptiveAvgPool2d(g), nn.Conv2d(width, 4, 1)) for g in grids)
        self.last = block(width + 4 * len(grids), width)
        self.align_corners = align_corners

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        resize = {"size": x.shape[2:], "mode": "bilinear", "align_corners": self.align_corners}
        return self.last(torch.cat([x, *(F.interpolate(stage(x), **resize) for stage in self.stages)], 1))


class AtrousPooling(nn.Module):
    """DeepLab's head: dilated convolutions, and the mean of the whole map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(block(width, 4, 3 if rate > 1 else 1, dilation=rate) for rate in (1, 2, 4))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 4, 1), nn.ReLU())
        self.last = block(16, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = F.interpolate(self.pool(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.last(torch.cat([*(branch(x) for branch in self.branches), mean], 1))


class PSPNet(nn.Module):
    def __init__(self, align_corners: bool) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), PyramidPooling(8, align_corners=align_corners)
        self.classes = nn.Conv2d(8, 5, 1)
        self.align_corners = align_corners

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.classes(self.head(self.backbone(x)[2]))
        return F.interpolate(scores, size=x.shape[-2:], mode="bilinear", align_corners=self.align_corners)


class DeepLabV3Plus(nn.Module):
    """The decoder joins the context, enlarged four times, with a map of higher resolution."""

    def __init__(self, by_factor: bool) -> None:
        super().__init__()
        self.backbone, self.context = Backbone(), AtrousPooling(8)
        self.low, self.decode = block(8, 4, 1), nn.Sequential(block(12, 8), nn.Conv2d(8, 5, 1))
        self.by_factor = by_factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.backbone(x)
        context, low = self.context(maps[3]), self.low(maps[1])
        if self.by_factor:
            context = F.interpolate(context, scale_factor=4, mode="bilinear", align_corners=True)
            context = context[..., : low.shape[2], : low.shape[3]]
        else:
            context = F.interpolate(context, size=low.shape[2:], mode="bilinear", align_corners=True)
        scores = self.decode(torch.cat([context, low], 1))
        return F.interpolate(scores, size=x.shape[2:], mode="bilinear", align_corners=False)


class FeaturePyramid(nn.Module):
    """FPN: maps added from the top down, each brought to one size, and summed."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.lateral = nn.ModuleList(nn.Conv2d(8, 6, 1) for _ in range(4))
        self.smooth = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(4))
        self.classes = nn.Conv2d(6, 5, 1)
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [layer(m) for layer, m in zip(self.lateral, self.backbone(x), strict=True)]
        for level in range(3, 0, -1):
            maps[level - 1] = maps[level - 1] + F.interpolate(
                maps[level], size=maps[level - 1].shape[2:], mode=self.mode
            )
        finest = maps[0].shape[2:]
        summed = sum(
            F.interpolate(layer(m), size=finest, mode="bilinear", align_corners=False)
            for layer, m in zip(self.smooth, maps, strict=True)
        )
        return F.interpolate(self.classes(summed), size=x.shape[2:], mode="bicubic", align_corners=False)


class UPerNet(nn.Module):
    """Pooled context at the top of a feature pyramid; all its levels are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.context = Backbone(), PyramidPooling(8, align_corners=True)
        self.lateral = nn.ModuleList(block(8, 8, 1) for _ in range(3))
        self.smooth = nn.ModuleList(block(8, 8) for _ in range(3))
        self.fuse, self.classes = block(32, 8), nn.Conv2d(8, 5, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maps = self.backbone(x)
        levels = [layer(m) for layer, m in zip(self.lateral, maps[:3], strict=True)] + [self.context(maps[3])]
        for level in range(3, 0, -1):
            shape = levels[level - 1].shape[2:]
            levels[level - 1] = levels[level - 1] + F.interpolate(
                levels[level], size=shape, mode="bilinear", align_corners=True
            )
        outs = [layer(m) for layer, m in zip(self.smooth, levels[:3], strict=True)] + [levels[3]]
        outs = [F.interpolate(o, size=outs[0].shape[2:], mode="bilinear", align_corners=True) for o in outs]
        scores = self.classes(self.fuse(torch.cat(outs, 1)))
        return F.interpolate(scores, size=x.shape[2:], mode="bilinear", align_corners=True), scores.softmax(1)


class UNet(nn.Module):
    """Maps enlarged by transposed convolutions and by factors, padded or cropped to the size of the map they are joined with."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.up = nn.ModuleList(nn.ConvTranspose2d(8, 8, 2, 2) for _ in range(3))
        self.join = nn.ModuleList(block(16, 8) for _ in range(3))
        self.classes = nn.Conv2d(8, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *skips, y = self.backbone(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips), strict=True):
            y = up(y)
            height, width = skip.shape[2] - y.shape[2], skip.shape[3] - y.shape[3]
            y = F.pad(y, (width // 2, width - width // 2, height // 2, height - height // 2))
            y = join(torch.cat([skip, y], 1))
        return F.interpolate(self.classes(y), size=x.shape[2:], mode="nearest")


def torchvision_model(name: str) -> nn.Module:
    from torchvision.models import segmentation

    model: nn.Module = getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=5)
    return model


def transformers_model(name: str) -> nn.Module:
    import transformers

    if name == "Segformer":
        config = transformers.SegformerConfig(
            depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16
        )
        return Scores(transformers.SegformerForSemanticSegmentation(config))
    stages = ["stage1", "stage2", "stage3", "stage4"]
    backbone = transformers.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=stages)
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=16, num_labels=5, auxiliary_in_channels=16, auxiliary_channels=8
    )
    return Scores(transformers.UperNetForSemanticSegmentation(config))


class Scores(nn.Module):
    """A model of transformers with one result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values).logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "PSPNet": lambda: PSPNet(align_corners=False),
    "PSPNet, corners aligned": lambda: PSPNet(align_corners=True),
    "DeepLabV3+": lambda: DeepLabV3Plus(by_factor=False),
    "DeepLabV3+ by a factor": lambda: DeepLabV3Plus(by_factor=True),
    "FPN": lambda: FeaturePyramid("nearest"),
    "FPN, bilinear": lambda: FeaturePyramid("bilinear"),
    "UPerNet": UPerNet,
    "UNet": UNet,
}


def lively(model: nn.Module) -> nn.Module:
    """Weights and statistics that differ from channel to channel."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("running_var"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def agrees(model: nn.Module, sizes: Sequence[tuple[int, int]] = SIZES) -> None:
    first, *others = [torch.randn(batch, 3, *size) for batch, size in enumerate(sizes, 1)]
    dynamic = ({0: "batch", 2: "height", 3: "width"},)
    check(model, torch.cat([first, first]), others=[(x,) for x in others], dynamic=dynamic, **looser("segmentation"))


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_segmentation_models(name: str) -> None:
    torch.manual_seed(1)
    agrees(lively(MODELS[name]()))


@pytest.mark.long
@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("name", ["deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large"])
def test_segmentation_models_of_torchvision(name: str) -> None:
    torch.manual_seed(1)
    agrees(lively(torchvision_model(name)))


@pytest.mark.long
@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("name", ["Segformer", "UperNet"])
def test_segmentation_models_of_transformers(name: str) -> None:
    torch.manual_seed(1)
    agrees(lively(transformers_model(name)))
