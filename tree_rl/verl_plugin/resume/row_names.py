"""Reproducible uids of prompts, and a reproducible order of rows."""

from uuid import UUID

from tree_rl.derived_seed import derived_seed


def prompt_uid(step: int, place: int) -> str:
    """The uid of a prompt, derived from the step and the prompt's place in it."""
    high, low = derived_seed("prompt", step, place), derived_seed("uid", step, place)
    return str(UUID(int=(high << 64) | low))


def uid_of_row(key: str) -> str:
    """The uid of the prompt in verl's key `{uid}_{session}_{index}`."""
    return row_place(key)[0]


def row_place(key: str) -> tuple[str, int, int]:
    """Sort key of a row: the parts of verl's key `{uid}_{session}_{index}`."""
    try:
        uid, session, index = key.rsplit("_", 2)
        return uid, int(session), int(index)
    except ValueError as error:
        raise ValueError(f"expected a row's key {{uid}}_{{session}}_{{index}}, received {key!r}") from error
