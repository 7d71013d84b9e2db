"""One thread: these models are too small for more."""

import torch

torch.set_num_threads(1)
