"""Images of rows: the tower runs once per image, and its features replace the embeddings of the images' tokens.

The tower has a forward of its own (`image_patches`), so partitions of a forest, or branches, can read one image. Later
forwards get `image_tokens`. Both are passed as keywords, because under FSDP2 only the root's forward gathers weights.
Legend: N tokens of a forward, p image tokens among them, U images, M features of all images, C hidden size, A rotary
axes, S stacked features: those at the embedding, then Qwen3-VL's at its first layers ("deepstack").
"""

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from tree_kernels.host_copy import to_device

PATCHES, TOKENS = "image_patches", "image_tokens"
"""Keywords of a model's forward."""

IMAGE_READERS = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""Model types whose rows may have images: features per image token, positions with three axes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImagePatches:
    """Images, as the model's processor returns them."""

    pixel_values: torch.Tensor
    """Patches of all images, one after the other."""
    grid_thw: torch.Tensor
    """int64 [U, 3], patches of each image in time, height and width."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageTokens:
    """The image tokens of one forward and their features."""

    features_SMC: torch.Tensor
    """Features of all images, at least float32, so that gradients of many forwards can be summed."""
    token_p: torch.Tensor
    """int64 [p], indices in the forward of its image tokens, ascending, row after row."""
    feature_p: torch.Tensor
    """int64 [p], the feature of each, in [0, M)."""

    def decoder_inputs(self, decoder: Any, input_ids_Rn: torch.Tensor) -> dict[str, Any]:
        """The arguments of a language model's forward that replace `input_ids`."""
        embedded_RnC = decoder.get_input_embeddings()(input_ids_Rn)
        features_SpC = self.features_SMC.index_select(1, self.feature_p).to(embedded_RnC.dtype)
        replaced = embedded_RnC.flatten(0, 1).index_copy(0, self.token_p, features_SpC[0])
        inputs = {"inputs_embeds": replaced.view_as(embedded_RnC)}
        if len(features_SpC) > 1:
            is_image_Rn = torch.zeros_like(input_ids_Rn, dtype=torch.bool)
            is_image_Rn.view(-1)[self.token_p] = True
            inputs |= {"visual_pos_masks": is_image_Rn, "deepstack_visual_embeds": list(features_SpC[1:])}
        return inputs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokensWithImages:
    """Tokens of a forest or partition: their features, and positions that images need."""

    features_SMC: torch.Tensor
    """[S, M, C], features of all images."""
    feature_N: np.ndarray
    """int64 [N], the feature of each image token, -1 for text."""
    position_AN: np.ndarray
    """int64 [A, N], rotary positions."""

    def take(self, tokens: np.ndarray) -> "TokensWithImages":
        """Some of the tokens, in the given order."""
        return replace(self, feature_N=self.feature_N[tokens], position_AN=self.position_AN[:, tokens])

    def own(self, start: int, stop: int) -> "TokensWithImages":
        """The tokens of one sequence-parallel rank; those beyond N are padding."""
        missing = (0, max(0, stop - len(self.feature_N)))
        feature_N = np.pad(self.feature_N, missing, constant_values=-1)[start:stop]
        return replace(
            self, feature_N=feature_N, position_AN=np.pad(self.position_AN, ((0, 0), missing))[:, start:stop]
        )

    def on_device(self, device: torch.device | str) -> tuple[torch.Tensor, ImageTokens]:
        """Positions int64 [A, 1, N], and the image tokens."""
        token_p = np.flatnonzero(self.feature_N >= 0)
        tokens = ImageTokens(
            features_SMC=self.features_SMC,
            token_p=to_device(token_p, device),
            feature_p=to_device(self.feature_N[token_p], device),
        )
        return to_device(self.position_AN, device).unsqueeze(1), tokens


def reads_images(model: nn.Module) -> bool:
    """True if rows of this model may have images."""
    config: Any = model.config
    return config.model_type in IMAGE_READERS


def merge_size(config: Any) -> int:
    """Patches per image token, in height and in width."""
    return int(config.vision_config.spatial_merge_size)


def image_hash(grid: np.ndarray, pixels: torch.Tensor) -> int:
    """56 bits of a hash of an image's patches and grid."""
    digest = blake2b(grid.tobytes() + pixels.float().numpy().tobytes(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def empty_image(config: Any, device: torch.device) -> ImagePatches:
    """The smallest image, for a rank without one."""
    vision, side = config.vision_config, merge_size(config)
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return ImagePatches(
        pixel_values=torch.zeros(side * side, size, device=device),
        grid_thw=torch.tensor([[1, side, side]], device=device),
    )


def run_tower(model: Any, patches: ImagePatches) -> BaseModelOutputWithPast:
    """The forward of a model on images alone: features [S, M, C] as the only hidden states."""
    found = model.base_model.get_image_features(patches.pixel_values, patches.grid_thw)
    stacked = [torch.cat(tuple(found.pooler_output)), *(getattr(found, "deepstack_features", None) or ())]
    features_SMC = torch.stack(stacked)
    return BaseModelOutputWithPast(last_hidden_state=features_SMC, hidden_states=(features_SMC,))
