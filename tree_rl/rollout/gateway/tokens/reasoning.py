"""The only place that knows how a turn marks its reasoning: `<think>` and `</think>`."""

THINK_START, THINK_END = "<think>", "</think>"


def split_reasoning(turn: str, *, is_open: bool = False) -> tuple[str | None, str]:
    """Split a turn into reasoning and visible text.

    Args:
        turn: as the model wrote it.
        is_open: the prompt already ended with `<think>`, so the turn begins inside its reasoning.

    Returns:
        The reasoning without its tags (None if there is none), and the text behind it, a suffix of `turn`. If the
        reasoning was never closed, the text is empty.
    """
    if THINK_END in turn:
        thought, visible = turn.rsplit(THINK_END, 1)
    elif is_open or turn.lstrip().startswith(THINK_START):
        thought, visible = turn, ""
    else:
        return None, turn
    return thought.split(THINK_START, 1)[-1].strip("\n"), visible


def before_open_reasoning(visible: str) -> str:
    """Text up to a `<think>` in its middle: what follows is reasoning that was never closed."""
    return visible.split(THINK_START, 1)[0]


def without_reasoning(turn: str) -> str:
    """A turn without the reasoning at its start, its tags and the white space around it."""
    _, closed, visible = turn.partition(THINK_END)
    return visible.lstrip() if closed else turn


def with_reasoning(reasoning: str, content: str) -> str:
    """Put reasoning in front of a message's text, for templates that have no field for it."""
    return f"{THINK_START}\n{reasoning}\n{THINK_END}\n\n{content}"


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends inside reasoning, as templates of some models do."""
    return prompt.rstrip().endswith(THINK_START)
