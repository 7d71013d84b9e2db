import unittest

from arguments import UsageError, parse


class TestArguments(unittest.TestCase):
    def test_all_forms(self):
        options, positional = parse(["a", "--v", "--n=1", "--m", "2", "--", "--v"], valued=("n", "m"), flags=("v",))
        self.assertEqual(options, {"v": True, "n": "1", "m": "2"})
        self.assertEqual(positional, ["a", "--v"])

    def test_errors(self):
        for arguments in (["--x"], ["--n"], ["--v=1"]):
            with self.assertRaises(UsageError):
                parse(arguments, valued=("n",), flags=("v",))
