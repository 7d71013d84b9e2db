"""Roman numerals from 1 to 3999."""

VALUES = (
    (1000, "M"),
    (900, "CM"),
    (500, "D"),
    (400, "CD"),
    (100, "C"),
    (90, "XC"),
    (50, "L"),
    (40, "XL"),
    (10, "X"),
    (9, "IX"),
    (5, "V"),
    (4, "IV"),
    (1, "I"),
)


def to_roman(number):
    if not 1 <= number <= 3999:
        raise ValueError(f"{number} has no Roman numeral")
    parts = []
    for value, letters in VALUES:
        count, number = divmod(number, value)
        parts.append(letters * count)
    return "".join(parts)


def from_roman(text):
    digits = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    total = 0
    for index, letter in enumerate(text):
        value = digits[letter]
        following = digits[text[index + 1]] if index + 1 < len(text) else 0
        total += -value if value < following else value
    return total
