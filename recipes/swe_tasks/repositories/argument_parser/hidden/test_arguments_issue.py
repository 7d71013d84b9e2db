import unittest

from arguments import parse


class TestArgumentsIssue(unittest.TestCase):
    def test_equals_sign_in_the_value(self):
        self.assertEqual(parse(["--define=key=1"], valued=("define",))[0], {"define": "key=1"})

    def test_several(self):
        self.assertEqual(parse(["--q=a=b=c==", "x"], valued=("q",)), ({"q": "a=b=c=="}, ["x"]))
