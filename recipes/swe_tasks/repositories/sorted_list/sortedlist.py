"""A list that stays sorted."""


class SortedList:
    def __init__(self, values=()):
        self._values = sorted(values)

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def add(self, value):
        self._values.insert(self._right(value), value)

    def index(self, value):
        """Position of the first equal value."""
        position = self._left(value)
        if position == len(self._values) or self._values[position] != value:
            raise ValueError(f"{value!r} is not in the list")
        return position

    def count(self, value):
        try:
            return self._right(value) - self.index(value)
        except ValueError:
            return 0

    def _left(self, value):
        low, high = 0, len(self._values)
        while low < high:
            middle = (low + high) // 2
            if self._values[middle] < value:
                low = middle + 1
            else:
                high = middle
        return low

    def _right(self, value):
        low, high = 0, len(self._values)
        while low < high:
            middle = (low + high) // 2
            if value < self._values[middle]:
                high = middle
            else:
                low = middle + 1
        return low
