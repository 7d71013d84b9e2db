"""Greedy line breaking."""


def wrap(text, width):
    """Break a text into lines of at most `width` characters; a longer word has a line of its own."""
    if width < 1:
        raise ValueError("width must be positive")
    lines = []
    line = ""
    for word in text.split():
        if not line:
            line = word
        elif len(line) + 1 + len(word) <= width:
            line += " " + word
        else:
            lines.append(line)
            line = word
    if line:
        lines.append(line)
    return lines


def fill(text, width, indent=""):
    return "\n".join(indent + line for line in wrap(text, width - len(indent)))
