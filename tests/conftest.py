"""Settings of the whole suite."""

import torch

torch.set_num_threads(1)
"""The towers of the tests are tiny: one thread is faster than two, and much faster where cores are shared."""
