"""Accounts by owner, and transfers between them."""

from account import Account


class Bank:
    def __init__(self):
        self._accounts = {}

    def open(self, owner, balance=0):
        if owner in self._accounts:
            raise ValueError(f"{owner} has an account")
        self._accounts[owner] = Account(owner, balance)

    def account(self, owner):
        return self._accounts[owner]

    def transfer(self, source, target, amount):
        self.account(source).withdraw(amount)
        self.account(target).deposit(amount)

    def total(self):
        return sum(account.balance for account in self._accounts.values())
