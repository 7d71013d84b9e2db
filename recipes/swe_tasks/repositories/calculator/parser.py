"""Turns tokens into nested tuples (operator, left, right)."""


class Parser:
    def __init__(self, tokens):
        self.tokens = list(tokens)

    def peek(self):
        return self.tokens[0] if self.tokens else None

    def take(self):
        if not self.tokens:
            raise ValueError("unexpected end")
        return self.tokens.pop(0)

    def parse(self):
        tree = self.expression()
        if self.tokens:
            raise ValueError(f"unexpected {self.tokens[0]!r}")
        return tree

    def expression(self):
        left = self.term()
        while self.peek() in ("+", "-"):
            left = (self.take(), left, self.term())
        return left

    def term(self):
        left = self.factor()
        while self.peek() in ("*", "/"):
            left = (self.take(), left, self.factor())
        return left

    def factor(self):
        token = self.take()
        if token == "-":
            return ("-", 0.0, self.factor())
        if token == "(":
            inner = self.expression()
            if self.take() != ")":
                raise ValueError("expected )")
            return inner
        return float(token)
