"""monai: networks for images (2D) and volumes (3D), made small by their own arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ..models import BATCH, Inputs, Offer, images

Made = tuple[Callable[[Any], nn.Module], Callable[[], Inputs]]
_PATH = {"channels": (8, 16, 32), "strides": (2, 2)}
_EACH = {"channels": (8, 16), "strides": (2, 2)}
_FLAT, _SOLID = {"spatial_dims": 2}, {"spatial_dims": 3}


def _one(*sizes: int) -> Callable[[], Inputs]:
    return partial(images, *sizes, channels=1)


def _timed() -> Inputs:
    """Images and the step of diffusion of each."""
    return {**images(32, 32, channels=1), "image_time": torch.randint(0, 100, (BATCH,))}


def _unet(nets: Any, norm: str, **options: Any) -> nn.Module:
    return nets.UNet(in_channels=1, out_channels=2, norm=norm, num_res_units=2, **_PATH, **options)  # type: ignore[no-any-return]


_KERNELS: dict[str, Any] = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
_TOKENS: dict[str, Any] = {"hidden_size": 24, "mlp_dim": 48, "num_heads": 3}
_SWIN: dict[str, Any] = {"in_channels": 1, "out_channels": 2, "feature_size": 12}

MODELS: dict[str, Made] = {
    "unet-2d-batch": (lambda n: _unet(n, "BATCH", **_FLAT), _one(32, 32)),
    "unet-3d-batch": (lambda n: _unet(n, "BATCH", **_SOLID), _one(16, 16, 16)),
    "unet-2d-instance": (lambda n: _unet(n, "INSTANCE", **_FLAT), _one(32, 32)),
    "unet-3d-instance": (lambda n: _unet(n, "INSTANCE", **_SOLID), _one(16, 16, 16)),
    "swin-unetr-2d": (lambda n: n.SwinUNETR(**_SWIN, **_FLAT), _one(64, 64)),
    "swin-unetr-3d": (lambda n: n.SwinUNETR(**_SWIN, **_SOLID), _one(64, 32, 32)),
    "swin-unetr-3d-v2": (lambda n: n.SwinUNETR(**_SWIN, **_SOLID, use_v2=True), _one(64, 32, 32)),
    "swin-unetr-2d-drop-path": (lambda n: n.SwinUNETR(**_SWIN, **_FLAT, dropout_path_rate=0.2), _one(64, 64)),
    "unetr": (lambda n: n.UNETR(1, 2, (32, 32), feature_size=8, **_TOKENS, **_FLAT), _one(32, 32)),
    "vit": (lambda n: n.ViT(1, (32, 32), (16, 16), num_layers=2, classification=True, **_TOKENS, **_FLAT),
            _one(32, 32)),
    "vit-autoenc": (lambda n: n.ViTAutoEnc(1, (32, 32), (16, 16), num_layers=2, **_TOKENS, **_FLAT), _one(32, 32)),
    "masked-autoencoder-vit": (
        lambda n: n.MaskedAutoEncoderViT(
            1, (32, 32), (8, 8), num_layers=2, decoder_hidden_size=24, decoder_mlp_dim=48, decoder_num_layers=1,
            decoder_num_heads=3, **_TOKENS, **_FLAT,
        ),
        _one(32, 32),
    ),
    "dynunet-2d": (lambda n: n.DynUNet(in_channels=1, out_channels=2, filters=[8, 16, 32], **_KERNELS, **_FLAT),
                   _one(32, 32)),
    "dynunet-3d-deep-supervision": (
        lambda n: n.DynUNet(
            in_channels=1, out_channels=2, filters=[8, 16, 32], deep_supervision=True, norm_name="batch",
            res_block=True, **_KERNELS, **_SOLID,
        ),
        _one(16, 16, 16),
    ),
    "basic-unet": (lambda n: n.BasicUNet(features=(8, 8, 16, 16, 32, 8), norm="batch", **_FLAT), _one(64, 64)),
    "basic-unet-plus-plus": (
        lambda n: n.BasicUNetPlusPlus(features=(8, 8, 16, 16, 32, 8), norm="batch", **_FLAT), _one(64, 64)),
    "attention-unet": (lambda n: n.AttentionUnet(in_channels=1, out_channels=2, **_PATH, **_FLAT), _one(32, 32)),
    "flexible-unet": (lambda n: n.FlexibleUNet(1, 2, "resnet18", decoder_channels=(64, 32, 16, 8, 8)), _one(64, 64)),
    "ahnet": (lambda n: n.AHNet(layers=(1, 1, 1, 1), psp_block_num=2, **_FLAT), _one(64, 64)),
    "highresnet": (lambda n: n.HighResNet(**_FLAT), _one(16, 16)),
    "segresnet-2d": (lambda n: n.SegResNet(init_filters=8, **_FLAT), _one(32, 32)),
    "segresnet-3d-batch": (lambda n: n.SegResNet(init_filters=8, norm="batch", **_SOLID), _one(16, 16, 16)),
    "segresnet-ds": (lambda n: n.SegResNetDS(init_filters=8, dsdepth=2, **_FLAT), _one(32, 32)),
    "segresnet-vae": (lambda n: n.SegResNetVAE(input_image_size=(32, 32), init_filters=8, **_FLAT), _one(32, 32)),
    "vnet": (lambda n: n.VNet(**_FLAT, dropout_dim=2), _one(32, 32)),
    "mednext": (lambda n: n.MedNeXt(init_filters=8, kernel_size=3, **_FLAT), _one(32, 32)),
    "quicknat": (lambda n: n.Quicknat(num_classes=2, num_filters=8, norm="batch"), _one(32, 32)),
    "resnet10-3d": (lambda n: n.resnet10(spatial_dims=3, n_input_channels=1, num_classes=2), _one(32, 32, 32)),
    "densenet121": (lambda n: n.DenseNet121(2, 1, 2, init_features=16, growth_rate=8), _one(64, 64)),
    "senet": (lambda n: n.SEResNet50(spatial_dims=2, in_channels=1, num_classes=2, layers=(1, 1, 1, 1)), _one(64, 64)),
    "efficientnet-bn": (
        lambda n: n.EfficientNetBN("efficientnet-b0", False, in_channels=1, num_classes=2), _one(64, 64)),
    "regressor": (lambda n: n.Regressor((1, 32, 32), (2,), norm="batch", **_EACH), _one(32, 32)),
    "classifier": (lambda n: n.Classifier((1, 32, 32), 2, norm="batch", **_EACH), _one(32, 32)),
    "patch-discriminator": (
        lambda n: n.PatchDiscriminator(spatial_dims=2, channels=8, in_channels=1), _one(32, 32)),
    "multi-scale-patch-discriminator": (
        lambda n: n.MultiScalePatchDiscriminator(
            num_d=2, num_layers_d=2, spatial_dims=2, channels=8, in_channels=1, minimum_size_im=64,
        ),
        _one(64, 64),
    ),
    "autoencoder": (
        lambda n: n.AutoEncoder(in_channels=1, out_channels=1, norm="batch", **_EACH, **_FLAT), _one(32, 32)),
    "var-autoencoder": (
        lambda n: n.VarAutoEncoder(in_shape=(1, 32, 32), out_channels=1, latent_size=4, **_EACH, **_FLAT),
        _one(32, 32),
    ),
    "autoencoder-kl": (
        lambda n: n.AutoencoderKL(channels=(16, 16), num_res_blocks=1, attention_levels=(False, True),
                                  norm_num_groups=8, **_FLAT),
        _one(32, 32),
    ),
    "vqvae": (
        lambda n: n.VQVAE(
            in_channels=1, out_channels=1, channels=(16, 16), num_res_layers=1, num_res_channels=(16, 16),
            downsample_parameters=((2, 4, 1, 1),) * 2, upsample_parameters=((2, 4, 1, 1, 0),) * 2,
            num_embeddings=8, embedding_dim=4, **_FLAT,
        ),
        _one(32, 32),
    ),
    "diffusion-model-unet": (
        lambda n: n.DiffusionModelUNet(
            in_channels=1, out_channels=1, channels=(16, 16), num_res_blocks=1, attention_levels=(False, True),
            norm_num_groups=8, num_head_channels=8, **_FLAT,
        ),
        _timed,
    ),
    "voxelmorph": (
        lambda n: n.VoxelMorph(spatial_dims=2, backbone=n.VoxelMorphUNet(
            spatial_dims=2, in_channels=2, unet_out_channels=8, channels=(8, 8, 8, 8, 8, 8), final_conv_channels=(8, 8),
        )),
        lambda: {"image": torch.rand(BATCH, 1, 32, 32), "image_after": torch.rand(BATCH, 1, 32, 32)},
    ),
    "regunet": (lambda n: n.RegUNet(in_channels=1, num_channel_initial=8, depth=2, **_FLAT), _one(32, 32)),
    "localnet": (
        lambda n: n.LocalNet(in_channels=1, num_channel_initial=8, extract_levels=(0, 1, 2), **_FLAT), _one(32, 32)),
    "globalnet": (
        lambda n: n.GlobalNet(image_size=[32, 32], in_channels=1, num_channel_initial=8, depth=2, **_FLAT),
        _one(32, 32),
    ),
    "mil-attention": (
        lambda n: n.MILModel(2, "att_trans", False, "resnet18"), lambda: {"image": torch.randn(BATCH, 3, 3, 32, 32)}),
}  # fmt: skip


def names() -> list[str]:
    """All networks here."""
    return list(MODELS)


def offers(name: str) -> Iterator[Offer]:
    """One way each."""
    from monai.networks import nets

    build, batch = MODELS[name]
    yield Offer("", partial(build, nets), batch)
