"""Any architecture of transformers, run over our paged KV cache."""
