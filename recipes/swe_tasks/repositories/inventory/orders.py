class OutOfStock(Exception):  # noqa: N818
    pass


def reserve(stock, order):
    """Hold all articles of an order, or none."""
    if any(count < 1 for count in order.values()):
        raise ValueError("counts must be positive")
    for article, count in order.items():
        if stock.available(article) < count:
            raise OutOfStock(article)
    for article, count in order.items():
        stock.hold(article, count)


def cancel(stock, order):
    for article, count in order.items():
        stock.release(article, count)


def ship(stock, order):
    for article, count in order.items():
        stock.remove(article, count)
