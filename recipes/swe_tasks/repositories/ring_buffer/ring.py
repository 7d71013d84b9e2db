"""A buffer of fixed size that overwrites its oldest value."""


class RingBuffer:
    def __init__(self, size):
        if size < 1:
            raise ValueError("size must be positive")
        self.size = size
        self._slots = [None] * size
        self._next = 0
        self._count = 0

    def push(self, value):
        self._slots[self._next] = value
        self._next = (self._next + 1) % self.size
        self._count = min(self._count + 1, self.size)

    def __len__(self):
        return self._count

    def items(self):
        """The values, oldest first."""
        return [self._slots[(self._next - self._count + i) % self.size] for i in range(self._count)]

    def mean(self):
        if not self._count:
            raise ValueError("the buffer is empty")
        return sum(self.items()) / self._count
