"""What kind of call a request is: who asks, beside which task, and whether for JSON."""
