"""A token bucket; the clock is passed in."""


class TokenBucket:
    def __init__(self, capacity, per_second, now=0.0):
        if capacity <= 0 or per_second <= 0:
            raise ValueError("capacity and rate must be positive")
        self.capacity = capacity
        self.per_second = per_second
        self._tokens = capacity
        self._last = now

    def allow(self, now, cost=1):
        """Take tokens if there are enough."""
        self._refill(now)
        if cost > self._tokens:
            return False
        self._tokens -= cost
        return True

    def wait_seconds(self, now, cost=1):
        """Time until `allow` would succeed."""
        if cost > self.capacity:
            raise ValueError("a request larger than the bucket")
        self._refill(now)
        return max(0.0, (cost - self._tokens) / self.per_second)

    def _refill(self, now):
        if now < self._last:
            raise ValueError("time runs backwards")
        self._tokens = min(self.capacity, self._tokens + (now - self._last) * self.per_second)
        self._last = now
