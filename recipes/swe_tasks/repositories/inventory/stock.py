class Stock:
    """How much there is of each article, and how much of it is promised."""

    def __init__(self, counts):
        self.counts = dict(counts)
        self.held = {}

    def available(self, article):
        return self.counts.get(article, 0) - self.held.get(article, 0)

    def hold(self, article, count):
        self.held[article] = self.held.get(article, 0) + count

    def release(self, article, count):
        self.held[article] -= count

    def remove(self, article, count):
        self.release(article, count)
        self.counts[article] -= count
