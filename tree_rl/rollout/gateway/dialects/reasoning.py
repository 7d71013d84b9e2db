"""Reasoning between two marks in front of the visible text of a turn."""

THINK_START, THINK_END = "<think>", "</think>"
Marks = tuple[str, str]
THINK: Marks = (THINK_START, THINK_END)


def split_reasoning(turn: str, *, is_open: bool = False, marks: Marks = THINK) -> tuple[str | None, str]:
    """Split a turn into reasoning and visible text.

    Args:
        turn: as the model wrote it.
        is_open: the prompt already ended with the opening mark, so the turn begins inside its reasoning.

    Returns:
        The reasoning without its marks (None if there is none), and the text behind it, a suffix of `turn`. If the
        reasoning was never closed, the text is empty.
    """
    start, end = marks
    if end in turn:
        thought, visible = turn.rsplit(end, 1)
    elif is_open or turn.lstrip().startswith(start):
        thought, visible = turn, ""
    else:
        return None, turn
    return thought.split(start, 1)[-1].strip("\n"), visible


def without_reasoning(turn: str) -> str:
    """A turn without the reasoning at its start, its tags and the white space around it."""
    _, closed, visible = turn.partition(THINK_END)
    return visible.lstrip() if closed else turn


def with_reasoning(reasoning: str, content: str, *, marks: Marks = THINK) -> str:
    """Put reasoning in front of a message's text, for templates that have no field for it."""
    start, end = marks
    return f"{start}\n{reasoning}\n{end}\n\n{content}"


def opens_reasoning(prompt: str, *, marks: Marks = THINK) -> bool:
    """Whether a prompt ends inside reasoning, as templates of some models do."""
    return prompt.rstrip().endswith(marks[0])
