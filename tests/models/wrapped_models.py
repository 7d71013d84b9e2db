"""Tiny models of published kinds that also read images: a tower, a language model and a head."""

from typing import Any

import torch
from tiny_sizes import DELTA_NET, HYBRID, sizes
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

VOCAB = 97
TEXT: dict[str, Any] = sizes(
    vocab_size=VOCAB, intermediate_size=48, max_position_embeddings=512, bos_token_id=1, eos_token_id=2
)
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4}
QWEN_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
QWEN_VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
TOKENS = {"image_token_id": 90, "video_token_id": 91}
QWEN_TOKENS = {**TOKENS, "vision_start_token_id": 92, "vision_end_token_id": 93}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 8}
GLM_VISION = {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
GLM_ROPE = {"rope_parameters": {**AXES, "partial_rotary_factor": 1.0}}
HYBRID_ROPE = {"rope_parameters": {**AXES, "partial_rotary_factor": 1.0, "mrope_interleaved": True}}
HYBRID_TEXT = {**DELTA_NET, **HYBRID_ROPE, "layer_types": HYBRID}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NO_EXTRA_INPUTS = {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

QWEN2_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
QWEN2_5_VISION = {**QWEN_VISION, "fullatt_block_indexes": [0], "window_size": 16}
INTERLEAVED = {"rope_parameters": {**AXES, "mrope_interleaved": True}}
DEEPSTACK = {**QWEN_VISION, "deepstack_visual_indexes": [0]}
GROUPED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LFM2 = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
LLAMA4_VISION = {**VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
MLLAMA_VISION = {**VISION, "vision_output_dim": 16, "intermediate_layers_indices": [0]}
GOT_VISION = {key: VISION[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
GOT_VISION |= {"image_size": 32, "patch_size": 16, "output_channels": 8, "mlp_dim": 16}
GOT_VISION |= {"global_attn_indexes": [0], "window_size": 2}
KOSMOS = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.0)
KOSMOS |= {"embed_dim": 32, "layers": 2, "attention_heads": 4, "ffn_dim": 48}
INDEX, ID = {"image_token_index": 95}, {"image_token_id": 95}
VIDEO = {**INDEX, "video_token_index": 96}

WRAPPED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (HYBRID_TEXT, {**QWEN_VISION, "deepstack_visual_indexes": []}, QWEN_TOKENS),
    "qwen3_5_moe": ({**HYBRID_TEXT, **EXPERTS, "shared_expert_intermediate_size": 16}, QWEN_VISION, QWEN_TOKENS),
    "gemma3": ({**WINDOWS, "query_pre_attn_scalar": 8}, SIGLIP, {"mm_tokens_per_image": 4, **INDEX}),
    "gemma4": ({**WINDOWS, **NO_EXTRA_INPUTS}, VISION, {"audio_config": None, **ID}),
    "mistral3": ({"model_type": "mistral", "sliding_window": None}, PIXTRAL, INDEX),
    "ministral3": ({"model_type": "ministral3"}, PIXTRAL, {"model_type": "mistral3", **INDEX}),
    "qwen2_vl": ({"rope_parameters": AXES}, QWEN2_VISION, QWEN_TOKENS),
    "qwen2_5_vl": ({"rope_parameters": AXES}, QWEN2_5_VISION, QWEN_TOKENS),
    "qwen3_vl": (INTERLEAVED, DEEPSTACK, QWEN_TOKENS),
    "qwen3_vl_moe": ({**EXPERTS, **INTERLEAVED}, DEEPSTACK, QWEN_TOKENS),
    "glm4v": (GLM_ROPE, GLM_VISION, TOKENS),
    "glm46v": ({"model_type": "glm4v_text", **GLM_ROPE}, {**GLM_VISION, "model_type": "glm4v_vision"}, TOKENS),
    "glm4v_moe": ({**GLM_ROPE, **GROUPED, "first_k_dense_replace": 1}, GLM_VISION, TOKENS),
    "llava": ({"model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}, INDEX),
    "internvl": ({"model_type": "qwen3"}, {**VISION, "image_size": [8, 8], "patch_size": [4, 4]}, ID),
    "aya_vision": ({"model_type": "cohere2", "logit_scale": 0.25, **WINDOWS}, SIGLIP, INDEX),
    "idefics3": ({"model_type": "llama"}, VISION, ID),
    "lfm2_vl": (LFM2, {**VISION, "model_type": "siglip2_vision_model", "num_patches": 4}, ID),
    "llava_onevision": ({"model_type": "qwen2"}, {**SIGLIP, "vision_use_head": False}, VIDEO),
    "got_ocr2": ({"model_type": "qwen2"}, GOT_VISION, INDEX),
    "kosmos-2.5": (KOSMOS, {**VISION, "head_dim": 8}, {}),
    "llama4": ({"num_local_experts": 4, "intermediate_size_mlp": 48}, LLAMA4_VISION, INDEX),
    "paligemma": ({"model_type": "gemma"}, SIGLIP, INDEX),
    "mllama": ({"cross_attention_layers": [1]}, MLLAMA_VISION, INDEX),
}
"""Changes of the language model's sizes, the tower, and what else a config names."""


def wrapped_config(name: str, *, tied: bool = False, **text: Any) -> PretrainedConfig:
    """A config with `text_config`, of which `text` replaces entries, and `vision_config`, as published ones have."""
    own, vision, more = WRAPPED[name]
    unknown = {"lfm2_vl": ["head_dim"], "kosmos-2.5": TEXT.keys() - {"vocab_size"}}.get(name, ())
    sizes_of_text = {key: value for key, value in TEXT.items() if key not in unknown}
    parts = {"text_config": {**sizes_of_text, **own, **text, "tie_word_embeddings": tied}, "vision_config": vision}
    return AutoConfig.for_model(**{"model_type": name, **parts, **more, "tie_word_embeddings": tied})


def wrapped_model(config: PretrainedConfig) -> PreTrainedModel:
    """A random model; states of recurrent layers decay slowly, for float32 sums of large decays are no yardstick."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.uniform_(parameter, -4.0, -1.0)
    return model
