import unittest

from account import InsufficientFunds
from bank import Bank


class TestBankIssue(unittest.TestCase):
    def test_failed_transfer_changes_nothing(self):
        bank = Bank()
        bank.open("ann", 100)
        bank.open("bob", 5)
        with self.assertRaises(InsufficientFunds):
            bank.transfer("ann", "bob", 500)
        self.assertEqual(bank.account("bob").balance, 5)
        self.assertEqual(bank.account("bob").entries, [])
        self.assertEqual(bank.total(), 105)

    def test_unknown_source_changes_nothing(self):
        bank = Bank()
        bank.open("bob", 5)
        with self.assertRaises(KeyError):
            bank.transfer("nobody", "bob", 1)
        self.assertEqual(bank.total(), 5)
