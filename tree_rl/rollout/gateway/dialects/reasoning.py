"""Reasoning between two marks before the visible text of a turn."""

THINK_START, THINK_END = "<think>", "</think>"
Marks = tuple[str, str]
THINK: Marks = (THINK_START, THINK_END)


def split_reasoning(turn: str, *, is_open: bool = False, marks: Marks = THINK) -> tuple[str | None, str]:
    """Split a turn into reasoning and visible text.

    Args:
        is_open: True if the prompt ended with the opening mark, so that the turn starts inside its reasoning.

    Returns:
        The reasoning without its marks (None if there is none), and the text after it, a suffix of `turn`. If the
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
    """Remove the reasoning at the start of a turn, with its tags and the white space around it."""
    _, closed, visible = turn.partition(THINK_END)
    return visible.lstrip() if closed else turn


def with_reasoning(reasoning: str, content: str, *, marks: Marks = THINK) -> str:
    """Put reasoning before a message's text, for templates without a field for it."""
    start, end = marks
    return f"{start}\n{reasoning}\n{end}\n\n{content}"


def opens_reasoning(prompt: str, *, marks: Marks = THINK) -> bool:
    """True if a prompt ends inside reasoning, as some templates make it do."""
    return prompt.rstrip().endswith(marks[0])
