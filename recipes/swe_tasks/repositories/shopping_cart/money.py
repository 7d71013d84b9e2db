def discounted(cents, percent):
    """Less a percentage, rounded half up to whole cents."""
    if not 0 <= percent <= 100:
        raise ValueError("a discount lies between 0 and 100")
    return (cents * (100 - percent) + 50) // 100


def show(cents):
    return f"{cents // 100}.{cents % 100:02d}"
