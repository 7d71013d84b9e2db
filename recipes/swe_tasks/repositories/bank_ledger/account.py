"""An account that cannot be overdrawn."""


class InsufficientFunds(Exception):  # noqa: N818
    pass


class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.entries = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("an amount is positive")
        self.balance += amount
        self.entries.append(amount)

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("an amount is positive")
        if amount > self.balance:
            raise InsufficientFunds(f"{self.owner} has {self.balance}, needs {amount}")
        self.balance -= amount
        self.entries.append(-amount)
