import unittest

from lexer import tokenize


class TestLexerIssue(unittest.TestCase):
    def test_decimal_number_is_one_token(self):
        self.assertEqual([(t.kind, t.text) for t in tokenize("3.14")], [("NUMBER", "3.14")])

    def test_method_of_a_number_is_not_swallowed(self):
        self.assertEqual([t.text for t in tokenize("2.5 + 7 .real")], ["2.5", "+", "7", ".", "real"])
