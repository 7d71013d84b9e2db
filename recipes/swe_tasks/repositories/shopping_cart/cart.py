"""A cart: articles, a voucher that is taken off first, and a percentage that is taken off the rest."""

from money import discounted


class Cart:
    def __init__(self):
        self.lines = []
        self.voucher_cents = 0
        self.percent = 0

    def add(self, name, cents, count=1):
        if count < 1 or cents < 0:
            raise ValueError("no such line")
        self.lines.append((name, cents, count))

    def goods_cents(self):
        return sum(cents * count for _, cents, count in self.lines)


def total_cents(cart):
    cents = cart.goods_cents()
    cents = max(0, cents - cart.voucher_cents)
    return discounted(cents, cart.percent)
