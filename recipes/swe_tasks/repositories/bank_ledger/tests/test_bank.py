import unittest

from account import InsufficientFunds
from bank import Bank


class TestBank(unittest.TestCase):
    def setUp(self):
        self.bank = Bank()
        self.bank.open("ann", 100)
        self.bank.open("bob")

    def test_transfer(self):
        self.bank.transfer("ann", "bob", 30)
        self.assertEqual(self.bank.account("bob").balance, 30)
        self.assertEqual(self.bank.total(), 100)

    def test_overdraft_is_refused(self):
        with self.assertRaises(InsufficientFunds):
            self.bank.account("bob").withdraw(1)

    def test_one_account_each(self):
        with self.assertRaises(ValueError):
            self.bank.open("ann")
