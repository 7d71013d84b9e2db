import unittest

from lexer import tokenize


def kinds(text):
    return [token.kind for token in tokenize(text)]


class TestLexer(unittest.TestCase):
    def test_statement(self):
        self.assertEqual(kinds("x1 = 2 * (y"), ["NAME", "ASSIGN", "NUMBER", "OPERATOR", "PAREN", "NAME"])

    def test_comparisons_are_longest_first(self):
        self.assertEqual([t.text for t in tokenize("a <= b == c")], ["a", "<=", "b", "==", "c"])

    def test_attribute(self):
        self.assertEqual(kinds("a.b"), ["NAME", "DOT", "NAME"])

    def test_error_names_the_column(self):
        with self.assertRaisesRegex(SyntaxError, "column 2"):
            tokenize("a $ b")
