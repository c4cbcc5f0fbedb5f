"""Where models come from: for each package the names of its models, and the ways to make one."""

from . import _monai, _segmentation, _timm, _torchvision, _transformers, _ultralytics

SOURCES = {
    "monai": _monai,
    "segmentation_models_pytorch": _segmentation,
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
    "ultralytics": _ultralytics,
}
