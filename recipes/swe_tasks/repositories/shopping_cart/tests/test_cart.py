import unittest

from cart import Cart, total_cents
from money import discounted, show
from receipt import receipt


class TestCart(unittest.TestCase):
    def test_receipt(self):
        cart = Cart()
        cart.add("pen", 150, 2)
        cart.add("pad", 99)
        self.assertEqual(receipt(cart), "2 x pen 3.00\n1 x pad 0.99\ntotal 3.99")

    def test_one_reduction_at_a_time(self):
        cart = Cart()
        cart.add("book", 1000)
        cart.percent = 25
        self.assertEqual(total_cents(cart), 750)
        cart.percent, cart.voucher_cents = 0, 1500
        self.assertEqual(total_cents(cart), 0)

    def test_money(self):
        self.assertEqual(discounted(5, 10), 5)
        self.assertEqual(show(5), "0.05")
