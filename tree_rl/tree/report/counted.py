"""Numbers with their nouns."""


def counted(number: int, noun: str) -> str:
    """A number and its noun: "1 row", "2,000 rows", "2 branches"."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"
