"""Between a model's forward and the rows' loss: which outputs are computed, where rows read them, their weights."""
