"""torchvision: the smallest model of each family, for classes, segmentation, films and flow, and dense detectors.

Detectors are given as (forward, loss): the loss of the package matches anchors to boxes, on the outputs of all images.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models import BATCH, Inputs, Loss, Offer, images, sides

CLASSES = 10

CLASSIFIERS = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "regnet_x_400mf",
    "regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "squeezenet1_1",
    "swin_t", "swin_v2_t", "vgg11", "vgg11_bn", "vit_b_16", "wide_resnet50_2",
)  # fmt: skip
SEGMENTERS = ("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")
FILMS = ("mc3_18", "mvit_v1_b", "mvit_v2_s", "r2plus1d_18", "r3d_18", "s3d", "swin3d_t")
FLOW = ("raft_small",)
DETECTORS = ("fcos_resnet50_fpn", "retinanet_resnet50_fpn", "ssdlite320_mobilenet_v3_large")


def names() -> list[str]:
    """All models here."""
    return [*CLASSIFIERS, *SEGMENTERS, *FILMS, *FLOW, *DETECTORS]


def offers(name: str) -> Iterator[Offer]:
    """Small images first; parts of transformers."""
    import torchvision.models as models

    if name in DETECTORS:
        yield _detector(name)
    elif name in FLOW:
        yield Offer("128x128", partial(_flow, name), lambda: {"image": _rgb(128), "image_after": _rgb(128)})
    elif name in FILMS:
        yield from _films(name)
    elif name == "vit_b_16":
        small = {"num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128, "num_classes": CLASSES}
        build = partial(models.VisionTransformer, image_size=64, patch_size=16, **small)
        yield Offer("64x64, two layers", build, partial(images, 64, 64))
    else:
        options: dict[str, Any] = {"weights": None, "num_classes": CLASSES}
        if name in SEGMENTERS:
            options.update(weights_backbone=None)
            options.update({} if name.startswith("lraspp") else {"aux_loss": True})
        for said, batch in sides(64, 128, 224, 299):
            yield Offer(said, partial(_small_head, name, options), batch)


def _rgb(side: int) -> Tensor:
    return torch.rand(BATCH, 3, side, side) * 2 - 1


def _small_head(name: str, options: dict[str, Any]) -> nn.Module:
    import torchvision.models as models

    model: Any = models.get_model(name, **options)
    if name.startswith("vgg"):  # its head holds nearly all of it
        model.classifier = nn.Linear(512 * 49, CLASSES)
    return model  # type: ignore[no-any-return]


def _flow(name: str) -> nn.Module:
    import torchvision.models as models

    class TwoSteps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raft = models.get_model(name, weights=None)

        def forward(self, before: Tensor, after: Tensor) -> Any:
            return self.raft(before, after, num_flow_updates=2)

    return TwoSteps()


def _films(name: str) -> Iterator[Offer]:
    from torchvision.models.video import mvit

    if name.startswith("mvit"):
        second = name == "mvit_v2_s"
        kind = {
            "residual_pool": second, "residual_with_cls_embed": not second, "rel_pos_embed": second,
            "proj_after_attn": second,
        }  # fmt: skip
        block = partial(mvit.MSBlockConfig, kernel_q=[3, 3, 3], kernel_kv=[3, 3, 3])
        blocks = [
            block(1, 32, 32, stride_q=[1, 1, 1], stride_kv=[1, 4, 4]),
            block(2, 32, 64, stride_q=[1, 2, 2], stride_kv=[1, 2, 2]),
        ]
        options: dict[str, Any] = {"num_classes": CLASSES, "stochastic_depth_prob": 0.2, **kind}
        build = partial(mvit.MViT, spatial_size=(32, 32), temporal_size=4, block_setting=blocks, **options)
        yield Offer("4x32x32, two blocks", build, partial(images, 4, 32, 32))
        return
    shape = (16, 64, 64) if name == "s3d" else (4, 32, 32)
    yield Offer("x".join(map(str, shape)), partial(_film, name), partial(images, *shape))


def _film(name: str) -> nn.Module:
    import torchvision.models as models

    model: Any = models.get_model(name, weights=None, num_classes=CLASSES)
    if name == "s3d":  # its last pooling wants images of 224 x 224
        model.avgpool = nn.AvgPool3d(2, stride=1)
    return model  # type: ignore[no-any-return]


def _detector(name: str) -> Offer:
    import torchvision.models as models

    build = partial(models.get_model, name, weights=None, weights_backbone=None, num_classes=CLASSES)
    return Offer("128x128", build, _with_boxes, _matched, of_model=True, options={"batch_dims": {"image": 0}})


def _with_boxes() -> Inputs:
    """Images with one, two, three and one boxes."""
    batch = images(128, 128)
    for sample, count in enumerate((1, 2, 3, 1)):
        corner = torch.rand(count, 2) * 60
        batch[f"boxes_{sample}"] = torch.cat([corner, corner + 20 + torch.rand(count, 2) * 40], dim=1)
        batch[f"labels_{sample}"] = torch.randint(1, CLASSES, (count,))
    return batch


def _heads(model: Any, batch: Inputs) -> tuple[dict[str, Tensor], list[Tensor]]:
    features = model.backbone(batch["image"])
    features = [features] if isinstance(features, Tensor) else list(features.values())
    return model.head(features), features


def _matched(model: Any) -> Loss:
    from torchvision.models.detection.image_list import ImageList

    def loss(found: Any, batch: Inputs) -> Tensor:
        heads, features = found
        targets = [{"boxes": batch[f"boxes_{i}"], "labels": batch[f"labels_{i}"]} for i in range(BATCH)]
        anchors = model.anchor_generator(ImageList(batch["image"], [(128, 128)] * BATCH), features)
        more = _more(model, targets, anchors, features)
        return sum(model.compute_loss(targets, heads, anchors, *more).values(), torch.zeros(()))

    return _heads, loss


def _more(model: Any, targets: list[Any], anchors: list[Tensor], features: list[Tensor]) -> list[Any]:
    """What the loss of this kind of detector takes besides."""
    from torchvision.ops import box_iou

    kind = type(model).__name__
    if kind == "FCOS":
        return [[x.size(2) * x.size(3) for x in features]]
    if kind == "SSD":
        pairs = zip(targets, anchors, strict=True)
        return [[model.proposal_matcher(box_iou(target["boxes"], found)) for target, found in pairs]]
    return []
