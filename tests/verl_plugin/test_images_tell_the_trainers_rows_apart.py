"""The trainer's trees (weights, credit, balance) merge rows with images only where the images are the same."""

from typing import Any

import numpy as np
import torch
from engine_harness import nested
from image_rows import IMAGE_TOKEN, Picture, PictureRow, row, text
from local_trainer import LocalQueue
from tensordict import TensorDict

from tree_rl.tree.forest import Forest
from tree_rl.verl_plugin.agent_loops.image_spans import IMAGE_SPANS, spans_of_images, with_image_keys
from tree_rl.verl_plugin.trainer.queue_rows import fetch_row_tokens


def spans(one: PictureRow, **changes: Any) -> list[tuple[int, int, int]]:
    inputs = {"pixel_values": one.pixel_values, "image_grid_thw": one.grid_thw, **changes}
    return spans_of_images(one.tokens, inputs, image_token=IMAGE_TOKEN, merge_size=2)


def test_spans_name_the_content_of_images() -> None:
    first, wide, tall = Picture(seed=1), Picture(seed=4, width=8), Picture(seed=4, height=8)
    one = row(text(1, 3), first, text(2, 2), wide, first)
    (a, b, c) = spans(one)
    assert [(span[0], span[1]) for span in (a, b, c)] == [(3, 7), (9, 17), (17, 21)]
    assert a[2] == c[2] != b[2]
    assert spans(row(text(1, 3), wide))[0][2] != spans(row(text(1, 3), tall))[0][2]
    assert spans(row(text(1, 3))) == []
    assert spans(one, pixel_values=None) == []
    assert spans(row(text(1, 3), [IMAGE_TOKEN], first)) == []


def test_the_trainer_reads_rows_with_the_keys_of_their_images(queue: LocalQueue) -> None:
    rows = [row(text(1, 3), Picture(seed=seed), text(2, 2)) for seed in (1, 2, 1)]
    keys = [f"u_{number}_0" for number in range(3)]
    fields = TensorDict({"input_ids": nested([torch.tensor(one.tokens) for one in rows])}, batch_size=3)
    tags: list[dict[str, Any]] = [{IMAGE_SPANS: spans(one)} for one in rows]
    found = fetch_row_tokens(queue.kv_batch_put(keys, "train", fields, tags))
    assert Forest.from_rows([found[key] for key in keys]).num_unique == 9 + 6
    of_text = fetch_row_tokens(queue.kv_batch_put(keys, "train", fields, [{IMAGE_SPANS: ()}] * 3))
    assert Forest.from_rows([of_text[key] for key in keys]).num_unique == 9
    assert np.array_equal(with_image_keys(of_text[keys[0]], ()), rows[0].tokens)
