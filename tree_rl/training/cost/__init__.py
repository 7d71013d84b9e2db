"""What a step's own calls cost, measured while it trains."""
