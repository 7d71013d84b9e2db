"""Reads verl's rows in an engine call and checks them before anything runs; errors name the row.

Legend: B rows, F flat tokens of all rows.
"""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tree_rl.cost.balance.batch import number_groups
from tree_rl.models.images import merge_size
from tree_rl.training.loss.outputs import ENTROPY, LOG_PROBS, SUM_PI_SQUARED, Wanted
from tree_rl.training.row_images import RowImages
from tree_rl.training.rows import Rows
from tree_rl.tree.forest import RowError
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.verl_loss import REUSE_LOG_PROBS
from tree_rl.verl_plugin.options import PATH_WEIGHT_COLUMNS

PATH_WEIGHT_SCALE = "path_weight_scale"
"""Key of the factor on the path weights in the batch."""
USES_TOP_K = "distillation_use_topk"
"""Flag of an update whose loss reads the log-probs of the teacher's likeliest tokens."""
LEAST_TEMPERATURE = 1e-8
"""Lower temperatures are raised to this one, as in verl's engines."""
FINITE_COLUMNS = ("advantages", "returns", "old_log_probs", "ref_log_prob", "values", "rollout_is_weights")


def read_rows(
    data: TensorDict,
    *,
    vocab_size: int,
    max_positions: int | None,
    first_position: int | None = None,
    path_weighting: str = "verl",
    image_config: Any = None,
) -> Rows:
    """Read and check the rows of an engine call.

    Args:
        data: verl's batch without padding: nested `input_ids` and `loss_mask`, optional `position_ids`, `uid`,
            `temperature`.
        vocab_size: upper bound of ids, exclusive.
        max_positions: longest row that the model's positions cover; None for no limit.
        first_position: position of a row's first token; None if the model only uses distances.
        path_weighting: `token_unique` excludes tokens that `algorithm.rollout_correction` rejected from `counted_F`;
            all but `verl` read their column of weights if the batch has it.
        image_config: config of a model whose rows may have images; None for rows of text.

    Raises:
        RowError: an empty row, an id outside the vocabulary, a mask longer than its row, a row longer than the model's
            positions, positions that do not count its tokens, a trained first token, a non-finite advantage, a path
            weight outside (0, 1] (`custom`: below 0), images that do not fit the row, or a temperature that is not
            above 0; names the row. Or the batch lacks the column of `custom`, or of `session` outside SFT, or the
            teacher's columns; or ids of the teacher are outside the vocabulary.
    """
    labels = _labels(data)
    offsets, token_ids_F = jagged(data["input_ids"])
    lengths = np.diff(offsets)
    _refuse(lengths == 0, labels, "has no tokens; drop it before training")
    if max_positions is not None:
        _refuse(lengths > max_positions, labels, f"is longer than the model's {max_positions} positions", lengths)
    outside_F = (token_ids_F < 0) | (token_ids_F >= vocab_size)
    for row, flat in _first(outside_F, offsets):
        raise RowError(f"{labels[row]}: token id {token_ids_F[flat]} is outside the vocabulary of {vocab_size}")
    if "position_ids" in data:
        _check_positions(data["position_ids"], offsets, labels, first_position)
    for column in FINITE_COLUMNS:
        if column in data:
            _check_finite(data[column], column, labels)
    wanted_F = _wanted_positions(data["loss_mask"], offsets, labels)
    # Only response_mask contains rejections; SFT has no such column.
    is_read = path_weighting == "token_unique" and "response_mask" in data
    kept_F = _wanted_positions(data["response_mask"], offsets, labels) if is_read else wanted_F
    uses_top_k = tu.get_non_tensor_data(data=data, key=USES_TOP_K, default=False)
    return Rows(
        token_ids_F=token_ids_F,
        offsets=offsets,
        wanted_F=wanted_F,
        counted_F=wanted_F & kept_F,
        temperature_B=_temperatures(data, labels),
        group_B=number_groups([str(uid) for uid in data["uid"]] if "uid" in data else [""] * len(lengths)),
        label_B=tuple(labels),
        weight_F=_path_weights(data, path_weighting, offsets, wanted_F & kept_F, labels),
        images=None
        if image_config is None
        else _images(data, image_config, np.split(token_ids_F, offsets[1:-1]), labels),
        candidates_FK=_teacher_ids(data, offsets, wanted_F, labels, vocab_size) if uses_top_k else None,
    )


def read_trainer_tokens(data: TensorDict) -> int:
    """verl's budget of a forward, in tokens of all ranks that share it; `sp_size` is assigned.

    It is `max_token_len_per_gpu` times `sp_size`; with fixed micro-batches (`use_dynamic_bsz=False`), the rows of a
    micro-batch times the longest row.
    """
    longest = int(data["input_ids"].offsets().diff().max()) if len(data) else 1
    if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        sp_size = int(tu.get_non_tensor_data(data=data, key="sp_size", default=1))
        tokens = int(tu.get_non_tensor_data(data=data, key="max_token_len_per_gpu", default=0))
        return tokens * sp_size or longest
    return int(tu.get_non_tensor_data(data=data, key="micro_batch_size_per_gpu", default=1) or 1) * longest


def read_outputs(data: TensorDict) -> Wanted:
    """Names of the outputs that verl requests; an update that reuses its log-probs also returns the entropy."""
    flags_of = {ENTROPY: ("calculate_entropy", REUSE_LOG_PROBS), SUM_PI_SQUARED: ("calculate_sum_pi_squared",)}
    asked = [
        name
        for name, flags in flags_of.items()
        if any(tu.get_non_tensor_data(data=data, key=flag, default=False) for flag in flags)
    ]
    return (LOG_PROBS, *asked)


def _images(data: TensorDict, config: Any, token_ids: list[np.ndarray], labels: list[str]) -> RowImages | None:
    """Images of verl's `multi_modal_inputs`; None if no row has any."""
    given = [tu.unwrap_non_tensor_data(inputs) or {} for inputs in data.get("multi_modal_inputs", ())]
    pixel_values = [inputs.get("pixel_values") for inputs in given]
    if all(pixels is None for pixels in pixel_values):
        return None
    positions = [position.cpu() for position in data["position_ids"].unbind()]
    return RowImages.of(
        token_ids,
        [None if pixels is None else pixels.cpu() for pixels in pixel_values],
        [None if inputs.get("image_grid_thw") is None else inputs["image_grid_thw"].cpu() for inputs in given],
        # The first of verl's four axes counts tokens, and transformers reads it only to tell packed rows apart.
        [position[-3:] if position.dim() == 2 else position.expand(3, -1) for position in positions],
        image_token=config.image_token_id,
        merge_size=merge_size(config),
        labels=labels,
    )


def _teacher_ids(
    data: TensorDict, offsets: np.ndarray, wanted_F: np.ndarray, labels: list[str], vocab_size: int
) -> np.ndarray | None:
    """int [F, K], the teacher's likeliest next tokens at each position; None on a rank without rows."""
    if not labels:
        return None
    if "teacher_ids" not in data:
        raise RowError(f"{USES_TOP_K}=True: expected columns teacher_ids and teacher_logprobs, received neither")
    teacher_offsets, ids_FK = jagged(data["teacher_ids"])
    _refuse(np.diff(teacher_offsets) != np.diff(offsets), labels, "has another number of teacher_ids than tokens")
    outside_F = wanted_F & ((ids_FK < 0) | (ids_FK >= vocab_size)).any(1)
    for row, flat in _first(outside_F, offsets):
        raise RowError(f"{labels[row]}: teacher_ids {ids_FK[flat].tolist()} leave the vocabulary of {vocab_size}")
    return ids_FK


def _check_positions(position_ids: Any, offsets: np.ndarray, labels: list[str], first_position: int | None) -> None:
    """Positions must count a row's tokens, because on a tree a token's position is its depth."""
    if position_ids.dim() == 3:
        # All axes of a row of text are equal, and the first of four counts the tokens of a row with images too.
        position_ids = torch.nested.as_nested_tensor(
            [row_AL[0] for row_AL in position_ids.unbind()], layout=torch.jagged
        )
    position_offsets, given_F = jagged(position_ids)
    lengths, given_lengths = np.diff(offsets), np.diff(position_offsets)
    _refuse(given_lengths != lengths, labels, "has another number of position_ids than tokens", given_lengths)
    begin_B = given_F[offsets[:-1]]
    expected_F = np.arange(len(given_F)) + np.repeat(begin_B - offsets[:-1], lengths)
    odd_F = given_F != expected_F
    for row, flat in _first(odd_F, offsets):
        raise RowError(
            f"{labels[row]}: position_ids holds {given_F[flat]} for token {flat - offsets[row]}; expected "
            f"{expected_F[flat]}: on a tree a token's position is its depth. Let positions count the row's tokens, or "
            "train on rows with tree.mode=flat"
        )
    if first_position is not None:
        shifted_B = begin_B != first_position
        reason = f"has position_ids that do not begin at {first_position}, and this model's positions are absolute"
        _refuse(shifted_B, labels, reason, begin_B)


def _path_weights(
    data: TensorDict, path_weighting: str, offsets: np.ndarray, counted_F: np.ndarray, labels: list[str]
) -> np.ndarray | None:
    """float64 [F], the batch's path weights, 0 where the loss does not count the token; None without such a column."""
    column = PATH_WEIGHT_COLUMNS.get(path_weighting)
    if column is None or column not in data:
        # In SFT a group is a conversation. Ranks without rows have no columns.
        if labels and (path_weighting == "custom" or (path_weighting == "session" and "response_mask" in data)):
            raise RowError(
                f"tree.path_weighting={path_weighting}: expected a column {column}, which the tree trainers add; set "
                "trainer.v1.trainer_mode=tree_sync"
            )
        return None
    weight_offsets, given = jagged(data[column])
    lengths, given_lengths = np.diff(offsets), np.diff(weight_offsets)
    _refuse(given_lengths > lengths, labels, f"has more entries of {column} than tokens", given_lengths)
    weight_F = np.zeros(int(offsets[-1]))
    weight_F[np.arange(len(given)) + np.repeat(offsets[1:] - weight_offsets[1:], given_lengths)] = given
    counts_F = np.zeros(len(weight_F), dtype=bool)
    counts_F[1:] = counted_F[:-1]
    is_custom = path_weighting == "custom"
    fits_F = np.isfinite(weight_F) & (weight_F >= 0) if is_custom else (weight_F > 0) & (weight_F <= 1)
    expected = "a finite number of at least 0" if is_custom else "above 0, up to 1"
    for row, flat in _first(counts_F & ~fits_F, offsets):
        raise RowError(f"{labels[row]}: {column} holds {weight_F[flat]} for a trained token; expected {expected}")
    scale = float(tu.get_non_tensor_data(data=data, key=PATH_WEIGHT_SCALE, default=1.0))
    return np.where(counts_F, scale * weight_F, 0.0)


def _first(bad_F: np.ndarray, offsets: np.ndarray) -> list[tuple[int, int]]:
    """Row and flat position of the first bad token, in a list; empty if none is bad."""
    return [
        (int(np.searchsorted(offsets, flat, side="right")) - 1, flat) for flat in np.flatnonzero(bad_F)[:1].tolist()
    ]


def jagged(nested: Any) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and values of a nested tensor, on the host."""
    return nested.offsets().cpu().numpy().astype(np.int64), nested.values().cpu().numpy()


def _wanted_positions(loss_mask: torch.Tensor, offsets: np.ndarray, labels: list[str]) -> np.ndarray:
    """bool [F], positions whose next token has mask 1. Masks are aligned with the row's end."""
    mask_offsets, mask = jagged(loss_mask)
    lengths, mask_lengths = np.diff(offsets), np.diff(mask_offsets)
    _refuse(mask_lengths > lengths, labels, "has a loss mask longer than the row", mask_lengths)
    entries = np.flatnonzero(mask)
    # Offset from an entry of the mask to its token: rows and their masks end together.
    shift = np.repeat(offsets[1:] - mask_offsets[1:], mask_lengths)
    trained_F = np.zeros(int(offsets[-1]), dtype=bool)
    trained_F[entries + shift[entries]] = True
    first_B = trained_F[offsets[:-1]]
    _refuse(first_B, labels, "trains its first token, which nothing predicts; set the first loss_mask entry to 0")
    wanted_F = np.zeros_like(trained_F)
    wanted_F[:-1] = trained_F[1:]
    return wanted_F


def _temperatures(data: TensorDict, labels: list[str]) -> np.ndarray:
    """Temperatures, float32 [B], at least `LEAST_TEMPERATURE`."""
    temperature = tu.get(data, "temperature", 1.0)
    if isinstance(temperature, torch.Tensor):
        temperature_B = temperature.detach().to(torch.float32).cpu().numpy()
    else:
        temperature_B = np.full(len(labels), _number(temperature), dtype=np.float32)
    wrong_B = ~(np.isfinite(temperature_B) & (temperature_B > 0))
    _refuse(wrong_B, labels, "expected a finite rollout.temperature above 0, which divides its logits", temperature_B)
    return np.maximum(temperature_B, np.float32(LEAST_TEMPERATURE))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float | np.number) else float("nan")


def _labels(data: TensorDict) -> list[str]:
    keys = [key for key in ("uid", "session_id", "index") if key in data]
    columns = [list(data[key]) for key in keys]
    labels = []
    for row in range(data.batch_size[0]):
        named = ", ".join(f"{key} {column[row]}" for key, column in zip(keys, columns, strict=True))
        labels.append(f"row {row}" + (f" ({named})" if named else ""))
    return labels


def _check_finite(column: Any, name: str, labels: list[str]) -> None:
    if not isinstance(column, torch.Tensor) or not column.is_floating_point():
        return
    values = column.values() if column.is_nested else column
    if torch.isfinite(values).all():
        return
    rows = column.unbind() if column.is_nested else column
    for label, row in zip(labels, rows, strict=True):
        bad = row[~torch.isfinite(row)]
        if bad.numel():
            cause = "; is every reward of this prompt a finite number?" if name == "advantages" else ""
            raise RowError(f"{label}: {name}: expected finite numbers, received {bad[0].item()}{cause}")


def _refuse(bad_B: np.ndarray, labels: list[str], reason: str, got_B: np.ndarray | None = None) -> None:
    if bad_B.any():
        row = int(np.flatnonzero(bad_B)[0])
        got = "" if got_B is None else f" (got {got_B[row]})"
        raise RowError(f"{labels[row]}: {reason}{got}")
