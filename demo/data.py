"""Real photographs with a measured target, from files inside scikit-image's wheel: no download.

The demo needs a pixel-wise task whose target was measured, not made up, and no data set may be fetched. Of what
scikit-image ships, one item has that: the Motorcycle pair of the Middlebury 2014 stereo benchmark (Scharstein et al.,
GCPR 2014), two photographs of a garage taken 193 mm apart, with a disparity for 93 % of the pixels, measured by
structured light. The target here is the slab of depth, in metres from the camera, that each pixel lies in.

One pair is little data: this shows what a training step costs, and is no benchmark of depth estimation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import skimage.data
import torch

# Calibration of the shipped (four times down-sampled) pair, from scikit-image's docstring.
FOCAL_PX, BASELINE_M, OFFSET_PX = 994.978, 0.193001, 31.086
EDGES_M = (2.35, 2.6, 3.2, 3.8, 4.3)
CLASSES = len(EDGES_M) + 1
UNKNOWN = -1
"""The label of pixels whose depth was not measured, mostly beside occlusions. The loss leaves them out."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Scene:
    """Both photographs, stacked (6, height, width) as bytes, and the depth slab of each pixel of the left one."""

    photographs: npt.NDArray[np.uint8]
    slabs: npt.NDArray[np.int64]


def load_scene() -> Scene:
    left, right, disparity = skimage.data.stereo_motorcycle()  # type: ignore[no-untyped-call]
    with np.errstate(invalid="ignore"):
        depth = BASELINE_M * FOCAL_PX / (disparity + OFFSET_PX)
    slabs = np.where(np.isfinite(disparity), np.digitize(depth, EDGES_M), UNKNOWN)
    photographs = np.concatenate([left, right], axis=2).transpose(2, 0, 1)
    return Scene(photographs, slabs.astype(np.int64))


def tiles(scene: Scene, count: int, size: int, seed: int, dtype: torch.dtype = torch.float32) -> Batch:
    """A batch of random square tiles, half of them upside down: images (count, 6, size, size) and depth labels.

    Not mirrored left to right: that would turn the disparities around. Kept in numpy until the end, so that the memory
    counted by torch is that of the batch alone.
    """
    rng = np.random.default_rng(seed)
    _, height, width = scene.photographs.shape
    images = np.empty((count, 6, size, size), dtype=np.float32)
    depth = np.empty((count, size, size), dtype=np.int64)
    for index in range(count):
        top, left = int(rng.integers(height - size + 1)), int(rng.integers(width - size + 1))
        flip = slice(None, None, -1 if rng.random() < 0.5 else 1)
        window = (slice(top, top + size), slice(left, left + size))
        images[index] = scene.photographs[(slice(None), *window)][:, flip] / 127.5 - 1.0
        depth[index] = scene.slabs[window][flip]
    return {"images": torch.tensor(images, dtype=dtype), "depth": torch.tensor(depth)}
