"""Stock forwards of packed rows are no yardstick for models whose rows then see each other: said for each, and true."""

import pytest
import torch
from moe_models import BIASED, FAMILIES, LATENT, SIZES, build
from recurrent_models import RECURRENT
from transformers import AfmoeConfig, Qwen3Config

from tree_rl.models.support import leaks_when_packed

AFMOE = AfmoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, num_dense_layers=1, sliding_window=5)
QWEN3 = Qwen3Config(**{k: v for k, v in SIZES.items() if k != "num_experts_per_tok"})
CONFIGS = FAMILIES | RECURRENT | LATENT | {"glm4_moe": BIASED, "afmoe": AFMOE, "qwen3": QWEN3}


@pytest.mark.parametrize("family", CONFIGS)
def test_rows_packed_into_one_sequence_see_each_other_exactly_where_it_is_said(family: str) -> None:
    model = build(CONFIGS[family])
    ids = torch.randint(3, 61, (1, 11), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[*range(5), *range(6)]])
    packed = model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits[0, 5:]
    alone = model(input_ids=ids[:, 5:], use_cache=False).logits[0]
    assert leaks_when_packed(model) == (not torch.allclose(packed, alone, rtol=1e-4, atol=1e-4))
