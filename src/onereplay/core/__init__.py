"""The core: integers, tensors and graphs. Imports no Hugging Face and no HTTP."""
