"""Makes stock verl run in Ray's workers where flash-attn 2 is absent; verl loads it as `model.external_lib`.

flash-attn-4 attends and one pass computes log-probs, as in `tree-rl bench --against verl`.
"""

import torch

from tree_rl.benchmark.against_verl.without_flash_attention_2 import let_flash_attention_4_read_rows, use_one_pass

if torch.cuda.is_available():  # verl's processes without a GPU load it, too
    let_flash_attention_4_read_rows()
use_one_pass()
