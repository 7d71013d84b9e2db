import unittest

from cart import Cart, total_cents
from receipt import receipt


class TestCartIssue(unittest.TestCase):
    def make(self, cents, voucher, percent):
        cart = Cart()
        cart.add("goods", cents)
        cart.voucher_cents, cart.percent = voucher, percent
        return cart

    def test_voucher_first(self):
        self.assertEqual(total_cents(self.make(10000, 2000, 10)), 7200)

    def test_on_the_receipt(self):
        self.assertTrue(receipt(self.make(999, 99, 50)).endswith("total 4.50"))
