"""Small dense matrices."""


def dot(left, right):
    return sum(a * b for a, b in zip(left, right, strict=True))


class Matrix:
    def __init__(self, rows):
        self.rows = [list(row) for row in rows]
        if len({len(row) for row in self.rows}) != 1:
            raise ValueError("rows differ in length")

    @property
    def height(self):
        return len(self.rows)

    @property
    def width(self):
        return len(self.rows[0])

    def __eq__(self, other):
        return isinstance(other, Matrix) and self.rows == other.rows

    __hash__ = None

    def __add__(self, other):
        if (self.height, self.width) != (other.height, other.width):
            raise ValueError("shapes differ")
        return Matrix([[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(self.rows, other.rows, strict=True)])

    def transpose(self):
        return Matrix(zip(*self.rows, strict=True))

    def __matmul__(self, other):
        if self.width != other.height:
            raise ValueError(f"{self.height}x{self.width} times {other.height}x{other.width}")
        columns = other.transpose().rows
        return Matrix([[dot(row, column) for column in columns] for row in self.rows])
