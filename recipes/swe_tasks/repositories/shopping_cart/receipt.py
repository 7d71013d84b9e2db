from cart import total_cents
from money import show


def receipt(cart):
    lines = [f"{count} x {name} {show(cents * count)}" for name, cents, count in cart.lines]
    return "\n".join([*lines, f"total {show(total_cents(cart))}"])
