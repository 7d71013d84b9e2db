"""Updates on several GPUs: the engine of a rank, what it trains, and the verdict on what was measured."""
