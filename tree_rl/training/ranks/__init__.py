"""How ranks stay together: one schedule of forwards and backwards, and recovery after a failure on one of them."""
